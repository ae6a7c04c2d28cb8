"""Settings of the environments: the defaults are the dataclasses' own, unknown keys are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from envs.objective import Prices
from envs.settings import EnvsSettings
from envs.simulator import SimConfig


def test_defaults_are_those_of_the_parts() -> None:
    settings = EnvsSettings()
    assert settings.prices.to_prices() == Prices()
    assert settings.to_config() == SimConfig()


def test_values_arrive_where_they_belong() -> None:
    settings = EnvsSettings.model_validate(
        {
            "prices": {"slo_p99": 0.5},
            "simulator": {"staleness_half_life": 60, "space": {"max_ttl": 500}, "upstream": {"slots": 3}, "warmup": {"burst": 7}},
            "workload": {"n_requests": 50, "n_keys": 5, "hot_swaps": [10, 20]},
        }
    )
    config = settings.to_config()
    assert (config.prices.slo_p99, config.staleness_half_life, config.space.max_ttl) == (0.5, 60, 500)
    assert (config.upstream.slots, config.warmup.burst) == (3, 7)
    assert len(settings.workload.generate()) == 50
    assert math.isinf(EnvsSettings().to_config().staleness_half_life)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"price": {}}, "price"),
        ({"prices": {"output_token": 1}}, "prices.output_token"),
        ({"prices": {"slo_p99": -1}}, "prices.slo_p99"),
        ({"simulator": {"l1_share": 2}}, "simulator.l1_share"),
        ({"simulator": {"ghost_keys": 3}}, "simulator"),
        ({"simulator": {"upstream": {"slots": 0}}}, "simulator.upstream.slots"),
        ({"workload": {"alpha": "steep"}}, "workload.alpha"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EnvsSettings.model_validate(values)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == where
