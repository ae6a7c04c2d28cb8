"""The words of the report: the method, and knobs in readable units."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from serving.knobs import MIB, Knobs

if TYPE_CHECKING:
    from experiments.analysis import Analysis


def knobs_text(knobs: Knobs) -> str:
    """Return knobs in readable units."""
    unit, name = size_unit(knobs.cache_size)
    return f"{knobs.cache_size / unit:.4g} {name}, {_ttl(knobs.ttl)}, warm {knobs.warmup_ratio:.2f}"


def size_unit(size: float) -> tuple[int, str]:
    """Return the unit in which a size is best read: its bytes and its name."""
    for unit, name in ((MIB << 10, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return unit, name
    return MIB >> 10, "KiB"


def _ttl(ttl: float) -> str:
    if math.isinf(ttl):
        return "no expiry"
    for unit, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if ttl >= 2 * unit:
            return f"{ttl / unit:.3g} {name}"
    return f"{ttl:.3g} s"


def method_section(analysis: Analysis, note: str) -> str:
    """Return the method section: what was clustered, how it was computed, what is assumed."""
    experiment, method = analysis.experiment, analysis.method
    prices = experiment.prices
    split = analysis.differences.split
    shares = ", ".join(f"{arm} {share:.0%}" for arm, share in experiment.shares.items())
    entries = [
        (
            "Clusters",
            "Keys. Arms are assigned by a hash of the key, and whether a request hits depends on the earlier requests of its "
            "key. Effective keys (Kish): the square of the sum of requests by key over the sum of their squares; it says how "
            "many equally busy keys would tell as much. A few hot keys make it small.",
        ),
        (
            "Hit ratio",
            "Hits over cacheable requests; a failed request counts as not hit. Standard error by the delta method: for each "
            "key its hits minus the arm's hit ratio times its requests, divided by one minus its share of the requests; then "
            "the root of the sum of squares over all requests. Interval by Student's t with Satterthwaite's degrees of "
            "freedom.",
        ),
        (
            "Cost",
            "US dollars per 1,000 requests: tokens of misses, tokens of refreshes, the value of waiting, reserved memory, "
            "expected stale answers, P99 above its objective, and changes of knobs. Its standard error is the larger of the "
            f"linearised one (as above) and that of {method.replicates} bootstrap replicates that draw whole keys (Poisson "
            f"weights, seed {method.seed}).",
        ),
        ("P99", f"Percentiles of the same {method.replicates} replicates. With few effective keys this interval is too narrow."),
        ("Difference", "Treatment minus control. The arms have no key in common, so their variances add."),
        (
            "Split",
            f"Designed: {shares}. Chi-square test on the number of keys: "
            + (f"p = {split:.2g}." if math.isfinite(split) else "no keys."),
        ),
        (
            "Verdict",
            f"By the {method.confidence:.0%} interval of the cost difference alone; hit ratio and P99 stand beside it. There "
            "is no correction for looking repeatedly, and none for the luck of which arm the hottest keys fell to beyond "
            "what the clustered interval holds.",
        ),
        (
            "Prices",
            f"${prices.input_mtok:g} and ${prices.output_mtok:g} per million prompt and completion tokens, "
            f"${prices.memory_gib_hour:g} per GiB-hour, ${prices.latency_second:g} per second waited, "
            f"${prices.stale_answer:g} per stale answer, ${prices.slo_second:g} per 1,000 requests and second of P99 above "
            f"{prices.slo_p99:g} s, ${prices.change_step:g} per 1,000 requests and grid step of change."
            + (f" One second of the run is {prices.time_scale:,.0f} s of the workload." if prices.time_scale != 1 else ""),
        ),
    ]
    if note:
        entries.append(("Workload", note))
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries) + "</dl>"
