"""Settings: one tree from a file and variables; whatever is wrong is named with its key, its value and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.config import Settings, SettingsError, load_settings


def write(directory: Path, text: str) -> Path:
    path = directory / "cachepilot.yaml"
    path.write_text(text)
    return path


def test_defaults_are_valid_and_the_documented_ones() -> None:
    settings = load_settings(environ={})
    assert settings == Settings()
    assert settings.gateway.rules.l1_share == 0.25
    assert settings.gateway.host == "127.0.0.1"


def test_a_file_sets_values_and_variables_override_it(tmp_path: Path) -> None:
    path = write(tmp_path, "gateway:\n  namespace: from-file\n  port: 9000\ntuner:\n  interval: 60\n")
    settings = load_settings(path, {"CACHEPILOT_GATEWAY__PORT": "9100", "CACHEPILOT_TUNER__GUARD__MAX_STEPS": "[1, 1, 1]"})
    assert (settings.gateway.namespace, settings.gateway.port, settings.tuner.interval) == ("from-file", 9100, 60.0)
    assert settings.tuner.guard.limits().max_steps == (1.0, 1.0, 1.0)


def test_a_variable_can_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "tuner: {interval: 7}\n")
    assert load_settings(environ={"CACHEPILOT_CONFIG": str(path)}).tuner.interval == 7.0


def test_every_price_can_be_set(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, "envs: {prices: {output_mtok: 15}}\n"), {})
    assert settings.prices.output_mtok == 15.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gateway: {prot: 9000}\n", ["gateway.prot", "9000", "unknown key", "'port'"]),
        ("tunr: {}\n", ["tunr", "unknown key", "'tuner'"]),
        ("gateway: {arms: {control: {shar: 1}}}\n", ["gateway.arms.control.shar", "'share'"]),
        ("tuner: {guard: {dead_bnd: 1}}\n", ["tuner.guard.dead_bnd", "'dead_band'"]),
        ("gateway: {port: 99999}\n", ["gateway.port", "99999", "65535"]),
        ("tuner: {interval: fast}\n", ["tuner.interval", "'fast'", "number"]),
        ("gateway: {arms: {a: {share: 0.7}, b: {share: 0.7}}}\n", ["gateway", "sum to 1", "0.7"]),
        ("gateway: {redis_url: 'http://here'}\n", ["gateway.redis_url", "http://here", "redis://"]),
        ("gateway: {upstream: {base_url: nowhere}}\n", ["gateway.upstream.base_url", "nowhere", "http"]),
        ("gateway: [1, 2]\n", ["gateway", "[1, 2]"]),
        ("- a list\n", ["expected a mapping", "list"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path, {})
    for part in [*expected, str(path)]:
        assert part in str(caught.value)


def test_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"line 2"):
        load_settings(write(tmp_path, "gateway:\n  port: ]\n"), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml"):
        load_settings(tmp_path / "absent.yaml", {})


def test_a_misspelt_variable_is_named_as_the_variable() -> None:
    with pytest.raises(SettingsError, match="CACHEPILOT_GATEWAY__REDISURL"):
        load_settings(environ={"CACHEPILOT_GATEWAY__REDISURL": "redis://localhost"})


def test_several_faults_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, "gateway: {port: -1}\ntuner: {interval: 0}\n"), {})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "text",
    [
        "gateway: {upstream: {api_key: hush-1}, arms: {a: {share: 0.4}}}",
        "gateway: {upstream: {api_key: [hush-1]}}",
        "gateway: {redis_url: 'http://:hush-1@host'}",
    ],
    ids=["a fault of its section", "a fault of its own", "a URL"],
)
def test_no_secret_is_in_the_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, text), {})
    assert "hush-1" not in str(caught.value)
    assert "gateway" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("gateway: {arms: {'a b': {share: 1.0}}}", "gateway.arms.a b"),
        ("gateway: {redis_url: 'redis+sentinel://host'}", "gateway.redis_url"),
        ("gateway: {warmup: {refreshes_per_second: .inf}}", "gateway.warmup.refreshes_per_second"),
        ("tuner: {guard: {max_steps: [.nan, 1, 1]}}", "tuner.guard.max_steps.0"),
        ("tuner: {interval: .inf}", "tuner.interval"),
    ],
)
def test_what_would_fail_only_later_is_refused_at_once(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(SettingsError, match=key.replace(".", r"\.")):
        load_settings(write(tmp_path, text), {})
