"""The way to the model: one call for all who ask the same meanwhile, its answer recorded as it passes, and kept if it may be.

What is kept is what came: a stream as its events, anything else as its JSON. A stream that breaks off is kept under a key of its
own, never as an answer, so that a client that comes back can go on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from serving import recording, sse, validators
from serving.admission import AdmissionRules, CompletedAnswer, Refusal, admit
from serving.by_meaning import ByMeaning
from serving.cache import TieredCache
from serving.directives import Directives
from serving.flights import Flight, Flights, Head, Producer, Settle
from serving.inbound import PATHS, Inbound, dumps, upstream_body
from serving.keys import Endpoint
from serving.metrics import GatewayMetrics
from serving.openai_error import JSON
from serving.policy import Asked, entry_ttl
from serving.settings import GatewaySettings
from serving.storing import ROUNDS, Storing
from serving.tiers.base import Entry, EntryMeta, Form
from serving.turns import Overloaded
from serving.upstream import MOST_TOKENS, Interrupted, Upstream, UpstreamAnswer, overloaded

_log = logging.getLogger(__name__)

STORE_SECONDS = 0.05
"""How long a request waits for the answer before it to be stored, so that it finds it; a slow store does not keep it."""

PARTIAL_SECONDS = 600.0
"""How long a stream that broke off is kept for a client that comes back."""


@dataclass(frozen=True, slots=True)
class Call:
    """What it takes to ask the model and to keep its answer.

    Attributes:
        asked: The request as the decision core sees it.
        endpoint: What is asked.
        body: The body to send.
        headers: The headers to send.
        meta: What is kept beside the answer (:class:`serving.tiers.base.EntryMeta`, as JSON).
        vector: Embedding of the last user text; ``b""``: it has none; None: not computed yet.
        ttl: Seconds that the answer may be kept; None: what its caller asked for.
    """

    asked: Asked
    endpoint: Endpoint
    body: bytes
    headers: Mapping[str, str]
    meta: bytes = b""
    vector: bytes | None = b""
    ttl: float | None = None


def partial_key(key: bytes) -> bytes:
    """Return the key under which an interrupted stream of this request is kept."""
    return hashlib.sha256(b"partial" + key).digest()


def tokens_of(parsed: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the prompt and completion tokens that an answer was billed for; zeros where it does not say."""
    usage = parsed.get("usage") if parsed is not None else None
    if not isinstance(usage, Mapping):
        return 0, 0
    given = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else 0 for value in given)
    return prompt, completion


