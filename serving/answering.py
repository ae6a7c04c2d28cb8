"""The way of one request whose answer may be cached.

1. The request is read, authenticated, parsed and identified (:mod:`serving.inbound`), and its key, or its semantic bucket, gives
   it an arm.
2. The cache is looked up: the memory tier without awaiting anything, then the store, then by meaning (:mod:`serving.cache`).
3. What is found is served: a hit, an answer by meaning, or one past its TTL that is refreshed in the background.
4. Otherwise the request joins the flight of the same question, or of nearly the same, or starts one (:mod:`serving.flights`): the
   model is asked once, and its answer is recorded as it passes.
5. When the client's answer is on its way, the ghost, the hot set, the access log and the metrics are told.

A client that goes away lets go of its flight; the upstream is given up when nobody else waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from serving import recording, sse, validators
from serving.access_log import Outcome
from serving.cache import VECTOR, Lookup
from serving.continuation import Continuation, Diverged
from serving.fetching import Call
from serving.flights import FlightFailed, Head, Reader
from serving.inbound import Disconnected, Inbound, Receive, Refused, Scope, Send, read_body, understand, unless_gone
from serving.keys import Endpoint, key64
from serving.openai_error import openai_error
from serving.policy import ERROR_STATUSES, Rule, on_error
from serving.replies import (
    JSON_TYPE,
    LABELS,
    STREAM_TYPE,
    Headers,
    Renditions,
    cache_status,
    convert,
    entry_id,
    error_event,
    respond,
    resumed,
    saved_tokens,
)
from serving.runtime import CLIENT_LEFT, Runtime
from serving.tiers.base import Entry, Form
from serving.upstream import Interrupted, UpstreamAnswer
from serving.warmup import Remembered

_RECORDED: Mapping[str, Outcome] = {
    "hit": "hit", "stale": "hit", "collapsed": "hit", "semantic_hit": "semantic_hit", "miss": "miss", "refresh": "miss",
    "bypass": "bypass",
}  # fmt: skip
"""Who answered, by what was decided."""


_MOST_COMMON = 1000


@dataclass(slots=True)
class Exchange:
    """One request on its way.

    Attributes:
        scope: The ASGI connection.
        receive: Gives what the client sends.
        send: Sends to the client.
        inbound: The request.
        arm: Its arm.
        at: When it arrived, seconds since the epoch.
        began: The same by ``time.perf_counter``.
        took: Seconds from there to the answer's end, once that is given.
        then: What is to be done when the answer is on its way.
    """

    scope: Scope
    receive: Receive
    send: Send
    inbound: Inbound
    arm: str
    at: float
    began: float
    took: float = 0.0
    then: Callable[[], None] | None = None

    def answered(self, then: Callable[[], None]) -> None:
        """The whole answer is given: note the time, and what is left to do."""
        self.took, self.then = time.perf_counter() - self.began, then


class Answering:
    """Answers requests with a replica's parts.

    Args:
        runtime: The replica.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._renditions = Renditions()
        self._limit = runtime.settings.max_request_bytes
        self._debug = runtime.settings.callers.debug
        self._common: dict[tuple[str, str, str, str, int], Headers] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send, endpoint: Endpoint) -> None:
        """Answer one request."""
        began = time.perf_counter()
        runtime = self._runtime
        at = runtime.clock()
        try:
            raw = await read_body(receive, self._limit)
            inbound = understand(scope["headers"], raw, endpoint, settings=runtime.settings, tenants=runtime.tenants)
        except Refused as refusal:
            await respond(send, refusal.status, refusal.headers, refusal.body)
            return
        except Disconnected:
            return
        arm = runtime.arm_now(inbound.fp)
        if arm is None:
            arm = await runtime.arm_by_meaning(inbound.fp)
        x = Exchange(scope, receive, send, inbound, arm, at, began)
        found = runtime.lookup_now(arm, inbound.asked, at)
        if found is None:
            found = await runtime.lookup(arm, inbound, at)
        if found.entry is None or not await self._serve(x, found, found.entry):
            if found.forbidden:
                await self._forbid(x)
            else:
                try:
                    await unless_gone(receive, self._ask(x, found), lambda: self._left(x, found))
                except Disconnected:
                    return
        try:
            await asyncio.sleep(0)  # uvloop sends what was written at the end of a round: the client need not wait for the rest
        finally:
            if x.then is not None:
                x.then()

    def _left(self, x: Exchange, found: Lookup) -> None:
        took = time.perf_counter() - x.began
        self._runtime.record(x.at, took, x.inbound, x.arm, "left", CLIENT_LEFT, rule=found.rule)

    # -- from the cache ------------------------------------------------------------------------------------------------------

    async def _serve(self, x: Exchange, found: Lookup, entry: Entry) -> bool:
        """Answer with an entry; False where it cannot be given in the form that was asked for."""
        inbound = x.inbound
        asked = inbound.asked
        validator, offset = "", 0
        if asked.stream:
            body, validator, offset = await self._stream_of(x, entry)
        else:
            body = entry.body if entry.form == "json" and not inbound.fresh_id else self._renditions.body(entry, inbound)
        if body is None:
            return False
        headers = [
            STREAM_TYPE if asked.stream else JSON_TYPE,
            *self._headers(x, found.outcome, found.rule, entry=entry, ttl=found.ttl, age=found.age, tier=found.tier,
                           similarity=found.similarity),
            *_begins(inbound, validator, offset),
        ]  # fmt: skip
        await respond(x.send, 200, headers, body)
        x.answered(lambda: self._served(x, found, entry))
        return True

    def _served(self, x: Exchange, found: Lookup, entry: Entry) -> None:
        """The client has an entry: count it, and refresh it where it was past its TTL."""
        runtime = self._runtime
        runtime.hit(x.arm, found)
        if found.revalidate:
            runtime.revalidate(x.arm, self._call(x, entry.vector or b""))
        self._record(x, found.outcome, found.rule, 200, entry=entry, found=found)
        self._settle(x, entry)

    async def _stream_of(self, x: Exchange, entry: Entry) -> tuple[bytes | None, str, int]:
        """Return an entry as the stream that a client gets, or what it does not have yet; with its validator and the offset."""
        inbound = x.inbound
        body, validator = self._renditions.body(entry, inbound), inbound.validator_of(self._renditions.tag(entry))
        if body is None:
            return None, "", 0
        offset = inbound.resume or 0
        if offset and not validators.holds(inbound.validator, validator, offset):
            joined = await self._joined(x, entry)
            if joined is None:
                offset = 0
            else:
                body, validator = joined
        return resumed(body, inbound, validator=validator, events=offset), validator, offset

    async def _joined(self, x: Exchange, entry: Entry) -> tuple[bytes, str] | None:
        """Return the stream that broke off for this client, gone on with by the entry; None: it had another, or they differ.

        The entry may be cut into events elsewhere, and have another id.
        """
        inbound = x.inbound
        partial = await self._runtime.fetcher.partial(x.arm, inbound.fp.key)
        if partial is None:
            return None
        validator = inbound.validator_of(_extended(partial, by=validators.tag_of(entry)))
        if not validators.holds(inbound.validator, validator, inbound.resume or 0):
            return None
        stream = convert(entry.body, entry.form, stream=True, usage=True)
        try:
            going_on = Continuation(partial.body)
            whole = partial.body + going_on.feed(stream or b"") + going_on.close()
        except Diverged:
            return None
        return whole if inbound.asked.usage else recording.without_usage(whole), validator

    async def _forbid(self, x: Exchange) -> None:
        message = "there is no stored answer that may be served, and only-if-cached forbids to ask the model"
        rule = Rule.ONLY_IF_CACHED.value
        headers = [JSON_TYPE, *self._headers(x, "miss", rule)]
        await respond(x.send, 504, headers, openai_error(message, "invalid_request_error", code=rule))
        x.answered(lambda: self._record(x, "miss", rule, 504))

    # -- from the model ------------------------------------------------------------------------------------------------------

    def _call(self, x: Exchange, vector: bytes | None) -> Call:
        runtime = self._runtime
        headers = runtime.upstream.forwarded(x.scope["headers"], credentials=not runtime.tenants.configured)
        return runtime.fetcher.call(x.inbound, headers, vector)

    async def _ask(self, x: Exchange, found: Lookup) -> None:
        runtime, inbound = self._runtime, x.inbound
        asked, fp, arm, fetcher = inbound.asked, inbound.fp, x.arm, runtime.fetcher
        searched = runtime.meaning.enabled and found.outcome == "miss" and runtime.by_meaning(inbound)
        call = self._call(x, found.vector if searched else None)
        keep = found.outcome != "bypass"
        producer, settle = fetcher.producer(arm, call, keep=keep), fetcher.settler(arm, call) if keep else None
        if found.outcome != "miss" or not fetcher.may_be_kept(asked):
            with runtime.flights.start(arm, fp.key, producer, settle=settle) as reader:
                await self._give(x, found, call, reader)
            return
        partial = await self._broken_off(x) if inbound.resume else None
        flight = runtime.flights.find(arm, fp.key, since=x.began)
        if flight is None and searched and not inbound.resume:
            accept = runtime.meaning.alike(asked, found.vector)
            flight = runtime.flights.near(arm, fp.context, accept, since=x.began) if accept is not None else None
        if flight is None and partial is not None:
            producer = fetcher.producer(
                arm, call, partial=replace(partial, meta=validators.stamped(partial.meta, _extended(partial)))
            )
        reader = flight.join() if flight is not None else runtime.flights.join_or_start(
            arm, fp.key, producer, settle=settle, since=x.began,
            context=fp.context if found.vector else b"", about=(fp.text, found.vector) if found.vector else None,
        )  # fmt: skip
        with reader:
            given = await self._give(x, found, call, reader, partial=partial)
        if not given:  # it was the answer to somebody else, for reasons of his own
            with runtime.flights.start(arm, fp.key, producer, settle=settle) as reader:
                await self._give(x, found, call, reader)

    async def _broken_off(self, x: Exchange) -> Entry | None:
        """Return the interrupted stream of the request, if it is that one of which the client has the beginning."""
        inbound = x.inbound
        partial = await self._runtime.fetcher.partial(x.arm, inbound.fp.key)
        if partial is None:
            return None
        going_on = inbound.validator_of(_extended(partial))
        return partial if validators.holds(inbound.validator, going_on, inbound.resume or 0) else None

    async def _give(self, x: Exchange, found: Lookup, call: Call, reader: Reader, *, partial: Entry | None = None) -> bool:
        """Pass a flight's answer on; False, and nothing sent, where it was another client's and is not for this one."""
        asked, flight = x.inbound.asked, reader.flight
        try:
            head = await reader.head()
            if not reader.leader and not head.shareable:
                return False
            # Whether tools are called is known at the end only, and then it may be that the answer is not to be shared.
            live = reader.leader or not x.inbound.calls_tools or self._runtime.settings.admission.tool_calls
            if asked.stream and head.ok and head.form == "sse" and live:
                validator = x.inbound.validator_of(head.headers.get(validators.HEADER, ""))
                offset = x.inbound.resume or 0
                if offset and not validators.holds(x.inbound.validator, validator, offset):
                    # The same words may come in the same events again: then the rest of these is the rest of the client's.
                    same = partial is not None and await reader.begins_with(partial.body)
                    offset = offset if same else 0
                await self._relay(x, found, call, reader, head, validator, offset)
                return True
            body = await reader.body()
        except FlightFailed as error:
            if not reader.leader or (flight.taken_over and not isinstance(error.__cause__, Interrupted)):
                return False
            await self._fail(x, found, _failure(error))
            return True
        if reader.shared and head.ok and flight.state != "complete":
            return False
        kind = (b"content-type", head.content_type.encode("latin-1"))
        recorded, form = body, head.form
        if head.ok and (form == "sse") != asked.stream and (form == "sse" or reader.shared):
            converted = convert(body, form, stream=asked.stream, usage=asked.usage)
            if converted is None and reader.shared:
                return False
            if converted is not None:
                body, kind = converted, STREAM_TYPE if asked.stream else JSON_TYPE
        if not head.ok:
            await self._fail(x, found, UpstreamAnswer(head.status, body, head.content_type, head.headers))
            return True
        outcome, rule = self._how(found, reader)
        headers = [
            kind,
            *self._headers(
                x, outcome, rule, status=head.status, stored=flight.entry is not None, answered=flight.key, tier=_tier(x, reader)
            ),
            *_passed(head),
        ]
        made = validators.content_tag(recorded) if head.ok and form == "json" and kind == STREAM_TYPE else ""
        headers += _begins(x.inbound, x.inbound.validator_of(made), 0)
        if outcome == "collapsed" and flight.entry is not None and self._debug:
            headers.append(saved_tokens(flight.entry))
        await respond(x.send, head.status, headers, body)
        x.answered(lambda: self._given(x, found, call, reader, head, recorded, form))
        return True

    async def _relay(
        self, x: Exchange, found: Lookup, call: Call, reader: Reader, head: Head, validator: str, offset: int
    ) -> None:
        """Pass a stream on as it comes, in the form that this client asked for."""
        inbound = x.inbound
        filters: list[recording.UsageFilter | sse.Numbers | sse.Skip] = []
        if not inbound.asked.usage:
            filters.append(recording.UsageFilter())
        if inbound.numbered:
            filters.append(validators.EventIds(validator))
        if offset:
            filters.append(sse.Skip(offset))
        outcome, rule = self._how(found, reader)
        headers = [
            (b"content-type", head.content_type.encode("latin-1")),
            *self._headers(x, outcome, rule, status=head.status, answered=reader.flight.key, tier=_tier(x, reader)),
            *_passed(head),
            *_begins(inbound, validator, offset),
        ]
        await x.send({"type": "http.response.start", "status": head.status, "headers": headers})
        last = b""
        try:
            async for piece in reader.read():
                for step in filters:
                    piece = step.feed(piece)
                if piece:
                    await x.send({"type": "http.response.body", "body": piece, "more_body": True})
        except FlightFailed as error:
            last = error_event(_failure(error).body)
        else:
            for step in filters:
                last = step.feed(last) + step.close()
        await x.send({"type": "http.response.body", "body": last})
        if reader.flight.state in ("complete", "cut"):
            x.answered(lambda: self._given(x, found, call, reader, head, reader.flight.body or b"", "sse"))
        else:
            x.answered(lambda: self._record(x, "miss", rule, 502, error=True))

    async def _fail(self, x: Exchange, found: Lookup, answer: UpstreamAnswer) -> None:
        """Answer where the model failed: with what is past its TTL if that is allowed, else with the error as it came."""
        runtime = self._runtime
        if answer.status in ERROR_STATUSES and found.exact is not None:
            instead = on_error(
                x.inbound.asked, found.exact, knobs=runtime.cache.knobs(x.arm), rules=runtime.cache.rules, now=x.at
            )
            if instead.entry is not None:
                stale = replace(
                    found, outcome=instead.outcome, entry=instead.entry, tier=runtime.tier_of(x.arm, instead.entry),
                    age=instead.age, stale=instead.stale, similarity=instead.similarity, rule=instead.rule.value,
                    ttl=instead.ttl, revalidate=False,
                )  # fmt: skip
                if await self._serve(x, stale, instead.entry):
                    return
        outcome = found.outcome
        headers = [
            (b"content-type", answer.content_type.encode("latin-1")),
            *self._headers(x, outcome, found.rule, status=answer.status if answer.reached else None),
            *_passed(answer),
        ]
        await respond(x.send, answer.status, headers, answer.body)
        x.answered(lambda: self._record(x, outcome, found.rule, answer.status, error=True))

    def _how(self, found: Lookup, reader: Reader) -> tuple[str, str]:
        if not reader.leader or reader.flight.origin == "replica":
            return "collapsed", Rule.COLLAPSED.value
        return found.outcome, found.rule

    def _given(self, x: Exchange, found: Lookup, call: Call, reader: Reader, head: Head, body: bytes, form: Form) -> None:
        """The client has the model's answer: count it, keep the request for refreshing, learn from it."""
        runtime, flight = self._runtime, reader.flight
        outcome, rule = self._how(found, reader)
        entry = flight.entry
        if entry is None and flight.origin == "replica" and flight.state == "complete":
            entry = runtime.fetcher.as_kept(call, body, form, head, at=x.at)
        tier = _tier(x, reader)
        if outcome == "collapsed":
            runtime.coalesced(x.arm, by_meaning=tier == VECTOR)
        # Nearly the same question is another one: who counts wrong answers by meaning has to count this one as well.
        self._record(x, "semantic_hit" if tier == VECTOR else outcome, rule, head.status, entry=entry, tier=tier)
        if entry is None:
            return
        self._settle(x, entry, call)
        if found.refused is not None and reader.leader:
            runtime.meaning.verify_soon(x.arm, found.refused, entry.body)

    # -- what is said of an answer, and what is learned from it --------------------------------------------------------------

    def _headers(
        self,
        x: Exchange,
        outcome: str,
        rule: str,
        *,
        entry: Entry | None = None,
        ttl: float | None = None,
        age: float | None = None,
        tier: str = "",
        similarity: float = 0.0,
        status: int | None = None,
        stored: bool = False,
        answered: bytes = b"",
    ) -> Headers:
        key = x.inbound.fp.key
        named = entry.key if entry is not None else answered or key
        headers: Headers = [(b"cache-status", cache_status(outcome, rule, named, ttl=ttl, status=status, stored=stored))]
        if age is not None:
            headers.append((b"age", b"%d" % age))
        if not self._debug:
            return headers
        about = (outcome, rule, x.arm, tier, self._runtime.version)
        common = self._common.get(about)
        if common is None:
            if len(self._common) > _MOST_COMMON:
                self._common.clear()
            common = self._common[about] = _common_headers(*about)
        headers += common
        headers.append((b"x-cache-entry", entry_id(named).encode()))
        headers.append((b"x-litellm-cache-key", key.hex().encode()))
        if entry is not None:
            headers.append((b"x-cache-similarity", b"%.4g" % similarity))
            headers.append(saved_tokens(entry))
        return headers

    def _record(
        self,
        x: Exchange,
        outcome: str,
        rule: str,
        status: int,
        *,
        entry: Entry | None = None,
        found: Lookup | None = None,
        tier: str = "",
        error: bool = False,
    ) -> None:
        self._runtime.record(
            x.at, x.took, x.inbound, x.arm, "error" if error else _RECORDED[outcome], status, rule=rule,
            entry=entry, tier=found.tier if found is not None else tier,
            age=found.age if found is not None else 0.0, stale=found.stale if found is not None else 0.0,
            similarity=found.similarity if found is not None else 0.0,
        )  # fmt: skip

    def _settle(self, x: Exchange, entry: Entry, call: Call | None = None) -> None:
        """After the answer: tell the ghost and the hot set, and keep the request for refreshing."""
        runtime, fp = self._runtime, x.inbound.fp
        runtime.answered(x.arm, entry, x.at)
        if entry.key != fp.key:  # by meaning: it is the other request's entry that is hot
            return
        warmer, key = runtime.warmers[x.arm], key64(fp.key)
        if not warmer.knows(key):
            headers = runtime.upstream.forwarded(x.scope["headers"], credentials=False)
            call = replace(call, headers=headers) if call is not None else runtime.fetcher.call(x.inbound, headers, None)
            # Refreshed for nobody in particular: what this caller asked of the cache is not for the next one.
            warmer.remember(key, Remembered(fp, call.body, headers, runtime.fetcher.for_refresh(call)))


