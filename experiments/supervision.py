"""How well supervision works: the error of the estimated cost, good policies that are benched, how soon bad ones are.

    python -m experiments.supervision --traces FOLDER

Every policy plays the cases of :mod:`experiments.suites` beside a second simulated cache that the curve tunes on the very same
requests: what the supervisor estimates is compared with what that cache cost. The policy stays in charge
throughout; when it would have been benched follows from the evidence, since up to then both runs are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.curve import CurvePolicy, OffsetPolicy
from agents.output_file import OutputError, write_output
from agents.policy import Policy, Proposal
from agents.registry import load_policy
from agents.supervised import SupervisedPolicy, Supervision, weigh
from envs.observation import Observation
from envs.task import Scenario
from envs.workloads.errors import TraceError
from experiments.play import play_all
from experiments.suites import held_out

Floats = npt.NDArray[np.float64]

BREAKS_AT = 100
"""Interval from which on a sabotaged policy is bad; before, it is the curve."""

WATCHED = 120
"""Intervals for which a sabotaged policy is watched after that."""

OFFSETS: tuple[tuple[float, float, float], ...] = (
    (0.5, 0.0, 0.0), (-0.5, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (2.0, 0.5, 0.0), (1.0, 0.0, 1.0), (0.0, -0.5, 0.0),
)  # fmt: skip
"""Constant residuals around the curve's optimum: policies about as good as the curve, of which some are better, some worse."""


class Sabotaged:
    """The curve until :data:`BREAKS_AT`, then something bad for ever.

    Args:
        name: What it becomes.
        steps: Returns the grid steps that it goes to, from the observation and a random generator.
    """

    def __init__(self, name: str, steps: Callable[[Observation, np.random.Generator], Sequence[float]]) -> None:
        self.name = name
        self._steps = steps
        self._curve = CurvePolicy()
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._seen = 0
        self._rng = np.random.default_rng(0)

    def decide(self, observation: Observation) -> Proposal:
        """Return the curve's proposal, later the bad one."""
        self._seen += 1
        if self._seen <= BREAKS_AT:
            return self._curve.decide(observation)
        return Proposal(observation.space.from_steps(self._steps(observation, self._rng)), "sabotaged")


def sabotages() -> list[Sabotaged]:
    """Return one of each kind: a constant action, random knobs, everything to its minimum, the least size, knobs that stick."""

    def offset(observation: Observation, rng: np.random.Generator) -> Sequence[float]:
        anchor = observation.space.to_steps(observation.anchor or observation.knobs)
        return [anchor[0] + 3.0, anchor[1] - 2.0, 0.0]

    def anywhere(observation: Observation, rng: np.random.Generator) -> Sequence[float]:
        space = observation.space
        return [float(rng.uniform(0, most - 1)) for most in (space.size_steps, space.ttl_steps, space.warmup_steps)]

    return [
        Sabotaged("+3 sizes, -2 TTLs", offset),
        Sabotaged("random", anywhere),
        Sabotaged("all to the minimum", lambda observation, rng: [0.0, 0.0, 0.0]),
        Sabotaged("least size", lambda observation, rng: [0.0, observation.space.ttl_steps - 1.0, 0.0]),
        Sabotaged("stuck", lambda observation, rng: list(observation.space.to_steps(observation.knobs))),
    ]


@dataclass(frozen=True)
class Trial:
    """A policy on a case, with all that could be estimated.

    Attributes:
        policy: The policy's name.
        case: The case's name.
        ours: Dollars of each interval, shape (W,).
        truth: Dollars of the reference's cache, likewise.
        estimate: Dollars that the supervisor takes the curve to have cost; NaN where it could not tell.
    """

    policy: str
    case: str
    ours: Floats
    truth: Floats
    estimate: Floats

    def excess(self, first: int = 0) -> float:
        """Return the true excess over the curve as a share of the curve's cost, from an interval on."""
        return float((self.ours - self.truth)[first:].sum() / max(self.truth[first:].sum(), 1e-300))

    def estimated_excess(self) -> float:
        """Return the estimated one, where there is an estimate."""
        known = ~np.isnan(self.estimate)
        return float((self.ours - self.estimate)[known].sum() / max(self.truth[known].sum(), 1e-300))

    def errors(self) -> Floats:
        """Return the estimate's errors as shares of the curve's mean cost of an interval."""
        known = ~np.isnan(self.estimate)
        errors: Floats = (self.estimate - self.truth)[known] / max(float(self.truth[known].mean()), 1e-300)
        return errors

    def benched_at(self, supervision: Supervision) -> int | None:
        """Return the first interval after which the policy would have been benched, from 0; None if never."""
        pairs: list[tuple[float, float]] = []
        for interval, (ours, estimate) in enumerate(zip(self.ours, self.estimate, strict=True)):
            if math.isnan(estimate):
                continue
            pairs = [*pairs[1 - supervision.window :], (float(ours - estimate), float(estimate))]
            found = weigh(pairs, supervision.margin)
            if found.intervals >= supervision.least and found.t >= supervision.certainty:
                return interval
        return None


class Watched:
    """A policy that is supervised but never benched for what it costs; remembers what the curve was estimated to cost.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._supervised = SupervisedPolicy(policy, supervision=Supervision(certainty=1e300))
        self.name = policy.name
        self.estimates: list[float] = []

    def reset(self) -> None:
        """Begin anew."""
        self._supervised.reset()
        self.estimates = []

    def decide(self, observation: Observation) -> Proposal:
        """Return the policy's proposal, and note the estimate for the interval that has ended: dollars, NaN without."""
        proposal = self._supervised.decide(observation)
        cost = proposal.details.get("reference_cost", math.nan)
        self.estimates.append(cost * observation.signals.requests / 1000.0)
        return proposal


