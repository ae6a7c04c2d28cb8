"""The settings of the simulated model server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from serving.latency import UpstreamModel
from serving.settings.base import Port, Settings, Share


class LlmSimSettings(Settings):
    """The simulated model server.

    Attributes:
        host: Address it listens on.
        port: Its port; 0 takes a free one.
        model: The name it serves; a request for another name is a 404, as with a real server.
        revision: Changes every answer, as a new checkpoint does.
        slots: Requests that run at the same time.
        ttft: Seconds to the first token.
        tpot: Seconds per output token of a request that runs alone.
        contention: Relative slowdown per token when all slots are busy.
        min_output_tokens: Least length of an answer whose length is not given.
        max_output_tokens: Greatest length of such an answer.
        kv_cache_tokens: Tokens that fit into the KV cache, for the usage gauge.
        failure_rate: Share of completions that are answered with 500 or 503 (half of them each), to test what is in front of it.
        hang_rate: Share of completions that are never answered.
        cut_rate: Share of completions of which the second half is missing, ``finish_reason`` and ``[DONE]`` included.
        fault_seed: Of the choice which completions fail, hang or are cut: a function of it and of their number since the start.
        log_level: Of the HTTP server.
    """

    host: str = "127.0.0.1"
    port: Port = 8001
    model: Annotated[str, Field(min_length=1)] = "llm-sim"
    revision: str = "1"
    slots: Annotated[int, Field(ge=1)] = 8
    ttft: Annotated[float, Field(ge=0.0)] = 0.08
    tpot: Annotated[float, Field(ge=0.0)] = 0.002
    contention: Annotated[float, Field(ge=0.0)] = 0.5
    min_output_tokens: Annotated[int, Field(ge=1)] = 16
    max_output_tokens: Annotated[int, Field(ge=1)] = 256
    kv_cache_tokens: Annotated[int, Field(ge=1)] = 65_536
    failure_rate: Share = 0.0
    hang_rate: Share = 0.0
    cut_rate: Share = 0.0
    fault_seed: int = 0
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"

    @model_validator(mode="after")
    def _ordered(self) -> LlmSimSettings:
        if self.min_output_tokens > self.max_output_tokens:
            raise ValueError(
                f"expected min_output_tokens <= max_output_tokens, got {self.min_output_tokens} and {self.max_output_tokens}"
            )
        if (faulty := self.failure_rate + self.hang_rate + self.cut_rate) > 1.0:
            raise ValueError(f"expected failure_rate + hang_rate + cut_rate <= 1, got {faulty:g}")
        return self

    def upstream_model(self) -> UpstreamModel:
        """Return the latency model."""
        return UpstreamModel(self.slots, self.ttft, self.tpot, self.contention)
