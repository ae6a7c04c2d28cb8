"""The admin API: who may use it, what it shows and changes, and that every change is recorded."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.admin import AdminRoutes, FlushWhere, FoundEntry, Verdict, describe
from serving.audit import AuditEvent
from serving.settings import AuthSettings
from serving.tenants import Tenants
from serving.tiers.base import Entry, EntryMeta, TierUnavailable
from tests.e2e.stack import Reply
from tests.serving.gateways import served

TOKEN = "an operator's token"
ACTOR = hashlib.sha256(TOKEN.encode()).hexdigest()[:8]
NOW = 1_800_000_000.0
META = EntryMeta(
    text="What did you say?", model="m", temperature=0.5, tenant="acme", namespace="docs", tags=("a", "b"), documents=("d1",)
)
ENTRY = Entry(bytes(range(32)), b'{"answer": 42}', NOW - 60.0, 3, 5, b"c" * 32, b"v" * 384, META.dump(), ttl=120.0)
ID = ENTRY.key.hex()[:16]


class Backend:
    """A replica with one entry that does what it is told and remembers it."""

    def __init__(self) -> None:
        self.entry: Entry | None = ENTRY
        self.told: list[Any] = []
        self.away = False

    def _check(self) -> None:
        if self.away:
            raise TierUnavailable("redis does not answer")

    async def stats(self) -> Mapping[str, Any]:
        self._check()
        return {"replica": "r0", "entries": 1}

    async def knobs(self) -> Mapping[str, Any]:
        return {"version": 3, "arms": {"control": {"cache_size": 1}}}

    async def find(self, entry_id: str) -> FoundEntry | None:
        self._check()
        return FoundEntry("control", self.entry, ("memory", "redis")) if self.entry is not None and entry_id == ID else None

    async def feedback(self, entry_id: str, verdict: Verdict, similarity: float | None) -> bool | None:
        self._check()
        if entry_id != ID:
            return None
        self.told.append((verdict, similarity))
        return verdict == "bad"

    async def flush(self, where: FlushWhere) -> int:
        self._check()
        self.told.append(where)
        return 7


class Recorded:
    """An audit that a test can look into."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []

    async def record(self, event: AuditEvent) -> None:
        self.events.append(event)

    async def close(self) -> None:
        pass


class Api:
    """The API under a real server, with an operator's token unless told otherwise."""

    def __init__(self, url: str, session: aiohttp.ClientSession, backend: Backend, audit: Recorded) -> None:
        self._url, self._session, self.backend, self.audit = url, session, backend, audit

    async def ask(self, method: str, path: str, *, token: str | None = TOKEN, **arguments: Any) -> Reply:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        async with self._session.request(method, f"{self._url}/admin/v1/{path}", headers=headers, **arguments) as reply:
            return Reply(reply.status, {name.lower(): value for name, value in reply.headers.items()}, await reply.read())


@asynccontextmanager
async def running(*, enabled: bool = True) -> AsyncIterator[Api]:
    admin = (hashlib.sha256(TOKEN.encode()).hexdigest(),) if enabled else ()
    tenant = {"acme": (hashlib.sha256(b"a tenant's key").hexdigest(),)}
    backend, audit = Backend(), Recorded()
    tenants = Tenants(AuthSettings(tenants=tenant, admin=admin))
    routes = AdminRoutes(backend, tenants, audit, enabled=tenants.administered, clock=lambda: NOW)
    async with served(routes) as url, aiohttp.ClientSession() as session:
        yield Api(url, session, backend, audit)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running() as api:
        yield api


