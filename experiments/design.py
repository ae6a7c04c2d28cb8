"""What an experiment is: two arms, disjoint sets of keys, a period, and the prices by which they are compared."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from envs.objective import Prices
from serving.knobs import Knobs, KnobSpace

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class DesignError(ValueError):
    """An experiment that cannot be run as described."""


@dataclass(frozen=True)
class Experiment:
    """One comparison of two arms on one gateway.

    Attributes:
        name: Unique in its ledger: letters, digits, ``.``, ``_``, ``-``, at most 64.
        namespace: The namespace of the gateway's cache and knobs.
        control: Name of the arm that is compared against.
        treatment: Name of the arm whose effect is asked for.
        salt: Goes into the hash that assigns keys to arms; a new salt is a new random split.
        shares: Share of the keys by arm, > 0 each, sum 1; equal if not given.
        started_at: Seconds since the epoch; requests before it do not count. 0: from the first request.
        ended_at: Seconds since the epoch; None while it runs.
        prices: What things cost.
        slo: Objective on P99, seconds; ``prices.slo_p99`` where it is not given, and the two are always equal.
        note: What a reader of the report has to know (which workload, how time was compressed).
        knobs: Knobs of each arm at the start. Needed where the ledger has no decisions for an arm.
        space: The knob space, whose grid steps price a change.

    Raises:
        DesignError: If names are not valid or shares do not fit the arms.
    """

    name: str
    namespace: str
    control: str = "control"
    treatment: str = "treatment"
    salt: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    ended_at: float | None = None
    prices: Prices = field(default_factory=Prices)
    slo: float | None = None
    note: str = ""
    knobs: Mapping[str, Knobs] = field(default_factory=dict)
    space: KnobSpace = field(default_factory=KnobSpace)

    def __post_init__(self) -> None:
        for what in ("name", "control", "treatment"):
            value = getattr(self, what)
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise DesignError(
                    f"experiment: {what}: expected 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit; "
                    f"got {value!r}"
                )
        if self.control == self.treatment:
            raise DesignError(f"experiment {self.name}: control and treatment are both {self.control!r}: name two different arms")
        shares = dict(self.shares) or {self.control: 0.5, self.treatment: 0.5}
        if set(shares) != set(self.arms):
            raise DesignError(f"experiment {self.name}: shares: expected the arms {sorted(self.arms)}, got {sorted(shares)}")
        if not all(math.isfinite(share) and share > 0 for share in shares.values()) or abs(sum(shares.values()) - 1.0) > 1e-6:
            raise DesignError(f"experiment {self.name}: shares: expected numbers > 0 that sum to 1, got {shares}")
        unknown = set(self.knobs) - set(self.arms)
        if unknown:
            raise DesignError(f"experiment {self.name}: knobs: no arm is called {sorted(unknown)}; arms are {sorted(self.arms)}")
        if not (math.isfinite(self.started_at) and self.started_at >= 0):
            raise DesignError(f"experiment {self.name}: started_at: expected seconds since the epoch, got {self.started_at!r}")
        if self.ended_at is not None and not (math.isfinite(self.ended_at) and self.ended_at >= self.started_at):
            raise DesignError(
                f"experiment {self.name}: ended_at: expected seconds since the epoch, not before started_at ({self.started_at}), "
                f"got {self.ended_at!r}"
            )
        if self.slo is not None and self.slo != self.prices.slo_p99:
            object.__setattr__(self, "prices", replace(self.prices, slo_p99=self.slo))
        object.__setattr__(self, "slo", self.prices.slo_p99)
        object.__setattr__(self, "shares", MappingProxyType(shares))
        object.__setattr__(self, "knobs", MappingProxyType(dict(self.knobs)))

    @property
    def arms(self) -> tuple[str, str]:
        """The names of the control and of the treatment, in this order."""
        return self.control, self.treatment

    def changed(self, **changes: Any) -> Experiment:
        """Return a copy with some fields changed; new ``prices`` bring their own objective on P99.

        Raises:
            DesignError: If a field is unknown or a value does not fit.
        """
        unknown = set(changes) - {item.name for item in fields(self)}
        if unknown:
            raise DesignError(f"experiment {self.name}: unknown {sorted(unknown)}")
        if "prices" in changes:
            changes.setdefault("slo", None)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping from which :meth:`from_dict` builds the same experiment."""
        return {
            "name": self.name,
            "namespace": self.namespace,
            "control": self.control,
            "treatment": self.treatment,
            "salt": self.salt,
            "shares": dict(self.shares),
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "prices": {item.name: getattr(self.prices, item.name) for item in fields(Prices)},
            "note": self.note,
            "knobs": {arm: knobs.to_dict() for arm, knobs in self.knobs.items()},
            "space": {item.name: getattr(self.space, item.name) for item in fields(KnobSpace) if item.init},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """Build from :meth:`to_dict`'s form.

        Raises:
            DesignError: If a key is unknown or a value does not fit.
        """
        known = {item.name for item in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise DesignError(f"experiment: unknown {sorted(unknown)}; known are {sorted(known)}")
        kwargs = dict(values)
        try:
            if "prices" in kwargs:
                kwargs["prices"] = Prices(**kwargs["prices"])
            if "space" in kwargs:
                kwargs["space"] = KnobSpace(**kwargs["space"])
            if "knobs" in kwargs:
                kwargs["knobs"] = {arm: Knobs.from_dict(knobs) for arm, knobs in kwargs["knobs"].items()}
            return cls(**kwargs)
        except DesignError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise DesignError(f"experiment {values.get('name', '')!r}: {error}") from error