def _tier(x: Exchange, reader: Reader) -> str:
    """The tier that a flight's answer counts for: none for one's own, else as it would have been found a moment later."""
    if reader.flight.key != x.inbound.fp.key:
        return VECTOR
    return "memory" if not reader.leader or reader.flight.origin == "replica" else ""


def _common_headers(outcome: str, rule: str, arm: str, tier: str, version: int) -> Headers:
    """The headers that many answers have in common."""
    headers = [
        (b"x-cache", LABELS[outcome]),
        (b"x-cache-arm", arm.encode()),
        (b"x-cachepilot-version", b"%d" % version),
        (b"x-cache-rule", rule.encode()),
    ]
    return [*headers, (b"x-cache-tier", tier.encode())] if tier else headers


def _begins(inbound: Inbound, validator: str, offset: int) -> Headers:
    """The headers that say which stream an answer is, and to one who comes back, where in it the answer begins."""
    place = [(b"x-cache-offset", b"%d" % offset)] if inbound.resume is not None else []
    return [*validators.header(validator), *place]


def _extended(partial: Entry, *, by: str = "") -> str:
    """The tag of what goes on with a stream that broke off."""
    # The chunk with the usage may be missing from what the client has: it has at least the others.
    return validators.extended(validators.tag_of(partial), sse.count(recording.without_usage(partial.body)), by)


def _passed(answer: Head | UpstreamAnswer) -> Headers:
    return [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items() if name != validators.HEADER
    ]


def _failure(error: FlightFailed) -> UpstreamAnswer:
    cause = error.__cause__
    if isinstance(cause, Interrupted):
        return cause.answer
    message = f"the upstream's answer broke off: {cause or error}"
    return UpstreamAnswer(502, openai_error(message, "upstream_error", code="upstream_interrupted"), reached=False)