def play(policies: Sequence[Policy], case: str, scenario: Scenario, *, length: int, seed: int = 0) -> list[Trial]:
    """Let policies play a case side by side, and the curve in a cache of its own beside them.

    Args:
        policies: The policies; they are reset first.
        case: The case's name.
        scenario: Trace, cache and interval.
        length: Most intervals after the first.
        seed: Chooses the ghost's sample.
    """
    watched = [Watched(policy) for policy in policies]
    truth, *runs = play_all([CurvePolicy(), *watched], scenario, length=length, seed=seed)
    # What was estimated of an interval is said at the decision after it; after the last one there is none.
    return [
        Trial(run.policy, case, run.dollars[:-1], truth.dollars[:-1], np.array(each.estimates[1:], np.float64))
        for run, each in zip(runs, watched, strict=True)
    ]


def summary(good: Sequence[Trial], bad: Sequence[Trial], supervision: Supervision) -> dict[str, Any]:
    """Return what the trials say, JSON-ready.

    Args:
        good: Policies in their right mind.
        bad: Sabotaged ones.
        supervision: When they are benched.
    """
    as_good = [trial for trial in good if trial.excess() <= 0.0]
    falsely = [trial for trial in as_good if trial.benched_at(supervision) is not None]
    early = [trial for trial in bad if (at := trial.benched_at(supervision)) is not None and at < BREAKS_AT]
    estimator = []
    for name in dict.fromkeys(trial.policy for trial in good):
        own = [trial for trial in good if trial.policy == name]
        estimator.append(
            {
                "policy": name,
                "true_excess": float(np.mean([trial.excess() for trial in own])),
                "estimated_excess": float(np.mean([trial.estimated_excess() for trial in own])),
                "bias": float(np.mean([-trial.errors().mean() for trial in own])),
                "sd_of_an_interval": float(np.mean([trial.errors().std() for trial in own])),
                "benched": sum(trial.benched_at(supervision) is not None for trial in own),
                "runs": len(own),
            }
        )
    detection = []
    for name in dict.fromkeys(trial.policy for trial in bad):
        own = [trial for trial in bad if trial.policy == name]
        harmful = [trial for trial in own if trial.excess(BREAKS_AT) > 2 * supervision.margin]
        ends = [trial.benched_at(supervision) for trial in harmful]
        delays = sorted(end - BREAKS_AT + 1 for end in ends if end is not None and end >= BREAKS_AT)
        detection.append(
            {
                "policy": name,
                "runs": len(own),
                "harmful": len(harmful),
                "benched": len(delays),
                "median_delay": float(np.median(delays)) if delays else None,
                "longest_delay": max(delays, default=None),
                "missed_excess": [round(t.excess(BREAKS_AT), 3) for t, end in zip(harmful, ends, strict=True) if end is None],
            }
        )
    return {
        "supervision": asdict(supervision),
        "estimator": estimator,
        "false_benches": {
            "as_good_as_the_curve": len(as_good),
            "benched": len(falsely),
            "share": len(falsely) / len(as_good) if as_good else None,
            "which": [f"{trial.policy} on {trial.case} ({trial.excess():+.1%})" for trial in falsely],
            "sabotaged_before_they_broke": len(early),
        },
        "detection": detection,
    }


def text(found: dict[str, Any]) -> str:
    """Return a summary in words and tables."""
    lines = [f"{'policy':24} {'true':>8} {'estimate':>9} {'bias':>8} {'sd':>7} {'benched':>9}"]
    lines += [
        f"{row['policy']:24} {row['true_excess']:+8.2%} {row['estimated_excess']:+9.2%} {row['bias']:+8.2%} "
        f"{row['sd_of_an_interval']:7.2%} {row['benched']:5}/{row['runs']}"
        for row in found["estimator"]
    ]
    false = found["false_benches"]
    lines.append(f"not worse than the curve over a whole run: {false['as_good_as_the_curve']} runs, benched: {false['benched']}")
    lines += [f"  {which}" for which in false["which"]]
    lines.append(f"{'sabotaged':24} {'harmful':>9} {'benched':>8} {'median':>7} {'longest':>8}")
    lines += [
        f"{row['policy']:24} {row['harmful']:6}/{row['runs']} {row['benched']:8} {row['median_delay'] or '-':>7} "
        f"{row['longest_delay'] or '-':>8}" + (f"  missed: {row['missed_excess']}" if row["missed_excess"] else "")
        for row in found["detection"]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.supervision", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the real traces")
    parser.add_argument("--each", type=int, default=1, help="cases of each non-stationary family")
    parser.add_argument("--intervals", type=int, default=500, help="most intervals of a run")
    parser.add_argument("--policy", action="append", default=[], help="further policies by name, beside constant offsets")
    parser.add_argument("--json", type=Path, help="write the summary here as well")
    options = parser.parse_args(arguments)
    try:
        cases = held_out(options.traces, each=options.each)
        extra = [load_policy(name) for name in options.policy]
    except (TraceError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    good: list[Trial] = []
    bad: list[Trial] = []
    for number, case in enumerate(cases):
        usual = (*map(OffsetPolicy, OFFSETS), load_policy("last-curve"), *extra)
        good += play(usual, case.name, case.scenario, length=options.intervals, seed=number)
        bad += play(sabotages(), case.name, case.scenario, length=BREAKS_AT + WATCHED, seed=number)
        sys.stderr.write(f"{case.name}: {number + 1} of {len(cases)} cases\n")
    found = summary(good, bad, Supervision())
    sys.stdout.write(text(found) + "\n")
    if options.json is not None:
        try:
            write_output(options.json, json.dumps(found, indent=2) + "\n")
        except OutputError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