class Fetcher:
    """Asks the model, records and keeps.

    Args:
        settings: The data plane's settings.
        upstream: The model.
        cache: Where answers are kept.
        flights: The calls under way.
        meaning: Gives texts their embeddings.
        metrics: Where tokens, errors and refusals are counted.
        clock: Seconds since the epoch.

    Attributes:
        storing: The answers that are being stored.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        upstream: Upstream,
        cache: TieredCache,
        flights: Flights,
        meaning: ByMeaning,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._upstream, self._cache, self._flights = settings, upstream, cache, flights
        self._meaning, self._metrics, self._clock = meaning, metrics, clock
        self._admission = AdmissionRules(**settings.admission.model_dump())
        self.storing = Storing(STORE_SECONDS)
        # Of several replicas another one may be asked next, and knows nothing of what is under way here.
        self._store_first = settings.replicas > 1

    async def close(self) -> None:
        """Wait for answers that are being stored."""
        await self.storing.close()

    # -- calls ---------------------------------------------------------------------------------------------------------------

    def call(self, inbound: Inbound, headers: Mapping[str, str], vector: bytes | None) -> Call:
        """Return the call that answers a request.

        Args:
            inbound: The request.
            headers: The headers to send.
            vector: See :class:`Call`.
        """
        body = upstream_body(inbound.raw, inbound.body, usage=self._settings.streams.usage)
        meta = inbound.meta(text=self._meaning.enabled and bool(inbound.fp.text) and vector != b"")
        return Call(inbound.asked, inbound.endpoint, body, headers, meta.dump(), vector)

    def for_refresh(self, call: Call) -> Call:
        """Return the call as it is made for no client in particular: nothing is asked of the cache, its text is embedded anew."""
        asked = call.asked
        kept = Directives(ttl=asked.directives.ttl, namespace=asked.directives.namespace)
        return replace(call, asked=replace(asked, directives=kept, refresh=True), vector=None)

    def may_be_kept(self, asked: Asked) -> bool:
        """Whether any answer to the request would be kept: else nobody else is to wait for it."""
        limit = self._admission.max_temperature
        temperature = 1.0 if asked.temperature is None else asked.temperature
        return not asked.directives.no_store and (limit is None or temperature <= limit)

    def producer(self, arm: str, call: Call, *, cause: str = "miss", keep: bool = True, partial: Entry | None = None) -> Producer:
        """Return what makes a flight's answer.

        Args:
            arm: The arm.
            call: What to ask.
            cause: ``miss`` or ``refresh``: why tokens are spent.
            keep: Whether the answer may be kept.
            partial: An interrupted stream of the same request that is to be gone on with.
        """

        async def produce(flight: Flight) -> None:
            since = self._cache.last_removal(arm)
            if flight.head is not None:
                # Another replica's answer is gone on with. Its clients may have more of it, or will have it cut otherwise.
                flight.head = _tagged(flight.head, validators.new_tag())
            if partial is not None:
                await self._go_on(flight, arm, call, partial, cause, since)
            elif call.asked.stream:
                await self._stream(flight, arm, call, cause, since, keep=keep)
            else:
                await self._whole(flight, arm, call, cause, since, keep=keep)
            # Its readers have it; a flush has to find it among what is under way until it is stored.
            await self.storing.arrived(arm, flight.key)

        return produce

    def settler(self, arm: str, call: Call) -> Settle | None:
        """Return what keeps a stream that broke off; None where none is kept."""
        if not call.asked.stream or not self._settings.streams.keep_partial or not self.may_be_kept(call.asked):
            return None
        since = self._cache.last_removal(arm)

        async def settle(flight: Flight) -> None:
            body, head = flight.body, flight.head
            if (
                flight.outdated
                or flight.state == "complete"
                or not body
                or head is None
                or not head.ok
                or head.private
                or head.form != "sse"
            ):
                return
            body = sse.whole(body)
            if not body or len(body) > self._admission.max_entry_bytes or recording.assemble(body).done:
                return
            entry = Entry(
                partial_key(flight.key), body, self._clock(), meta=_stamped(_without_text(call.meta), head), form="sse",
                complete=False, ttl=PARTIAL_SECONDS,
            )  # fmt: skip
            await self._cache.put(arm, entry, now=entry.written_at, since=since)

        return settle

    async def partial(self, arm: str, key: bytes) -> Entry | None:
        """Return the interrupted stream of a request, if there is one."""
        found = await self._cache.find(arm, partial_key(key))
        if found is None or self._clock() - found[0].written_at > PARTIAL_SECONDS:
            return None
        return found[0] if not found[0].complete else None

    def as_kept(self, call: Call, body: bytes, form: Form, head: Head, *, at: float) -> Entry:
        """Return the entry that another replica has made of its answer to this request, as far as it can be known here.

        Args:
            call: The request.
            body: The answer's bytes.
            form: What they are.
            head: What came before them.
            at: When the answer was made, by the clock.
        """
        answer = UpstreamAnswer(head.status, body, head.content_type, head.headers)
        parsed = recording.to_json(body) if form == "sse" else _json_object(answer)
        return self._entry(call, body, form, parsed, call.vector, head, at)

    async def refresh(self, arm: str, call: Call) -> None:
        """Ask anew and replace what is kept; joins the same call where it is under way. Never raises for what the model does."""
        key = call.asked.fp.key
        known = await self._cache.find(arm, key)
        if known is not None:
            # It stays what it was made as: a flush of its documents has to reach what replaces it, and how long it may be kept
            # was for its first caller to say, not for the one who happened to meet it when it was old.
            made = EntryMeta.load(known[0].meta)
            meta = replace(EntryMeta.load(call.meta), tags=made.tags, documents=made.documents)
            call = replace(call, meta=meta.dump(), ttl=known[0].ttl)
        with self._flights.join_or_start(arm, key, self.producer(arm, call, cause="refresh")) as reader:
            try:
                await reader.body()
            except RuntimeError as error:
                _log.debug("a refresh in arm %s failed: %s", arm, error)
        await self.storing.arrived(arm, key)

    # -- inside --------------------------------------------------------------------------------------------------------------

    async def _whole(self, flight: Flight, arm: str, call: Call, cause: str, since: int | None, *, keep: bool) -> None:
        embedding = self._embedding(call, keep=keep)
        try:
            answer = await self._upstream.call(PATHS[call.endpoint], call.body, call.headers)
        except Overloaded as error:
            answer = self._no_turn(arm, error)
        flight.begin(self._head(answer))
        parsed = _json_object(answer)
        refusal = self._billed(arm, call, cause, answer, parsed, len(answer.body), interrupted=False)
        if refusal is None and keep:
            entry = self._entry(call, answer.body, "json", parsed, await _vector(embedding, call), flight.head, self._clock())
            await self._keep(flight, arm, entry, since)
        if answer.body:
            await flight.append(answer.body)
        flight.finish(refusal is None)

    async def _stream(self, flight: Flight, arm: str, call: Call, cause: str, since: int | None, *, keep: bool) -> None:
        embedding = self._embedding(call, keep=keep)
        try:
            async with self._upstream.stream(PATHS[call.endpoint], call.body, call.headers) as (answer, chunks):
                flight.begin(self._head(answer))
                async for chunk in chunks:
                    await flight.append(chunk)
        except Overloaded as error:
            answer = self._no_turn(arm, error)
            flight.begin(self._head(answer))
            await flight.append(answer.body)
        except Interrupted:
            self._metrics.count("cachepilot_upstream_errors_total", arm)
            raise
        body = flight.body or b""
        form = flight.head.form if flight.head is not None else "json"
        if form == "sse":
            assembly = recording.assemble(body)
            parsed, interrupted = assembly.whole(), not assembly.finished(call.asked.choices)
        else:  # an error, or a server that does not stream
            parsed, interrupted = _json_object(replace(answer, body=body)), False
        size = len(body) if body else flight.position
        refusal = self._billed(arm, call, cause, answer, parsed, size, interrupted=interrupted)
        if refusal is None and keep:
            entry = self._entry(call, body, form, parsed, await _vector(embedding, call), flight.head, self._clock())
            await self._keep(flight, arm, entry, since)
        flight.finish(refusal is None)

    async def _go_on(self, flight: Flight, arm: str, call: Call, partial: Entry, cause: str, since: int | None) -> None:
        """What there is goes out at once; then the model says the rest."""
        flight.begin(_tagged(Head(200, "text/event-stream; charset=utf-8"), validators.tag_of(partial)))
        await flight.append(partial.body)
        continued = _continued(call, partial.body) if self._settings.streams.resume == "continue" else None
        if continued is None:
            flight.resume()
            await self._stream(flight, arm, call, cause, since, keep=True)
            if flight.entry is not None:
                await self._forget(arm, partial.key)
            return
        async with self._upstream.stream(PATHS[call.endpoint], continued, call.headers) as (answer, chunks):
            if not answer.ok:
                self._metrics.count("cachepilot_upstream_errors_total", arm)
                raise RuntimeError(f"the model did not go on with the answer: status {answer.status}")
            async for chunk in chunks:
                await flight.append(chunk)
        # Two calls were billed for it and neither said the whole, so it is nobody else's answer.
        flight.finish(False)

    async def _forget(self, arm: str, key: bytes) -> None:
        try:
            await self._cache.delete_many(arm, [key])
        except RuntimeError as error:
            _log.debug("an interrupted stream in arm %s stays until it is evicted: %s", arm, error)

    def _no_turn(self, arm: str, error: Overloaded) -> UpstreamAnswer:
        self._metrics.count("cachepilot_upstream_rejections_total", arm)
        return overloaded(error)

    def _head(self, answer: UpstreamAnswer) -> Head:
        private = answer.no_store and self._admission.heed_no_store
        head = Head(answer.status, answer.content_type, answer.headers, private)
        return _tagged(head, validators.new_tag())

    def _embedding(self, call: Call, *, keep: bool) -> asyncio.Task[bytes] | None:
        """The embedding of a request that was not looked up by meaning, computed while the model works."""
        text = call.asked.fp.text
        if call.vector is not None or not text or not keep or not self._meaning.enabled:
            return None
        return asyncio.create_task(self._meaning.embed(text), name="embed-answered")

    def _billed(
        self,
        arm: str,
        call: Call,
        cause: str,
        answer: UpstreamAnswer,
        parsed: Mapping[str, Any] | None,
        size: int,
        *,
        interrupted: bool,
    ) -> Refusal | None:
        """Count what the answer cost; say why it is not kept."""
        if not answer.ok:
            if answer.status != 429 or answer.reached:
                self._metrics.count("cachepilot_upstream_errors_total", arm)
            return Refusal.STATUS
        self._metrics.tokens(arm, cause, *tokens_of(parsed))
        finished = CompletedAnswer(answer.status, parsed, call.endpoint, size, interrupted, answer.no_store)
        refusal = admit(finished, call.asked, self._admission, self._cache.rules)
        if refusal is not None:
            self._metrics.count("cachepilot_answers_not_kept_total", arm, refusal.value)
        return refusal

    def _entry(
        self,
        call: Call,
        body: bytes,
        form: Form,
        parsed: Mapping[str, Any] | None,
        vector: bytes | None,
        head: Head | None,
        at: float,
    ) -> Entry:
        asked = call.asked
        prompt, completion = tokens_of(parsed)
        meta = call.meta if vector else _without_text(call.meta)
        ttl = entry_ttl(asked.directives, self._cache.rules) if call.ttl is None else call.ttl
        entry = Entry(
            asked.fp.key, body, at, prompt, completion, asked.fp.context if vector else b"", vector or b"",
            _stamped(meta, head) if form == "sse" else meta, form, ttl=ttl,
        )  # fmt: skip
        store = self._cache.store
        return store.charged(entry) if store is not None else entry

    async def _keep(self, flight: Flight, arm: str, entry: Entry, since: int | None) -> None:
        """Begin to store what a flight became, unless a flush came while it was under way: after the removal known before."""
        if flight.outdated:
            return
        flight.entry = entry
        rounds = 0 if self._store_first else ROUNDS
        self.storing.begin(arm, entry.key, entry.context, lambda: self._put(flight, arm, entry, since), rounds=rounds)
        if self._store_first:
            await self.storing.arrived(arm, entry.key)

    async def _put(self, flight: Flight, arm: str, entry: Entry, since: int | None) -> None:
        if flight.outdated:
            return
        try:
            await self._cache.put(arm, entry, now=entry.written_at, since=since)
        except Exception:  # noqa: BLE001 - an answer that cannot be kept is given all the same
            _log.exception("an answer of arm %s could not be kept", arm)


def _tagged(head: Head, tag: str) -> Head:
    """Return the head of an answer, a stream's with the tag by which it is known."""
    return replace(head, headers={**head.headers, validators.HEADER: tag}) if head.ok and head.form == "sse" else head


