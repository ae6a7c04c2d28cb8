"""Runs the soak: two replicas on Ray Serve, a real Redis that is killed, a model that fails, an embedder that hangs, and clients
that ask, leave and come back; every answer is checked. Everything listens on loopback, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from redis.asyncio import Redis

from experiments.soak.model import WatchedModel
from experiments.soak.questions import TENANTS, Ask, Oracle, draw_ask
from experiments.soak.replica import EMBEDDER_HANGS, FAULTS, STATE, SoakedReplica
from experiments.soak.report import Memory, SoakReport
from experiments.soak.stack import ARMS, FIRST_BYTE_SECONDS, NAMESPACE, RestartedRedis, environment, gateway_settings
from experiments.soak.verdicts import FROM_CACHE, Ended, Reply, Verdict, judge
from serving.config_store import ConfigStoreUnavailable, VersionConflict
from serving.knobs import Knobs
from serving.redis_config_store import RedisConfigStore
from serving.settings import LlmSimSettings
from serving.sse import EventParser

CLIENT_SECONDS = 60.0
"""How long a client waits for an answer; far longer than every deadline within the gateway together."""
SETTLE_SECONDS = 45.0
FLUSH_SECONDS = 4.0
"""How long after a flush no replica may answer any more with what it removed."""
CYCLE_SECONDS = 60.0
_STATES = 12


@dataclass(frozen=True)
class SoakOptions:
    """How to soak.

    Attributes:
        seconds: For how long clients ask.
        clients: How many ask at the same time.
        pause: Mean time between an answer and a client's next request, seconds.
        seed: Of questions, faults and pauses.
        failure_rate: Share of the model's calls that fail, hang or are cut; 14, 1 and 5 twentieths of it.
        max_growth: Most bytes by which a replica may grow from the first to the last third.
        command: What reproduces it, for the report.
    """

    seconds: float = 600.0
    clients: int = 16
    pause: float = 0.1
    seed: int = 0
    failure_rate: float = 0.1
    max_growth: int = 64 << 20
    command: str = ""

    def model(self) -> LlmSimSettings:
        """Return the simulated model's settings."""
        rate = self.failure_rate
        return LlmSimSettings(
            port=0, ttft=0.02, tpot=0.003, slots=64, failure_rate=0.7 * rate, hang_rate=0.05 * rate, cut_rate=0.25 * rate,
            fault_seed=self.seed,
        )  # fmt: skip


def run(options: SoakOptions, *, say: Callable[[str], None] = lambda _: None) -> SoakReport:
    """Soak, and return what was seen.

    Args:
        options: How.
        say: Prints a line about what goes on.

    Raises:
        RuntimeError: If a part did not start.
    """
    keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}
    admin = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-soak-", dir="/tmp" if os.name == "posix" else None))
        )
        stack.enter_context(environment(FAULTS, str(folder)))
        # The server ends with the thread that started it: one that lives as long as the soak.
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="soak-redis"))
        redis = RestartedRedis(folder / "redis", thread)
        stack.callback(redis.end)
        model = stack.enter_context(WatchedModel(options.model()))
        settings = gateway_settings(model.base_url, redis.url, keys, admin)
        from serving.app import start

        say("starting the gateway ...")
        gateway = stack.enter_context(start(settings, deadline=180.0, replica=SoakedReplica))
        soak = Soak(options, gateway.url, keys, admin, model, redis, folder / EMBEDDER_HANGS, say)
        return asyncio.run(soak.run())


@dataclass
class Flushed:
    """When a tenant's entries were removed last; ``inf``: never, or it is not certain."""

    began: float = float("inf")
    done: float = float("inf")


@dataclass
class Seen:
    """What happened so far."""

    answers: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    hit_seconds: list[float] = field(default_factory=list)
    longest: float = 0.0


