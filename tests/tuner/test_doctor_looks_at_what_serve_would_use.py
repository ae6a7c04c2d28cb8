"""`cachepilot doctor` looks at the settings that `cachepilot serve` would have: by the option, the environment, or none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from serving.redis_server import RedisServer
from serving.settings import GatewaySettings
from serving.tiers.arena import ArenaTier
from tuner import doctor
from tuner.doctor import Check, examine


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but a test's own, and nothing looked at that takes long."""
    monkeypatch.delenv("CACHEPILOT_CONFIG", raising=False)
    for slow in ("_policy", "_rdma"):
        monkeypatch.setattr(doctor, slow, lambda: Check("left out", "ok", ""))


def checks(config: Path | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine(config)}


def written(path: Path, **gateway: object) -> Path:
    path.write_text(json.dumps({"gateway": gateway}))
    return path


def test_the_file_of_the_option_goes_before_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = written(tmp_path / "option.yaml", memory={"path": str(tmp_path / "of-the-option")})
    environment = written(tmp_path / "environment.yaml", memory={"path": str(tmp_path / "of-the-environment")})
    monkeypatch.setenv("CACHEPILOT_CONFIG", str(environment))
    found = checks()
    assert found["settings"] == Check("settings", "ok", f"{environment}, by $CACHEPILOT_CONFIG")
    assert found["memory arena"].detail.startswith(f"{tmp_path}/of-the-environment, by gateway.memory.path: not made yet")
    found = checks(option)
    assert found["settings"] == Check("settings", "ok", f"{option}, by --config")
    assert found["memory arena"].detail.startswith(f"{tmp_path}/of-the-option, by gateway.memory.path: not made yet")


def test_without_a_file_it_says_so_and_names_the_variables_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks()["settings"].detail == "the defaults, without --config or $CACHEPILOT_CONFIG"
    monkeypatch.setenv("CACHEPILOT_GATEWAY__MEMORY__SHARED", "false")
    monkeypatch.setenv("CACHEPILOT_GATEWAY__UPSTREAM__API_KEY", "sesame")
    monkeypatch.setenv("CACHEPILOT_TRACES", "no setting")
    found = checks()
    assert found["settings"].detail.endswith(
        "; over it: CACHEPILOT_GATEWAY__MEMORY__SHARED, CACHEPILOT_GATEWAY__UPSTREAM__API_KEY"
    )
    assert found["memory arena"].detail.startswith("none, since gateway.memory.shared is false")


def test_an_arena_elsewhere_is_described(tmp_path: Path) -> None:
    config = written(tmp_path / "settings.yaml", memory={"path": str(tmp_path / "arena"), "size": 1 << 20})
    arena = ArenaTier(tmp_path / "arena", 1 << 20)
    try:
        found = checks(config)["memory arena"].detail
        assert found.startswith(f"{tmp_path}/arena, by gateway.memory.path: 1 MiB, of which ")
        assert ", in use; by these settings it gets 1 MiB" in found
    finally:
        arena.close_now()


def test_an_arena_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    config = written(tmp_path / "settings.yaml", memory={"path": str(tmp_path / "missing" / "arena")})
    found = checks(config)["memory arena"]
    assert found.status == "absent"
    assert f"{tmp_path}/missing is not there" in found.detail


def test_settings_that_cannot_be_used_fail_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    config = written(tmp_path / "settings.yaml", prot=8000)
    found = checks(config)
    assert found["settings"].status == "failed"
    assert "gateway.prot" in found["settings"].detail
    assert "did you mean 'port'?" in found["settings"].detail
    assert found["loopback"].status == "ok"
    assert "memory arena" not in found


def test_the_redis_that_the_settings_name_is_asked(tmp_path: Path, redis_server: RedisServer) -> None:
    assert checks(written(tmp_path / "a.yaml", redis_url=redis_server.url))["Redis"].status == "ok"
    gone = checks(written(tmp_path / "b.yaml", redis_url=f"unix://:sesame@{tmp_path}/none.sock"))["Redis"]
    assert gone.status == "failed"
    assert gone.detail == f"nothing answers PING at unix://{tmp_path}/none.sock within 2 s"


def test_the_size_of_the_arena_is_that_of_the_settings(tmp_path: Path) -> None:
    settings = GatewaySettings.model_validate({"space": {"max_size": 64 << 20}})
    config = written(tmp_path / "settings.yaml", space={"max_size": 64 << 20})
    assert f"one of {settings.space.max_size * 5 // 16 >> 20} MiB" in checks(config)["memory arena"].detail


def test_a_vector_store_is_looked_for_where_answers_by_meaning_are_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks()["vector store"].detail.startswith("none")
    milvus = {"kind": "milvus", "url": "http://vectors:19530"}
    config = written(tmp_path / "settings.yaml", rules={"semantic": {"enabled": True, "vectors": milvus}})
    found = checks(config)["vector store"]
    assert (found.status, found.detail) == ("ok", "milvus at http://vectors:19530, not asked")
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "pymilvus" else real(name, *rest))
    found = checks(config)["vector store"]
    assert (found.status, found.detail) == ("failed", "milvus: pymilvus is not installed")
    assert found.remedy == "pip install 'cachepilot[milvus]'"
