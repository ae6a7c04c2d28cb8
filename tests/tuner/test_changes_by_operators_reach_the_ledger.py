"""`cachepilot tune` carries what operators did from the gateways' stream in Redis into the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from experiments.ledger import Ledger, LedgerError
from experiments.records import ADMIN
from serving.audit import AuditEvent, RedisAudit
from serving.config_store import AppliedState
from serving.redis_config_store import RedisConfigStore
from tests.exporter import Exporter
from tuner.audit_drain import AuditDrain
from tuner.config import Settings
from tuner.tune_command import tune_gateway


def event(number: int) -> AuditEvent:
    return AuditEvent(1_800_000_000.0 + number, "0a1b2c3d", "flush", {"where": {}, "removed": number})


@pytest.fixture
async def audit(redis_url: str, namespace: str) -> AsyncIterator[RedisAudit]:
    opened = RedisAudit(redis_url, namespace)
    yield opened
    await opened.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def recorded(ledger: Ledger, namespace: str) -> list[int]:
    return [item.details["detail"]["removed"] for item in ledger.events(namespace=namespace) if item.kind == ADMIN]


async def test_each_change_is_carried_once_however_often_it_is_tried(audit: RedisAudit, url: str, namespace: str) -> None:
    with Ledger(url) as ledger:
        drain = AuditDrain(audit, ledger, namespace)
        assert await drain.drain() == (0, "")
        for number in range(3):
            await audit.record(event(number))
        assert await drain.drain() == (3, "")
        assert await drain.drain() == (0, "")
    await audit.record(event(3))
    with Ledger(url) as again:  # a tuner that was started anew
        assert await AuditDrain(audit, again, namespace).drain() == (1, "")
        assert recorded(again, namespace) == [0, 1, 2, 3]


async def test_more_than_one_page_is_carried_at_once(url: str, namespace: str) -> None:
    class Pages:
        async def read(self, after: str = "", *, limit: int = 1000) -> list[tuple[str, AuditEvent]]:
            start = int(after.partition("-")[0]) if after else 0
            return [(f"{number}-0", event(number)) for number in range(start + 1, min(start + 3, 7) + 1)]

    with Ledger(url) as ledger:
        assert await AuditDrain(Pages(), ledger, namespace).drain() == (7, "")
        assert recorded(ledger, namespace) == [1, 2, 3, 4, 5, 6, 7]


async def test_a_redis_that_is_away_is_said_and_nothing_is_lost(url: str, namespace: str) -> None:
    away = RedisAudit("redis://127.0.0.1:1/0", namespace)
    with Ledger(url) as ledger:
        carried, fault = await AuditDrain(away, ledger, namespace).drain()
    await away.close()
    assert carried == 0
    assert "audit: Redis at redis://127.0.0.1:1/0 did not answer" in fault


async def test_a_ledger_that_cannot_be_written_is_said_and_has_it_later(
    audit: RedisAudit, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*arguments: Any) -> int:
        raise LedgerError("ledger: locked")

    await audit.record(event(0))
    with Ledger(url) as ledger:
        with monkeypatch.context() as patched:
            patched.setattr(ledger, "record_audit", locked)
            assert await AuditDrain(audit, ledger, namespace).drain() == (0, "ledger: locked")
        assert await AuditDrain(audit, ledger, namespace).drain() == (1, "")


async def test_tune_records_what_operators_did_before_and_meanwhile(
    audit: RedisAudit, url: str, redis_url: str, namespace: str
) -> None:
    await audit.record(event(0))
    shown: list[dict[str, Any]] = []
    store = RedisConfigStore(redis_url, namespace)
    await store.report(AppliedState("r0", 1, 0.0))
    with Exporter() as exporter:
        exporter.add("ray_cachepilot_requests_total", 1, arm="control", outcome="hit")
        settings = Settings.model_validate(
            {
                "gateway": {"namespace": namespace, "redis_url": redis_url},
                "tuner": {
                    "arm": "control",
                    "policy": "curve",
                    "interval": 0.2,
                    "confirm_timeout": 0.1,
                    "signals": {"targets": [exporter.url], "scrape_interval": 0.05},
                },
                "experiments": {"ledger": {"url": url}},
            }
        )
        await tune_gateway(settings, intervals=1, show=shown.append)
        assert [line["audited"] for line in shown if "audited" in line] == [1]
        await audit.record(event(1))
        await tune_gateway(settings, intervals=1, show=shown.append)
    await store.close()
    with Ledger(url) as ledger:
        assert recorded(ledger, namespace) == [0, 1]
    assert not [line for line in shown if "warning" in line]