@pytest.mark.parametrize("token", [None, "", "another token", "a tenant's key", TOKEN + "x"])
async def test_only_an_operators_token_opens_it(api: Api, token: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reply = await api.ask("POST", "flush", token=token, json={"all": True})
    assert (reply.status, reply.json["error"]["code"], reply.headers["www-authenticate"]) == (
        401,
        "invalid_admin_token",
        "Bearer",
    )
    assert (api.backend.told, api.audit.events) == ([], [])
    assert "refused POST /admin/v1/flush" in caplog.text
    assert not token or token not in caplog.text


async def test_without_tokens_it_is_not_there() -> None:
    async with running(enabled=False) as api:
        for path in ("stats", "flush"):
            assert (await api.ask("GET", path)).status == 404
            assert (await api.ask("GET", path, token=None)).status == 404


async def test_stats_and_knobs_are_the_replicas_own_and_leave_no_trace(api: Api) -> None:
    assert (await api.ask("GET", "stats")).json == {"replica": "r0", "entries": 1}
    reply = await api.ask("GET", "knobs")
    assert (reply.json["version"], reply.headers["cache-control"]) == (3, "no-store")
    assert api.audit.events == []


async def test_an_entrys_facts_do_not_show_what_was_asked_and_answered(api: Api) -> None:
    reply = await api.ask("GET", f"entries/{ID}")
    facts = reply.json
    assert (facts["id"], facts["arm"], facts["tiers"], facts["age"]) == (ID, "control", ["memory", "redis"], 60.0)
    assert (facts["tenant"], facts["tags"], facts["documents"], facts["ttl"]) == ("acme", ["a", "b"], ["d1"], 120.0)
    assert facts["bytes"] == ENTRY.size
    assert b"say" not in reply.body
    assert b"42" not in reply.body
    assert api.audit.events == []


async def test_who_reads_what_was_asked_and_answered_is_recorded(api: Api) -> None:
    facts = (await api.ask("GET", f"entries/{ID}?content=true")).json
    assert (facts["text"], facts["body"]) == ("What did you say?", '{"answer": 42}')
    assert api.audit.events == [AuditEvent(NOW, ACTOR, "read", {"entry": ID})]
    assert (await api.ask("GET", f"entries/{ID}?content=yes")).json["error"]["param"] == "content"


@pytest.mark.parametrize("verdict", ["good", "bad"])
async def test_feedback_reaches_the_replica_and_the_audit(api: Api, verdict: str) -> None:
    reply = await api.ask("POST", f"entries/{ID}/feedback", json={"verdict": verdict, "similarity": 0.93})
    assert reply.json == {"id": ID, "verdict": verdict, "removed": verdict == "bad"}
    assert api.backend.told == [(verdict, 0.93)]
    detail = {"entry": ID, "verdict": verdict, "similarity": 0.93, "removed": verdict == "bad"}
    assert api.audit.events == [AuditEvent(NOW, ACTOR, "feedback", detail)]


async def test_feedback_needs_no_similarity(api: Api) -> None:
    assert (await api.ask("POST", f"entries/{ID}/feedback", json={"verdict": "bad"})).status == 200
    assert api.backend.told == [("bad", None)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "verdict"),
        ({"verdict": "fine"}, "verdict"),
        ({"verdict": ["good"]}, "verdict"),
        ({"verdict": "good", "similarity": "high"}, "similarity"),
        ({"verdict": "good", "similarity": True}, "similarity"),
        ({"verdict": "good", "similarity": 1.5}, "similarity"),
        ({"verdict": "good", "reason": "x"}, "reason"),
    ],
)
async def test_feedback_that_makes_no_sense_is_refused_by_its_field(api: Api, body: Mapping[str, Any], param: str) -> None:
    reply = await api.ask("POST", f"entries/{ID}/feedback", json=body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert (api.backend.told, api.audit.events) == ([], [])


async def test_an_entry_that_is_not_there_is_said_to_be_so(api: Api) -> None:
    other = "f" * 16
    for method, path, body in (("GET", f"entries/{other}", None), ("POST", f"entries/{other}/feedback", {"verdict": "bad"})):
        reply = await api.ask(method, path, json=body)
        assert (reply.status, reply.json["error"]["code"]) == (404, "no_such_entry")
        assert other in reply.json["error"]["message"]
    assert api.audit.events == []


async def test_a_flush_tells_what_it_removed_and_is_recorded(api: Api) -> None:
    where = {"namespace": "docs", "tag": "prices", "document": "d1", "model": "m", "tenant": "", "arm": "control"}
    reply = await api.ask("POST", "flush", json=where)
    assert reply.json == {"where": where, "removed": 7}
    assert api.backend.told == [FlushWhere("control", "", "docs", "prices", "d1", "m")]
    assert api.audit.events == [AuditEvent(NOW, ACTOR, "flush", {"where": where, "removed": 7})]


async def test_everything_is_flushed_only_where_that_is_said(api: Api) -> None:
    for body in (
        {},
        {"tag": None},
        {"all": False},
        {"all": True, "tag": "x"},
        {"all": "yes"},
        {"all": 1},
        {"tags": "x"},
        {"tag": ["x"]},
    ):
        assert (await api.ask("POST", "flush", json=body)).status == 400, body
    assert (api.backend.told, api.audit.events) == ([], [])
    assert (await api.ask("POST", "flush", json={"all": True})).json["removed"] == 7
    assert api.backend.told == [FlushWhere()]


async def test_a_store_that_is_away_is_said_to_be_so_and_a_change_that_failed_is_recorded(api: Api) -> None:
    api.backend.away = True
    for method, path, body in (
        ("GET", "stats", None),
        ("GET", f"entries/{ID}", None),
        ("POST", f"entries/{ID}/feedback", {"verdict": "bad"}),
        ("POST", "flush", {"tag": "prices"}),
    ):
        reply = await api.ask(method, path, json=body)
        assert (reply.status, reply.json["error"]["code"]) == (503, "store_unavailable")
        assert "redis does not answer" in reply.json["error"]["message"]
        assert ("ask for it again" in reply.json["error"]["message"]) == (method == "POST")
    assert [(item.action, item.detail["failed"]) for item in api.audit.events] == [
        ("feedback", "redis does not answer"),
        ("flush", "redis does not answer"),
    ]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"all"', b"\xff"])
async def test_a_body_that_is_no_object_is_refused(api: Api, data: bytes) -> None:
    assert (await api.ask("POST", "flush", data=data)).status == 400


async def test_a_body_that_is_too_large_is_refused(api: Api) -> None:
    assert (await api.ask("POST", "flush", json={"tag": "x" * 70_000})).status == 413


@pytest.mark.parametrize(
    "path", ["", "nothing", "entries/", "entries/0123", f"entries/{'F' * 16}", "entries/" + "0" * 17, "stats/"]
)
async def test_another_path_names_those_that_there_are(api: Api, path: str) -> None:
    reply = await api.ask("GET", path)
    assert reply.status == 404
    assert "entries/<id>/feedback" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "stats", "GET"), ("PUT", "knobs", "GET"), ("GET", "flush", "POST"), ("DELETE", f"entries/{ID}", "GET")],
)
async def test_another_method_names_the_one_that_there_is(api: Api, method: str, path: str, allowed: str) -> None:
    reply = await api.ask(method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


NAMES = st.sampled_from(["", "x", "y"])
METAS = st.builds(
    EntryMeta, model=NAMES, tenant=NAMES, namespace=NAMES, tags=st.lists(NAMES).map(tuple), documents=st.lists(NAMES).map(tuple)
)
WHERES = st.builds(FlushWhere, **{item.name: st.none() | NAMES for item in dataclasses.fields(FlushWhere)})


@given(WHERES, NAMES, METAS)
def test_an_entry_matches_if_it_has_everything_that_is_given(where: FlushWhere, arm: str, meta: EntryMeta) -> None:
    has: dict[str, Any] = {
        "arm": [arm], "tenant": [meta.tenant], "namespace": [meta.namespace], "tag": meta.tags, "document": meta.documents,
        "model": [meta.model],
    }  # fmt: skip
    assert where.matches(arm, meta) == all(value in has[name] for name, value in where.given().items())
    assert where.whole_arms == (set(where.given()) <= {"arm"})


def test_an_entry_without_limits_of_its_own_is_described_in_strict_json() -> None:
    facts = describe(FoundEntry("control", Entry(b"k" * 32, b"\xff", NOW + 5.0)), now=NOW, content=True)
    assert (facts["ttl"], facts["age"], facts["tiers"], facts["semantic"], facts["body"]) == (None, 0.0, [], False, "�")