class Soak:
    """One soak under way.

    Args:
        options: How.
        url: The gateway's.
        keys: The tenants' keys.
        admin: The admin API's token.
        model: The model.
        redis: The Redis.
        hangs: The file that makes the embedder hang.
        say: Prints a line.
    """

    def __init__(
        self,
        options: SoakOptions,
        url: str,
        keys: dict[str, str],
        admin: str,
        model: WatchedModel,
        redis: RestartedRedis,
        hangs: Path,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._url, self._keys, self._admin = options, url, keys, admin
        self._model, self._redis, self._hangs, self._say = model, redis, hangs, say
        self._oracle = Oracle(options.model(), NAMESPACE)
        self._seen = Seen()
        self._pending: list[tuple[Ask, Reply, Verdict]] = []
        self._flushed = {tenant: Flushed() for tenant in TENANTS}
        self._store = RedisConfigStore(redis.url, NAMESPACE)
        self._memory: dict[int, list[int]] = {}
        self._over = asyncio.Event()
        self._session: aiohttp.ClientSession
        self._draw = random.Random(options.seed)

    async def run(self) -> SoakReport:
        """Do it."""
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=CLIENT_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session:
            try:
                first = await self._states()
                self._memory = {state["pid"]: [] for state in first.values()}
                await self._soak()
                seconds = time.monotonic() - began
                self._say("settling ...")
                leaks = await self._settle(first)
            finally:
                self._hangs.unlink(missing_ok=True)
                await self._store.close()
        self._resolve()
        seen = self._seen
        return SoakReport(
            command=self._options.command,
            seconds=seconds,
            answers=dict(seen.answers.most_common()),
            events=dict(sorted(seen.events.items())),
            upstream=self._model.counted(),
            hit_seconds=tuple(sorted(seen.hit_seconds)),
            longest=seen.longest,
            memory={pid: Memory.of(samples) for pid, samples in self._memory.items()},
            max_growth=self._options.max_growth,
            leaks=leaks,
            violations=dict(seen.violations),
            examples=tuple(seen.examples),
        )

    async def _soak(self) -> None:
        work = [self._client(number) for number in range(self._options.clients)]
        work += [self._troubles(), self._operate(), self._tune(), self._weigh()]
        tasks = [asyncio.create_task(each) for each in work]
        timer = asyncio.get_running_loop().call_later(self._options.seconds, self._over.set)
        try:
            await asyncio.gather(*tasks)
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, seconds: float) -> bool:
        """Wait; whether the soak goes on."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return not self._over.is_set()

    # -- clients -------------------------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self._options.seed} {number}")
        while await self._wait(draw.expovariate(1.0 / self._options.pause)):
            ask = draw_ask(draw)
            reply = await self._ask(ask, {}, leaves_after=ask.patience)
            self._judged(ask, reply, judge(ask, reply, self._oracle))
            # Who has everything does not come back.
            unfinished = reply.ended == "left" and reply.status == 200 and b"data: [DONE]" not in reply.body
            if ask.behaviour == "returns" and unfinished:
                await asyncio.sleep(draw.uniform(0.0, 1.5))
                await self._return(ask, reply)

    async def _return(self, ask: Ask, first: Reply) -> None:
        """Come back for the rest of a stream."""
        parser = EventParser()
        had = parser.feed(first.body)
        before = first.body[: had[-1].end] if had else b""
        back = {"x-cache-offset": str(len(had)), "if-range": first.headers.get("etag", "")}
        reply = await self._ask(ask, back, leaves_after=0)
        offset = reply.headers.get("x-cache-offset", "")
        self._seen.events["reconnects"] += 1
        if reply.status == 200 and offset not in ("0", str(len(had))):
            verdict = Verdict(reply.label, "wrong_offset", f"x-cache-offset {offset!r}, asked for {len(had)}")
        else:
            goes_on = reply.status == 200 and offset != "0"
            self._seen.events["reconnects that got the rest"] += goes_on
            verdict = judge(ask, reply, self._oracle, before if goes_on else b"")
        self._judged(ask, reply, verdict, had=len(had))

    async def _ask(self, ask: Ask, headers: dict[str, str], *, leaves_after: int) -> Reply:
        """Send a request and read its answer, at most so many events of it (0: all)."""
        headers = {**ask.headers(), "authorization": f"Bearer {self._keys[ask.tenant]}", **headers}
        began, status, body, parser = time.monotonic(), 0, bytearray(), EventParser()
        got: dict[str, str] = {}
        ended: Ended = "whole"
        error = ""
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json=ask.body(self._options.model().model), headers=headers
            ) as answer:
                status, got = answer.status, {name.lower(): value for name, value in answer.headers.items()}
                events = 0
                async for chunk in answer.content.iter_any():
                    body += chunk
                    events += len(parser.feed(chunk)) if leaves_after else 0
                    if leaves_after and events >= leaves_after:
                        ended = "left"
                        answer.close()
                        break
        except TimeoutError:
            ended, error = "nothing", f"no answer within {CLIENT_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as failure:
            ended, error = "broken", f"{type(failure).__name__}: {failure}"
        return Reply(status, got, bytes(body), ended, began, time.monotonic(), time.time(), error)

    def _judged(self, ask: Ask, reply: Reply, verdict: Verdict, *, had: int = 0) -> None:
        seen, took = self._seen, reply.until - reply.began
        seen.answers[verdict.counted] += 1
        seen.events["streamed" if ask.stream else "json"] += 1
        if ask.directive:
            seen.events[f"directive {ask.directive}"] += 1
        seen.longest = max(seen.longest, took)
        if reply.status == 200 and reply.label in FROM_CACHE and reply.ended == "whole":
            seen.hit_seconds.append(took)
            flushed = self._flushed[ask.tenant]
            age = float(reply.headers.get("age", "0"))
            if not verdict.violation and reply.began > flushed.done + FLUSH_SECONDS and age > reply.until - flushed.began + 1.5:
                verdict = Verdict(
                    reply.label, "flushed_answer", f"age {age:g} s, flushed {reply.until - flushed.began:.1f} s ago"
                )
        if verdict.excuse:
            self._pending.append((ask, reply, verdict))
        elif verdict.violation:
            self._violation(verdict.violation, verdict.detail, ask=ask, reply=reply, had=had)

    def _resolve(self) -> None:
        """Look for the model's faults that excuse what the clients saw; the model may record them later than they do."""
        for ask, reply, verdict in self._pending:
            assert verdict.excuse
            messages = [ask.messages(text) for text in ask.question.alike]
            if not self._model.caused(messages, verdict.excuse, reply.began, reply.until, patience=0.5 * FIRST_BYTE_SECONDS):
                self._violation(verdict.violation, f"not the model's doing: {verdict.detail}", ask=ask, reply=reply)

    def _violation(self, name: str, detail: str, *, ask: Ask | None = None, reply: Reply | None = None, had: int = 0) -> None:
        self._seen.violations[name] += 1
        if len(self._seen.examples) < 50:
            example: dict[str, Any] = {"violation": name, "detail": detail}
            if ask is not None and reply is not None:
                example |= {
                    "asked": repr(ask), "status": reply.status, "headers": dict(reply.headers), "events_before": had,
                    "seconds": round(reply.until - reply.began, 3), "at": reply.at,
                    "body": reply.body[:400].decode(errors="replace"),
                }  # fmt: skip
            self._seen.examples.append(example)
            self._say(f"VIOLATION {name}: {detail}")

    # -- what goes wrong around it -------------------------------------------------------------------------------------------

    async def _troubles(self) -> None:
        """Each cycle: Redis killed, the embedder hung, Redis frozen, Redis killed while the embedder hangs."""
        cycle = min(CYCLE_SECONDS, self._options.seconds)
        steps: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.15, self._kill), (0.23, self._restart), (0.35, self._hang), (0.50, self._recover), (0.58, self._freeze),
            (0.63, self._thaw), (0.72, self._hang), (0.75, self._kill), (0.82, self._restart), (0.86, self._recover),
        ]  # fmt: skip
        began = time.monotonic()
        number = 0
        try:
            while True:
                for share, step in steps:
                    due = began + (number + share) * cycle
                    if not await self._wait(max(0.0, due - time.monotonic())):
                        return
                    await step()
                number += 1
        finally:
            self._hangs.unlink(missing_ok=True)
            await self._thaw()
            await self._restart()

    def _uncertain(self) -> None:
        """A flush that not every replica may have heard of says nothing."""
        for flushed in self._flushed.values():
            if flushed.done > time.monotonic() - FLUSH_SECONDS:
                flushed.began = flushed.done = float("inf")

    async def _kill(self) -> None:
        self._uncertain()
        self._seen.events["Redis killed"] += 1
        self._say(f"{self._progress()}: Redis killed")
        self._down = True
        await asyncio.to_thread(self._redis.kill)

    _down = False
    _frozen = False

    async def _restart(self) -> None:
        if self._down:
            await asyncio.to_thread(self._redis.start)
            self._down = False
            self._uncertain()

    async def _freeze(self) -> None:
        self._uncertain()
        self._seen.events["Redis frozen"] += 1
        self._frozen = True
        self._redis.freeze(True)

    async def _thaw(self) -> None:
        if self._frozen:
            self._redis.freeze(False)
            self._frozen = False
            self._uncertain()

    async def _hang(self) -> None:
        self._seen.events["embedder hung"] += 1
        self._say(f"{self._progress()}: the embedder hangs")
        self._hangs.touch()

    async def _recover(self) -> None:
        self._hangs.unlink(missing_ok=True)

    def _progress(self) -> str:
        answers = self._seen.answers
        return f"{sum(answers.values()):,} answers, {sum(self._seen.violations.values())} violations"

    # -- what operators and the tuner do -------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        """Flush by tenant, tag, or everything; ask for stats and knobs."""
        tenants = tuple(TENANTS)
        period = min(12.0, self._options.seconds / 8)
        while await self._wait(self._draw.uniform(0.5, 1.5) * period):
            tenant = self._draw.choice(tenants)
            where: dict[str, Any] = self._draw.choice([{"tenant": tenant}] * 6 + [{"tag": "seasonal"}, {"all": True}])
            began = time.monotonic()
            status, _ = await self._administer("POST", "flush", where)
            if status == 200:
                self._seen.events["flushes"] += 1
                for name in tenants if where == {"all": True} else (tenant,) if "tenant" in where else ():
                    troubled = self._down or self._frozen
                    self._flushed[name] = Flushed() if troubled else Flushed(began, time.monotonic())
            elif status == 503:
                self._seen.events["flushes refused while Redis was away"] += 1
            else:
                self._violation("admin_error", f"flush {where}: status {status}")
            status, _ = await self._administer("GET", "stats")
            if status not in (200, 503):
                self._violation("admin_error", f"stats: status {status}")

    async def _administer(self, method: str, name: str, body: Any = None) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self._admin}"}
        try:
            async with self._session.request(method, f"{self._url}/admin/v1/{name}", json=body, headers=headers) as answer:
                return answer.status, await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0, None

    async def _tune(self) -> None:
        """Change the knobs as the tuner does: through the config store, with the version that was read."""
        period = min(10.0, self._options.seconds / 8)
        while await self._wait(self._draw.uniform(0.5, 1.5) * period):
            knobs = {
                arm: Knobs(
                    self._draw.choice((24, 64, 256, 512)) << 10,
                    self._draw.choice((2.0, 15.0, 60.0)),
                    self._draw.choice((0.0, 0.2)),
                )
                for arm in ARMS
            }
            self._seen.events["knob changes" if await self._write(knobs) else "knob changes that found no Redis"] += 1

    async def _write(self, knobs: dict[str, Knobs]) -> bool:
        try:
            found = await self._store.read()
            version = 0 if found is None else found.version
            await self._store.write(knobs, expected_version=version, author="soak", reason="to change them", now=time.time())
        except (ConfigStoreUnavailable, VersionConflict):
            return False
        return True

    # -- what is left --------------------------------------------------------------------------------------------------------

    async def _weigh(self) -> None:
        """Take the replicas' resident memory."""
        processes = {pid: psutil.Process(pid) for pid in self._memory}
        while await self._wait(min(1.0, self._options.seconds / 60)):
            for pid, process in processes.items():
                try:
                    self._memory[pid].append(process.memory_info().rss)
                except psutil.NoSuchProcess:
                    self._violation("replica_died", f"the replica in process {pid} has ended")
                    return

    async def _states(self) -> dict[str, dict[str, Any]]:
        return await replica_states(self._session, self._url)

    async def _settle(self, first: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Wait until nothing is under way, remove everything, and return what is left that should not be."""
        quiet = dict.fromkeys(ARMS, Knobs(64 << 10, 5.0, 0.0))
        end = time.monotonic() + SETTLE_SECONDS
        while not await self._write(quiet) and time.monotonic() < end:
            await asyncio.sleep(0.5)
        leaks: dict[str, Any] = {}
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            leaks = await self._leaks(first)
            if not leaks:
                break
        for name, what in leaks.items():
            self._violation("leaked", f"{name}: {what}")
        return leaks

    async def _leaks(self, first: dict[str, dict[str, Any]]) -> dict[str, Any]:
        try:
            states = await self._states()
        except RuntimeError as error:
            return {"replicas": str(error)}
        leaks: dict[str, Any] = {}
        if set(states) != set(first):
            leaks["replicas"] = f"{sorted(states)}, at the start {sorted(first)}"
        for name, state in states.items():
            begun = first.get(name, state)["tasks"]
            more = {
                coroutine: count - begun.get(coroutine, 0)
                for coroutine, count in state["tasks"].items()
                if count > max(begun.get(coroutine, 0), 1 if coroutine in _ONCE else 0)
            }
            if more:
                leaks[f"tasks of {name}"] = more
            under_way = {what: state[what] for what in ("flights", "calls") if state[what]}
            if under_way:
                leaks[f"under way in {name}"] = under_way
        status, stats = await self._administer("GET", "stats")
        if status != 200:
            return {**leaks, "stats": f"status {status}"}
        over = {
            f"{arm} {tier}": f"{held['bytes']:,} of {held['budget']:,} bytes"
            for arm, tiers in stats["arms"].items()
            for tier, held in tiers.items()
            if held["budget"] is not None and held["bytes"] > held["budget"]
        }
        if over:
            leaks["over budget"] = over
        status, _ = await self._administer("POST", "flush", {"all": True})
        if status != 200:
            leaks["flush"] = f"status {status}"
        keys = await self._keys_left()
        if keys:
            leaks["Redis keys"] = keys
        return leaks

    async def _keys_left(self) -> dict[str, int]:
        """Count the keys in Redis that hold answers, flights or leases, by kind; after a flush there are none."""
        kinds: Counter[str] = Counter()
        async with Redis.from_url(self._redis.url) as client:
            async for key in client.scan_iter(f"cachepilot:{{{NAMESPACE}*", count=500):
                kind = key.decode(errors="replace").rpartition("}:")[2].partition(":")[0]
                if kind not in _KEPT_KEYS:
                    kinds[kind] += 1
        return dict(kinds)


async def replica_states(session: aiohttp.ClientSession, url: str, *, seconds: float = 60.0) -> dict[str, dict[str, Any]]:
    """Return what each of the two replicas holds, by name; the ingress spreads the questions over them.

    Args:
        session: To ask with.
        url: The ingress.
        seconds: How long it is asked until both have answered; an ingress without a replica that is ready is asked again.

    Raises:
        RuntimeError: If not both did, or something else than a soaked replica answers; says what.
    """
    found: dict[str, dict[str, Any]] = {}
    last = "nothing"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for answer in await asyncio.gather(*(_state(session, url) for _ in range(_STATES))):
            if isinstance(answer, str):
                last = answer
            else:
                found[answer["replica"]] = answer
        if len(found) >= 2:
            return found
    raise RuntimeError(
        f"soak: expected two replicas to say what they hold at {url}{STATE}, got {sorted(found)}; what else answered: {last}"
    )


async def _state(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | str:
    """Ask once; what a replica holds, or what went wrong for now."""
    try:
        async with session.get(url + STATE) as answer:
            status, body = answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    said = f"status {status}, {body[:200].decode(errors='replace')!r}"
    if status >= 500:
        return said
    try:
        state = orjson.loads(body) if status == 200 else None
    except orjson.JSONDecodeError:
        state = None
    if not isinstance(state, dict) or not {"replica", "pid", "tasks", "flights", "calls"} <= set(state):
        raise RuntimeError(
            f"soak: expected a soaked replica to answer at {url}{STATE}, got {said}: something else listens there, another "
            "gateway perhaps; end it, or see which port the soak's own has"
        )
    return state


_KEPT_KEYS = frozenset(("state", "desired", "applied", "audit", "leader", "acceptance", "accesses", "memories", "neighbours"))
"""Kinds of keys that are there once per arm or namespace, whatever was asked."""

_ONCE = frozenset(("FlightFeed._listen",))
"""Coroutines of which a replica begins one with its first request, and keeps it."""
