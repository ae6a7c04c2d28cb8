import pandas as pd
import pytest

from experiments.analysis import analyse
from experiments.measure import Method
from experiments.verdict import BASIS
from serving.knobs import MIB, Knobs
from tests.experiments.samples import START, curve, decision, experiment, frame, traffic

QUICK = Method(replicates=100)
LIKE, UNLIKE = traffic(1), traffic(1, memory=(3.0, 60.0))


def outcome(log, decisions=(), design=None):
    analysis = analyse(design or experiment(), list(decisions), log, method=QUICK, windows=6)
    return analysis.verdict, analysis


def test_a_clearly_cheaper_treatment_is_better_and_a_dearer_one_worse():
    verdict, analysis = outcome(UNLIKE)
    assert verdict.outcome == "treatment better"
    assert "wholly below 0" in verdict.reason
    assert analysis.differences.cost.high < 0
    swapped = UNLIKE.assign(arm=UNLIKE["arm"].map({"control": "treatment", "treatment": "control"}))
    verdict, _ = outcome(swapped)
    assert verdict.outcome == "control better"
    assert "wholly above 0" in verdict.reason


def test_like_arms_show_no_difference_and_the_reason_has_the_numbers():
    verdict, analysis = outcome(LIKE)
    assert verdict.outcome == "no difference shown"
    assert "which holds 0" in verdict.reason
    for number in (f"{analysis.treatment.hit_ratio.value:.1%}", f"${analysis.control.cost.value:.4f}", "95% interval", "P99"):
        assert number in verdict.reason


def test_every_verdict_says_what_it_stands_on():
    verdict, _ = outcome(LIKE)
    assert verdict.basis == BASIS
    for words in ("clustered by key", "different keys", "Looking repeatedly is not corrected for"):
        assert words in verdict.basis


@pytest.mark.parametrize(
    ("log", "changes", "words"),
    [
        (LIKE[LIKE["arm"] == "control"], {}, "Arm treatment served no request"),
        (LIKE[:0], {}, "Arm control served no request"),
        (LIKE, {"knobs": {}}, "its knobs are not"),
        (LIKE, {"shares": {"control": 0.9, "treatment": 0.1}}, "Keys were not split as designed"),
        (traffic(1, requests=40, keys=12), {}, "different keys; below 10"),
    ],
)
def test_what_cannot_be_compared_is_not_enough_data_with_the_reason(log, changes, words):
    verdict, analysis = outcome(log, design=experiment(**changes))
    assert verdict.outcome == "not enough data"
    assert words in verdict.reason
    assert analysis.summary()["verdict"] == "not enough data"


def test_few_keys_hot_keys_failures_and_a_broken_objective_are_warned_of():
    verdict, _ = outcome(traffic(2, requests=1000, keys=60))
    assert any("saw only" in warning for warning in verdict.warnings)
    hot = [{"at": START + 1, "key": key, "arm": arm, "latency": 3.0} for key, arm in ((7, "control"), (8, "treatment"))]
    failed = {"at": START + 2, "key": 9, "outcome": "error", "status": 500}
    both = pd.concat([traffic(2), frame([*hot * 4000, failed])], ignore_index=True)
    verdict, _ = outcome(both)
    assert any("a few hot keys dominate" in warning for warning in verdict.warnings)
    assert any("1 of" in warning and "failed upstream" in warning for warning in verdict.warnings)
    assert any("above its objective of 1.00 s" in warning for warning in verdict.warnings)


def test_the_paired_ghost_tries_the_controls_knobs_on_the_treatments_requests():
    big = Knobs(256 * MIB, 360.0, 0.0)
    decisions = [decision(0.5, applied=big)] + [
        decision(at, current=big, verdict="keep", ghost=curve()) for at in (30.0, 60.0, 90.0)
    ]
    decisions += [decision(at, "control", verdict="observe") for at in (30.0, 60.0)]
    _, analysis = outcome(UNLIKE, decisions)
    paired = analysis.paired
    assert paired.windows == 3
    assert paired.requests == 600.0
    assert paired.treatment_hit_ratio == pytest.approx(0.9)
    assert paired.control_hit_ratio == pytest.approx(0.9 * 0.5)  # 16 MiB is halfway up the logarithmic grid of 1 to 256 MiB
    assert paired.treatment_cost < paired.control_cost
    assert not paired.constant
    assert paired.measured_hit_ratio == analysis.treatment.hit_ratio.value


def test_without_curves_there_is_no_paired_ghost():
    assert outcome(LIKE, [decision(30.0)])[1].paired is None


def test_windows_follow_the_tuners_decisions_where_these_are_about_as_many():
    decisions = [decision(at, verdict="keep") for at in (20.0, 40.0, 60.0, 80.0, 100.0)]
    _, analysis = outcome(LIKE, decisions)
    assert analysis.by_interval
    assert [window.start - START for window in analysis.series["control"]] == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert sum(window.requests for window in analysis.series["control"]) == analysis.control.requests
    _, analysis = outcome(LIKE, [decision(at / 10, verdict="keep") for at in range(1, 900)])
    assert not analysis.by_interval
    assert len(analysis.series["control"]) == 6


def test_other_arms_namespaces_and_times_are_left_out():
    others = frame([{"at": START - 5, "key": 1}, {"at": START + 500, "key": 1}, {"at": START + 5, "key": 1, "arm": "third"}])
    _, analysis = outcome(pd.concat([LIKE, others], ignore_index=True), [decision(30.0, namespace="other"), decision(-50.0)])
    assert analysis.control.requests + analysis.treatment.requests == len(LIKE)
    assert all(not source.decisions for source in analysis.sources.values())
