"""Settings of the environments: what things cost, the simulated cache, the made workload. Unknown keys are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from envs.objective import Prices
from envs.price_book import load_price_book
from envs.simulator.config import MemoryEviction, SimConfig
from envs.workloads.catalogue import find, make
from envs.workloads.generators import sessions
from envs.workloads.trace import Trace
from serving.latency import UpstreamModel
from serving.settings import Seconds, Settings, Share, SpaceSettings, WarmupSettings

Dollars = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_PRICES = Prices()
_SIM = SimConfig()


class PricesSettings(Settings):
    """What things cost, in US dollars, and the latency objective; see :class:`envs.objective.Prices`."""

    input_mtok: Dollars = _PRICES.input_mtok
    output_mtok: Dollars = _PRICES.output_mtok
    memory_gib_hour: Dollars = _PRICES.memory_gib_hour
    latency_second: Dollars = _PRICES.latency_second
    stale_answer: Dollars = _PRICES.stale_answer
    slo_p99: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = _PRICES.slo_p99
    slo_second: Dollars = _PRICES.slo_second
    change_step: Dollars = _PRICES.change_step
    time_scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = _PRICES.time_scale

    def to_prices(self) -> Prices:
        """Return the prices."""
        return Prices(**self.model_dump())


class UpstreamModelSettings(Settings):
    """Latency of the simulated model; see :class:`serving.latency.UpstreamModel`."""

    slots: Annotated[int, Field(ge=1)] = _SIM.upstream.slots
    ttft: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = _SIM.upstream.ttft
    tpot: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = _SIM.upstream.tpot
    contention: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = _SIM.upstream.contention

    def to_model(self) -> UpstreamModel:
        """Return the latency model."""
        return UpstreamModel(**self.model_dump())


class SimulatorSettings(Settings):
    """The simulated cache.

    Attributes:
        space: Bounds and grid of the knobs.
        l1_share: Share of ``cache_size`` that may be resident in the memory tier.
        memory_eviction: Who goes from the memory tier: ``clock`` as in the arena that replicas share, ``lru`` as in one's own.
        store: Whether there is a store behind the memory tier; without one the memory tier is the whole cache.
        ttl_jitter: Width of the per-key jitter on the TTL.
        staleness_half_life: Seconds after which an answer is outdated with probability one half; null means never.
        upstream: Latency of the model.
        memory_latency: Seconds of a hit in the memory tier.
        store_latency: Seconds of a hit in the store.
        warmup: Background refreshing.
        ghost_keys: Keys that the ghost tracks at most; 0 for no ghost.
    """

    space: SpaceSettings = SpaceSettings()
    l1_share: Share = _SIM.l1_share
    memory_eviction: MemoryEviction = _SIM.memory_eviction
    store: bool = _SIM.store
    ttl_jitter: Annotated[float, Field(ge=0.0, lt=1.0)] = _SIM.ttl_jitter
    staleness_half_life: Seconds | None = None
    upstream: UpstreamModelSettings = UpstreamModelSettings()
    memory_latency: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = _SIM.memory_latency
    store_latency: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = _SIM.store_latency
    warmup: WarmupSettings = WarmupSettings()
    ghost_keys: Annotated[int, Field(ge=0)] = _SIM.ghost_keys

    def to_config(self, prices: Prices | None = None, *, arm: str = _SIM.arm) -> SimConfig:
        """Return the simulator's configuration.

        Args:
            prices: What the regret is priced with; None for the defaults.
            arm: Name of the arm in the signals.

        Raises:
            ValueError: If values do not go together.
        """
        return SimConfig(
            space=self.space.space(),
            l1_share=self.l1_share,
            memory_eviction=self.memory_eviction,
            store=self.store,
            ttl_jitter=self.ttl_jitter,
            staleness_half_life=math.inf if self.staleness_half_life is None else self.staleness_half_life,
            upstream=self.upstream.to_model(),
            memory_latency=self.memory_latency,
            store_latency=self.store_latency,
            warmup=self.warmup.rules(),
            refreshes_inflight=self.warmup.max_inflight,
            ghost_keys=self.ghost_keys,
            prices=prices or Prices(),
            arm=arm,
        )

    @model_validator(mode="after")
    def _consistent(self) -> SimulatorSettings:
        self.to_config()
        return self


class WorkloadSettings(Settings):
    """The made workload: sessions (:func:`envs.workloads.generators.sessions`), or another by its spec.

    Attributes:
        spec: A workload of :data:`envs.workloads.WORKLOADS` as :func:`envs.workloads.make` takes it
            (``made:flash-crowd?share=0.6&seed=3``); it holds all there is to say, so no other field may be set beside it.
        n_requests: Requests.
        n_keys: Meanings that are asked for at any one time.
        alpha: Zipf exponent of their popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        duration: Length, seconds.
        diurnal: Amplitude of the load's daily swing.
        day: Period of the swing, seconds; null for one day, or for the whole of a shorter trace.
        hot_swaps: Times, seconds, at which popularity is dealt anew among the keys.
        repeat: Probability that a request asks the same as the one before it in its session.
        session_length: Requests per session on average.
        think_time: Seconds between two requests of a session on average.
        text: Whether requests have texts, several of which mean the same.
        seed: Of everything random.
    """

    spec: str | None = None
    n_requests: Annotated[int, Field(ge=1)] = 100_000
    n_keys: Annotated[int, Field(ge=1)] = 20_000
    alpha: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.9
    drift: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.5
    duration: Seconds = 3600.0
    diurnal: Share = 0.5
    day: Seconds | None = None
    hot_swaps: tuple[Annotated[float, Field(ge=0.0, allow_inf_nan=False)], ...] = ()
    repeat: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    session_length: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 4.0
    think_time: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 20.0
    text: bool = False
    seed: Annotated[int, Field(ge=0)] = 0

    def generate(self) -> Trace:
        """Make the workload.

        Raises:
            TraceError: If the spec has a parameter that is not known, or a value out of its range.
        """
        return sessions(**self.model_dump(exclude={"spec"})) if self.spec is None else make(self.spec)

    @model_validator(mode="after")
    def _spec_alone(self) -> WorkloadSettings:
        if self.spec is not None:
            others = sorted(name for name in self.model_fields_set - {"spec"} if getattr(self, name) != _field_default(name))
            if others:
                raise ValueError(f"expected either spec or single values, got spec {self.spec!r} and {', '.join(others)}")
            find(self.spec)
        return self


def _field_default(name: str) -> Any:
    return WorkloadSettings.model_fields[name].default


class EnvsSettings(Settings):
    """Everything about the environments.

    Attributes:
        prices_file: A price book instead of the package's own (``envs/prices.yaml``); null for that one.
        prices: What things cost, and the latency objective: single values here go before the book's.
        simulator: The simulated cache.
        workload: The made workload.
    """

    prices_file: Path | None = None
    prices: PricesSettings = PricesSettings()
    simulator: SimulatorSettings = SimulatorSettings()
    workload: WorkloadSettings = WorkloadSettings()

    @model_validator(mode="before")
    @classmethod
    def _book_before_defaults(cls, values: Any) -> Any:
        """Fill in what the named book says and the settings do not."""
        if not isinstance(values, dict) or not isinstance(values.get("prices_file"), (str, Path)):
            return values
        own = values.get("prices") or {}
        if isinstance(own, PricesSettings):
            own = own.model_dump(exclude_unset=True)
        if not isinstance(own, dict):
            return values
        return {**values, "prices": {**load_price_book(values["prices_file"]).values(), **own}}

    def to_config(self) -> SimConfig:
        """Return the simulator's configuration, priced."""
        return self.simulator.to_config(self.prices.to_prices())
