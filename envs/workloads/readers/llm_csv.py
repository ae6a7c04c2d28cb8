"""Arrivals of language-model services without any text: Azure (2023, 2024) and BurstGPT."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from envs.workloads.entry import entry_bytes
from envs.workloads.readers.batch import LATEST, MOST_TOKENS, Batch, Column, Input, Verdict, make_batch
from envs.workloads.readers.tables import CsvTable
from serving.keys import mix64_array

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of the Azure files of both years (Azure/AzurePublicDataset)."""

BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens")
"""Columns of BurstGPT that are read; its files have Total tokens and Log Type too, newer ones Session ID and Elapsed time."""


class Azure:
    """Azure's arrivals: ``TIMESTAMP`` with up to 7 digits of a second (2024: with an offset), prompt and completion tokens."""

    note = (
        "Arrivals and token counts of a chat service (Azure, 2023). The prompts are not public: every request is a key of "
        "its own, so nothing can hit."
    )

    def __init__(self, given: Input) -> None:
        self._given = given
        self.tenants: list[str] = []

    def batches(self) -> Iterator[Batch]:
        """Yield the arrivals; :class:`envs.workloads.readers.batch.Reader`."""
        count = 0
        for frame in CsvTable(self._given, ["TIMESTAMP"], ["ContextTokens", "GeneratedTokens"]):
            verdict = Verdict(len(frame))
            time = moments(frame.texts["TIMESTAMP"])
            expected = "TIMESTAMP: a time like 2023-11-16 18:15:46.6805900"
            frame.require(verdict, np.isfinite(time) & (np.abs(time) <= LATEST), expected, "TIMESTAMP")
            frame.require_number(verdict, "ContextTokens", MOST_TOKENS)
            frame.require_number(verdict, "GeneratedTokens", MOST_TOKENS)
            if self.year is None and np.isfinite(time).any():
                self.year = datetime.fromtimestamp(time[np.isfinite(time)][0], UTC).year
                self.note = Azure.note.replace("2023", str(self.year))
            prompt = _tokens(frame.numbers["ContextTokens"])
            output = np.maximum(_tokens(frame.numbers["GeneratedTokens"]), 1)
            yield from verdict.sift(self._given, _arrivals(frame.line, time, prompt, output, count))
            count += len(frame)

    year: int | None = None


class BurstGpt:
    """BurstGPT's arrivals: ``Timestamp`` in seconds from the first day's midnight; the model is the tenant.

    A request whose response has no tokens failed: it has no answer and is left out.
    """

    note = (
        "Arrivals and token counts of ChatGPT and GPT-4 as a campus used them (BurstGPT); a tenant is a model. The prompts are "
        "not public: every request is a key of its own, so nothing can hit. Failed requests (no response tokens) are left out."
    )

    def __init__(self, given: Input) -> None:
        self._given = given
        self._number_of: dict[str, int] = {}

    @property
    def tenants(self) -> list[str]:
        """The models by number, as far as they were met."""
        return list(self._number_of)

    def batches(self) -> Iterator[Batch]:
        """Yield the arrivals; :class:`envs.workloads.readers.batch.Reader`."""
        count = 0
        for frame in CsvTable(self._given, ["Model"], ["Timestamp", "Request tokens", "Response tokens"]):
            verdict = Verdict(len(frame))
            frame.require_number(verdict, "Timestamp", LATEST)
            frame.require_number(verdict, "Request tokens", MOST_TOKENS)
            frame.require_number(verdict, "Response tokens", MOST_TOKENS)
            number_of = self._number_of
            output = _tokens(frame.numbers["Response tokens"])
            batch = _arrivals(frame.line, frame.numbers["Timestamp"], _tokens(frame.numbers["Request tokens"]), output, count)
            batch["tenant"][:] = [number_of.setdefault(model, len(number_of)) for model in frame.texts["Model"]]
            yield from verdict.sift(self._given, batch, output > 0)
            count += len(frame)


def _arrivals(
    line: npt.NDArray[np.int64],
    time: npt.NDArray[np.float64],
    prompt: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    before: int,
) -> Batch:
    return make_batch(
        time=time,
        line=line,
        key=mix64_array(np.arange(before, before + len(time), dtype=np.uint64)),
        size=entry_bytes(output, False),
        input_tokens=prompt,
        output_tokens=output,
    )


def _tokens(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return token counts as whole numbers; 0 for what is none, which the verdict rejects."""
    return np.where((numbers >= 0) & (numbers <= MOST_TOKENS), numbers, 0).astype(np.int64)


_DIGITS = [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18]
_MARKS = [4, 7, 13, 16]


def moments(texts: Column) -> npt.NDArray[np.float64]:
    """Return seconds since the epoch of ISO times, NaN for what is none; without an offset they are in UTC.

    The fraction of a second may have any number of digits.
    """
    count = len(texts)
    if not count:
        return np.empty(0)
    written = texts.astype(str)
    width = max(written.dtype.itemsize // 4, 20)
    marks = np.ascontiguousarray(written.astype(f"U{width}")).view(np.uint32).reshape(count, width)
    whole = np.ascontiguousarray(marks[:, :19]).view("U19").ravel()
    rest = np.ascontiguousarray(marks[:, 19:]).view(f"U{width - 19}").ravel()
    rest = np.char.replace(np.char.replace(rest, "+00:00", ""), "Z", "")
    digits = (marks[:, _DIGITS] >= ord("0")) & (marks[:, _DIGITS] <= ord("9"))
    between = (marks[:, 10] == ord(" ")) | (marks[:, 10] == ord("T"))
    regular = bool(digits.all() and between.all() and np.all(marks[:, _MARKS] == np.array([ord(mark) for mark in "--::"])))
    if regular and np.all((rest == "") | (np.char.startswith(rest, ".") & (rest != "."))):
        try:
            seconds = whole.astype("datetime64[s]").astype(np.int64).astype(np.float64)
            return seconds + np.char.add("0", np.where(rest == "", ".0", rest)).astype(np.float64)
        except ValueError:
            pass  # a 30th of February, or a fraction that is none: which row it is, is seen one by one
    return np.array([_moment(str(text)) for text in texts], np.float64)


def _moment(text: str) -> float:
    whole, dot, fraction = text.strip().partition(".")
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + fraction[len(digits) :])
        if dot and not digits:
            return float("nan")
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp() + float(f"0.{digits or 0}")
    except (ValueError, OverflowError):
        return float("nan")
