from dataclasses import replace

import pytest
from pydantic import ValidationError

from envs.objective import Prices
from experiments.design import DesignError, Experiment
from experiments.settings import ExperimentsSettings
from serving.knobs import Knobs, KnobSpace


def test_a_design_survives_the_way_through_json():
    design = Experiment(
        "lru-vs-ppo",
        "demo",
        salt="s1",
        shares={"control": 0.3, "treatment": 0.7},
        started_at=10.0,
        ended_at=20.0,
        prices=Prices(time_scale=100.0),
        note="a note",
        knobs={"control": Knobs(1 << 20, float("inf"), 0.0)},
        space=KnobSpace(max_size=1 << 25),
    )
    assert Experiment.from_dict(design.to_dict()) == design


def test_arms_share_equally_unless_told():
    assert dict(Experiment("a", "n").shares) == {"control": 0.5, "treatment": 0.5}


def test_the_slo_and_the_priced_slo_are_the_same():
    design = Experiment("a", "n", slo=0.7)
    assert design.slo == design.prices.slo_p99 == 0.7
    assert replace(design, ended_at=3.0).slo == 0.7
    assert Experiment("a", "n").slo == Prices().slo_p99


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "no spaces allowed"}, "name: expected 1 to 64 letters"),
        ({"treatment": "control"}, "name two different arms"),
        ({"shares": {"control": 1.0}}, "expected the arms"),
        ({"shares": {"control": 0.5, "treatment": 0.6}}, "sum to 1"),
        ({"shares": {"control": 0.0, "treatment": 1.0}}, "numbers > 0"),
        ({"knobs": {"other": Knobs(1, 1.0)}}, "no arm is called"),
        ({"started_at": float("nan")}, "started_at"),
        ({"started_at": 5.0, "ended_at": 4.0}, "not before started_at"),
    ],
)
def test_a_design_that_cannot_be_run_is_refused_with_the_reason(change, words):
    with pytest.raises(DesignError, match=words):
        Experiment(**{"name": "a", "namespace": "n", **change})


@pytest.mark.parametrize(
    "values",
    [
        {"name": "a", "namespace": "n", "colour": "red"},
        {"name": "a", "namespace": "n", "prices": {"gold": 1}},
        {"name": "a", "namespace": "n", "knobs": {"control": {"cache_size": -1, "ttl": 1}}},
        {"name": "a"},
    ],
)
def test_a_recorded_design_with_unknown_or_missing_values_is_refused(values):
    with pytest.raises(DesignError):
        Experiment.from_dict(values)


def test_settings_refuse_unknown_keys_and_name_them():
    with pytest.raises(ValidationError, match="urll"):
        ExperimentsSettings.model_validate({"ledger": {"urll": "sqlite:///x"}})
    with pytest.raises(ValidationError, match="confidence"):
        ExperimentsSettings.model_validate({"report": {"confidence": 1.5}})
    assert ExperimentsSettings.model_validate({"report": {"windows": 3}}).report.windows == 3
