"""ServeGen slots: rates by client and slot, made into requests by drawing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from envs.workloads.entry import entry_bytes
from envs.workloads.readers.batch import LATEST, Batch, Input, Verdict, make_batch
from envs.workloads.readers.tables import CsvTable
from serving.keys import mix64_array

KEYS_PER_CLIENT = 20_000
ALPHA = 0.9
MOST_PER_SLOT = 20_000_000
"""Requests of one slot that are still drawn: a scale that makes more is a mistake."""


class ServeGen:
    """Requests whose rates are ServeGen's (alibaba/ServeGen, aggregated by slot) and of which all else is drawn.

    The arrivals of a client within a slot are a renewal process with Gamma gaps at the client's rate and the slot's coefficient
    of variation (Poisson where that is 1), in equilibrium from the slot's first moment. A client is a tenant with keys of its
    own, asked by Zipf's law; a key's answer has the same length whenever it is asked.

    Args:
        given: The file; its ``rate_scale`` multiplies the rates, its ``seed`` chooses all that is drawn.
    """

    def __init__(self, given: Input) -> None:
        self._given = given
        self._popularity = np.cumsum(np.arange(1, KEYS_PER_CLIENT + 1, dtype=np.float64) ** -ALPHA)
        self.tenants: list[str] = []
        self.note = (
            "Semi-synthetic: arrival rates and burstiness by client of a production service (ServeGen, 600 s slots), rates times "
            f"{given.rate_scale:g}; arrivals are drawn (Gamma gaps), and so are keys (Zipf {ALPHA:g} over "
            f"{KEYS_PER_CLIENT:,} per client) and lengths. A tenant is a client; seed {given.seed}."
        )

    def batches(self) -> Iterator[Batch]:
        """Yield the requests slot by slot; :class:`envs.workloads.readers.batch.Reader`."""
        header = self._given.source.head().split(b"\n", 1)[0].decode(errors="replace").strip().removeprefix("\ufeff").split(",")
        rates = [name for name in header if name.startswith("rate_") and name != "rate_total"] or ["rate_total"]
        self.tenants = [name.removeprefix("rate_") for name in rates]
        waiting: tuple[float, npt.NDArray[np.float64], float, int] | None = None
        length = 600.0
        for frame in CsvTable(self._given, [], ["time_s", "cv_rate_weighted", *rates]):
            verdict = Verdict(len(frame))
            frame.require_number(verdict, "time_s", LATEST)
            frame.require_number(verdict, "cv_rate_weighted", 1e3)
            for name in rates:
                frame.require_number(verdict, name, 1e9)
            for row in range(len(frame)):
                if not verdict.good[row]:
                    self._given.reject(verdict.error(row))
                    continue
                slot = (
                    float(frame.numbers["time_s"][row]),
                    np.array([frame.numbers[name][row] for name in rates]),
                    float(frame.numbers["cv_rate_weighted"][row]),
                    int(frame.line[row]),
                )
                # A slot lasts until the next begins; the last one as long as the one before it.
                if waiting is not None:
                    if slot[0] > waiting[0]:
                        length = min(length, slot[0] - waiting[0])
                    yield from self._slot(length, *waiting)
                waiting = slot
        if waiting is not None:
            yield from self._slot(length, *waiting)

    def _slot(self, length: float, start: float, rates: npt.NDArray[np.float64], variation: float, line: int) -> Iterator[Batch]:
        rates = rates * self._given.rate_scale
        if rates.sum() * length > MOST_PER_SLOT:
            raise self._given.error(
                f"at most {MOST_PER_SLOT:,} requests in a slot: choose a smaller rate_scale", line, f"{rates.sum() * length:.0f}"
            )
        random = np.random.default_rng([self._given.seed, line])
        times, tenants = [], []
        for tenant, rate in enumerate(rates):
            if rate > 0:
                arrived = renewals(random, rate, variation, length)
                times.append(start + arrived)
                tenants.append(np.full(len(arrived), tenant, np.int32))
        if not times:
            return
        time = np.concatenate(times)
        order = np.argsort(time, kind="stable")
        client = np.concatenate(tenants)[order]
        rank = np.searchsorted(self._popularity, random.random(len(time)) * self._popularity[-1], side="right")
        name = (client.astype(np.uint64) << np.uint64(32)) + rank.astype(np.uint64)
        key = mix64_array(name ^ (np.uint64(self._given.seed & 0xFFFFFFFF) << np.uint64(40)))
        uniform = mix64_array(key) / 2.0**64
        tokens = np.clip(np.round(120.0 * (1.0 - uniform) ** -0.4), 16, 2048).astype(np.int64)
        asked = np.clip(np.round(200.0 * (1.0 - mix64_array(key ^ np.uint64(1)) / 2.0**64) ** -0.4), 16, 4096)
        yield make_batch(
            time=time[order],
            line=np.full(len(time), line),
            key=key,
            size=entry_bytes(tokens, False),
            input_tokens=asked,
            output_tokens=tokens,
            tenant=client,
        )


def renewals(random: np.random.Generator, rate: float, variation: float, length: float) -> npt.NDArray[np.float64]:
    """Draw arrivals in 0..``length`` seconds of a renewal process in equilibrium with Gamma gaps.

    Args:
        random: Where the numbers come from.
        rate: Mean arrivals a second, > 0.
        variation: Coefficient of variation of the gaps; 1 is a Poisson process. Held within 0.05..20.
        length: Seconds.

    Returns:
        Ascending arrival times, float64, shape (N,).
    """
    shape = 1.0 / min(max(variation, 0.05), 20.0) ** 2
    scale = 1.0 / (rate * shape)
    # The gap that lies over the first moment is a long one: its length is drawn by length, the moment uniformly within.
    first = random.gamma(shape + 1.0, scale) * random.random()
    parts, end = [np.array([first])], first
    while end < length:
        gaps = random.gamma(shape, scale, int((length - end) * rate * 1.1) + 16)
        more = end + np.cumsum(gaps)
        parts.append(more)
        end = float(more[-1])
    times = np.concatenate(parts)
    return times[times < length]