def _stamped(meta: bytes, head: Head | None) -> bytes:
    tag = head.headers.get(validators.HEADER) if head is not None else None
    return meta if tag is None else validators.stamped(meta, tag)


def _without_text(meta: bytes) -> bytes:
    return replace(EntryMeta.load(meta), text="").dump() if b'"text"' in meta else meta


def _json_object(answer: UpstreamAnswer) -> dict[str, Any] | None:
    if not answer.ok or answer.content_type.partition(";")[0].strip().lower() != JSON:
        return None
    try:
        parsed = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


async def _vector(embedding: asyncio.Task[bytes] | None, call: Call) -> bytes | None:
    return await embedding if embedding is not None else call.vector


def _continued(call: Call, partial: bytes) -> bytes | None:
    """Return the body that lets the model continue its own words (vLLM); None where that cannot be asked."""
    body = orjson.loads(call.body)
    if call.endpoint != "chat" or body.get("tools") or body.get("functions") or call.asked.choices != 1:
        return None
    assembly = recording.assemble(partial)
    message = assembly.choices.get(0, {}).get("message", {})
    text = message.get("content")
    plain = not assembly.failed and set(assembly.choices) == {0} and set(message) <= {"role", "content"}
    if not plain or not isinstance(text, str) or not text:
        return None
    messages = [*body["messages"], {"role": "assistant", "content": text}]
    return dumps({**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False})
