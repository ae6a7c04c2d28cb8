"""Settings of the data plane, and how they are given to `serve run`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serving.app import settings_from_args
from serving.knobs import Knobs, KnobSpace
from serving.settings import GatewaySettings, LlmSimSettings


@pytest.mark.parametrize(
    ("given", "where", "said"),
    [
        ({"cache_sise": 1}, "cache_sise", "Extra inputs are not permitted"),
        ({"rules": {"semantic": {"on": True}}}, "rules.semantic.on", "Extra inputs are not permitted"),
        ({"arms": {"a": {"share": 0.5}}}, "", "expected shares that sum to 1, got {'a': 0.5}"),
        ({"arms": {}}, "arms", "at least 1 item"),
        ({"redis_url": "localhost:6379"}, "redis_url", "expected a redis://, rediss:// or unix:// URL, got 'localhost:6379'"),
        ({"upstream": {"base_url": "model:8000"}}, "upstream.base_url", "expected an http:// or https:// URL"),
        ({"replicas": 2}, "", "expected a Redis URL, since 2 replicas share one cache"),
        ({"space": {"min_size": 10, "max_size": 5}}, "space", "expected 0 < min_size < max_size"),
        ({"port": 70_000}, "port", "less than or equal to 65535"),
        ({"namespace": "a b"}, "namespace", "String should match pattern"),
        ({"namespace": "."}, "namespace", "expected a name that a folder can have, got '.'"),
        ({"namespace": ".."}, "namespace", "expected a name that a folder can have, got '..'"),
        ({"memory": {"path": "arena"}}, "memory.path", "expected an absolute path"),
        ({"memory": {"size": 1}}, "memory.size", "greater than or equal to 65536"),
        ({"neighbours": {"listen": "7400"}}, "neighbours.listen", "expected host:port, an IPv6 address in brackets, got '7400'"),
        ({"neighbours": {"listen": "h:70000"}}, "neighbours.listen", "expected host:port"),
        ({"neighbours": {"listen": "fe80::1:7400"}}, "neighbours.listen", "expected host:port, an IPv6 address in brackets"),
        ({"memory": {"path": "/dev/shm/a\0b"}}, "memory.path", "expected a path, which has no null characters"),
        ({"neighbours": {"listen": "h:7400"}}, "neighbours", "expected one, since listen is set"),
        ({"neighbours": {"listen": "0.0.0.0:7400", "secret": "s" * 16}}, "neighbours", "advertise: expected host:port by which"),
        ({"neighbours": {"listen": "[::]:7400", "secret": "s" * 16}}, "neighbours", "advertise: expected host:port by which"),
        ({"neighbours": {"listen": "h:0", "secret": "s" * 16}}, "neighbours", "advertise: expected host:port by which"),
        ({"neighbours": {"listen": "h:7400", "secret": "short"}}, "neighbours.secret", "expected at least 16 characters"),
        ({"neighbours": {"peers": ["h:7400"]}}, "neighbours", "expected host:port, since peers is given"),
        ({"neighbours": {"listen": "h:7400", "secret": "s" * 16}}, "", "expected a redis_url, since by it nodes hear"),
        (
            {
                "neighbours": {"listen": "h:7400", "secret": "s" * 16},
                "redis_url": "redis://r",
                "storage": {"encryption_key": "A" * 43 + "="},
            },
            "",
            "expected no storage.encryption_key, since entries go to neighbours in the clear",
        ),
        (
            {"neighbours": {"listen": "h:7400", "secret": "s" * 16, "peers": ["h:7400"]}, "memory": {"shared": False}},
            "",
            "expected memory.shared, since what neighbours read is the arena",
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name(given: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GatewaySettings.model_validate(given)
    error = caught.value.errors()[0]
    assert ".".join(str(part) for part in error["loc"]) == where
    assert said in error["msg"]


def test_the_json_form_gives_the_same_settings_with_the_key_and_repr_hides_it() -> None:
    neighbours = {"listen": "[::1]:7400", "peers": ["node-1:7400"], "secret": "shared by all the nodes"}
    settings = GatewaySettings.model_validate(
        {
            "upstream": {"api_key": "sk-secret"},
            "access_log": "logs",
            "neighbours": neighbours,
            "redis_url": "redis://r",
            "memory": {"path": "/dev/shm/a"},
        }
    )
    assert GatewaySettings.model_validate(settings.to_json()) == settings
    assert "sk-secret" not in repr(settings)
    assert "shared by all" not in repr(settings)


def test_a_ttl_or_half_life_of_null_means_never() -> None:
    arms = {"a": {"knobs": {"cache_size": 5, "ttl": None}}}
    settings = GatewaySettings.model_validate({"arms": arms, "rules": {"staleness_half_life": None}})
    assert settings.initial_knobs == {"a": Knobs(5, math.inf, 0.0)}
    assert settings.rules.rules().staleness_half_life == math.inf


def test_the_defaults_of_the_space_are_the_spaces_own() -> None:
    assert GatewaySettings().space.space() == KnobSpace()


def test_llm_sim_refuses_bounds_in_the_wrong_order() -> None:
    with pytest.raises(ValidationError, match="expected min_output_tokens <= max_output_tokens, got 9 and 5"):
        LlmSimSettings(min_output_tokens=9, max_output_tokens=5)


def test_serve_run_arguments_are_dotted_names_with_yaml_values() -> None:
    settings = settings_from_args(
        {
            "upstream.base_url": "http://model:8000/v1/",
            "redis_url": "redis://redis",
            "replicas": "3",
            "rules.semantic.enabled": "true",
            "arms.control.share": "0.25",
            "arms.treatment": {"share": 0.75},
            "access_log": "null",
        }
    )
    assert settings.upstream.base_url == "http://model:8000/v1"
    assert (settings.replicas, settings.rules.semantic.enabled, settings.access_log) == (3, True, None)
    assert settings.shares == {"control": 0.25, "treatment": 0.75}


def test_arguments_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("namespace: from-file\nport: 1234\nrules: {l1_share: 0.5}\n")
    settings = settings_from_args({"config": str(file), "port": "4321", "rules.ttl_jitter": "0"})
    assert (settings.namespace, settings.port) == ("from-file", 4321)
    assert (settings.rules.l1_share, settings.rules.ttl_jitter) == (0.5, 0.0)


def test_a_file_that_is_not_a_mapping_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match=r"gateway\.yaml: expected a mapping of settings, got list"):
        settings_from_args({"config": str(file)})


def test_a_name_under_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"port\.x: port is given as a value already"):
        settings_from_args({"port": "1", "port.x": "2"})


@pytest.mark.parametrize(
    ("storage", "url", "words"),
    [
        (
            {"tls_ca": "/ca"},
            "redis://:sesame@host",
            r"redis_url: expected rediss://, since storage\.tls_ca is given; got redis://$",
        ),
        ({"tls_cert": "/c", "tls_key": "/k"}, "unix:///sock", r"since storage\.tls_cert and tls_key is given; got unix://$"),
        ({"tls_key": "/k"}, "rediss://host", r"storage\.tls_cert: expected the certificate of storage\.tls_key, got null"),
    ],
)
def test_certificates_that_no_connection_would_use_are_refused(storage: dict[str, str], url: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        GatewaySettings.model_validate({"storage": storage, "redis_url": url})
    (error,) = refused.value.errors()
    assert re.search(words, error["msg"])
    assert "sesame" not in error["msg"]


def test_certificates_of_an_embedded_redis_are_not_needed_nor_refused() -> None:
    GatewaySettings.model_validate({"storage": {"tls_ca": "/ca"}})
    GatewaySettings.model_validate(
        {"storage": {"tls_ca": "/ca", "tls_cert": "/c", "tls_key": "/k"}, "redis_url": "rediss://host"}
    )
