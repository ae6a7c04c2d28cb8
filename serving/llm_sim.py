"""A simulated model server: OpenAI's API, deterministic answers, latency of a continuous-batching engine, vLLM's metric names.

It chats, says the same in the form of the legacy ``/v1/completions`` (:mod:`serving.llm_sim_forms`), and makes embeddings
(:mod:`serving.llm_sim_embeddings`); any other path is a 404 that names these. An answer is a function of (model, revision,
messages); its length comes from the header ``x-llm-sim-output-tokens``, else from the prompt's hash. Latency follows
:class:`serving.latency.UpstreamModel`. The JSON around a chat's text has a constant length, so that the size of a cached answer
is known from its number of tokens (:func:`answer_size`).

It fails on purpose where it is told to: ``failure_rate``, ``hang_rate`` and ``cut_rate`` of the settings are shares of the
calls, chosen by ``fault_seed`` and the number of the call since the start, so that a run can be made again and a second
try may succeed. A client that goes away takes its request with it, out of the queue or off its slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serving.llm_sim_embeddings import CHARS_PER_TOKEN as CHARS_PER_TOKEN
from serving.llm_sim_embeddings import BadInput, embed
from serving.llm_sim_errors import BadRequest, failure, unknown
from serving.llm_sim_forms import CHAT, LEGACY, Form, messages_of
from serving.settings import LlmSimSettings

if TYPE_CHECKING:
    import uvicorn

OUTPUT_TOKENS_HEADER = "x-llm-sim-output-tokens"
MAX_OUTPUT_TOKENS = 1_000_000

_VOCABULARY = (  # noqa: SIM905 - a list of 59 literals reads worse
    "the and for are but not you all any can had her was one our out day get has him his how new now old see two way who did its"
    " let put say she too use air art ask bay bed big box bus buy car cup cut dry ear eat egg end eye far few fly fun"
).split()
_WORDS = tuple(_VOCABULARY[i % len(_VOCABULARY)] for i in range(256))
_CREATED = 1_700_000_000
_ANSWER = (
    '{"id":"chatcmpl-%s","object":"chat.completion","created":%d,"model":%s,'
    '"choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"logprobs":null,"finish_reason":%s}],'
    '"usage":{"prompt_tokens":%8d,"completion_tokens":%8d,"total_tokens":%8d},"system_fingerprint":"fp_%s"}'
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says to one request.

    Attributes:
        digest: Hash of (model, revision, messages), hexadecimal.
        text: The answer, 4 characters per token.
        prompt_tokens: Billed prompt tokens.
        output_tokens: Billed completion tokens.
        finish_reason: ``stop``, or ``length`` where ``max_tokens`` cut it.
    """

    digest: str
    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str

    def usage(self) -> dict[str, int]:
        """Return what is billed, as a stream's last chunk says it."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def to_json(self, model: str, revision: str) -> bytes:
        """Return the body of a chat completion; its length depends on ``model`` and ``output_tokens`` only (for ``stop``)."""
        return (
            _ANSWER
            % (
                self.digest[:24],
                _CREATED,
                orjson.dumps(model).decode(),
                self.text,
                f'"{self.finish_reason}"',
                # numbers are padded with blanks, which JSON allows, so that the length is known beforehand
                self.prompt_tokens,
                self.output_tokens,
                self.prompt_tokens + self.output_tokens,
                hashlib.sha256(revision.encode()).hexdigest()[:10],
            )
        ).encode()


def text_of(seed: bytes, tokens: int) -> str:
    """Return a text of exactly ``4 * tokens`` ASCII characters, a function of its arguments."""
    return " ".join(map(_WORDS.__getitem__, hashlib.shake_128(seed).digest(tokens))) + "."


def answer_size(output_tokens: int, model: str = "llm-sim") -> int:
    """Return the bytes of a complete answer's body with that many completion tokens."""
    return len(Answer("0" * 24, "", 0, 0, "stop").to_json(model, "")) + CHARS_PER_TOKEN * output_tokens


def prompt_tokens_of(messages: list[Any]) -> int:
    """Return the prompt tokens billed for the messages: their text's characters over 4, at least 1."""
    characters = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            characters += len(content)
        elif isinstance(content, list):
            characters += sum(len(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return max(1, math.ceil(characters / CHARS_PER_TOKEN))


def answer(body: Mapping[str, Any], settings: LlmSimSettings, *, output_tokens: int | None = None) -> Answer:
    """Return the model's answer to a request.

    Args:
        body: The request; ``messages`` is a list.
        settings: The server's settings.
        output_tokens: Length of the complete answer; None takes one from the prompt's hash.
    """
    messages = body["messages"]
    seed = hashlib.sha256(orjson.dumps([settings.model, settings.revision, messages], option=orjson.OPT_SORT_KEYS)).digest()
    if output_tokens is None:
        span = settings.max_output_tokens - settings.min_output_tokens + 1
        output_tokens = settings.min_output_tokens + int.from_bytes(seed[:8], "big") % span
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    finish = "stop"
    if isinstance(limit, int) and 0 < limit < output_tokens:
        output_tokens, finish = limit, "length"
    return Answer(seed.hex(), text_of(seed, output_tokens), prompt_tokens_of(messages), output_tokens, finish)


Fault = Literal["", "error", "unavailable", "hang", "cut"]
"""How a completion goes wrong: 500, 503, never an answer, half an answer; ``""``: not at all."""


def fault(number: int, settings: LlmSimSettings) -> Fault:
    """Return how the completion of that number, counted since the start, goes wrong."""
    digest = hashlib.sha256(b"%d %d" % (settings.fault_seed, number)).digest()
    draw = int.from_bytes(digest[:6], "big") / 2**48
    if draw < settings.failure_rate:
        return "error" if digest[6] & 1 else "unavailable"
    if draw < settings.failure_rate + settings.hang_rate:
        return "hang"
    return "cut" if draw < settings.failure_rate + settings.hang_rate + settings.cut_rate else ""


class Engine:
    """The slots: admits in order of arrival, runs up to ``slots`` together.

    Args:
        settings: The server's settings.
        registry: Where its metrics are registered.
    """

    def __init__(self, settings: LlmSimSettings, registry: CollectorRegistry) -> None:
        self._model = settings.upstream_model()
        self._slots = asyncio.Semaphore(settings.slots)
        self._kv_tokens = settings.kv_cache_tokens
        self._kv_used = 0
        self.running = 0
        self.waiting = 0
        label = ("model_name",)
        buckets = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, label, registry=registry).labels(settings.model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, label, registry=registry).labels(settings.model)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, label, registry=registry, buckets=buckets).labels(settings.model)

        self._gauge_running = gauge("vllm:num_requests_running", "Requests running on the engine.")
        self._gauge_waiting = gauge("vllm:num_requests_waiting", "Requests waiting for a slot.")
        self._gauge_cache = gauge("vllm:gpu_cache_usage_perc", "KV cache in use; 1 is full.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        self._success = counter("vllm:request_success", "Requests answered.")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to the first token, queueing included.")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time to the last token, queueing included.")

    @contextlib.asynccontextmanager
    async def slot(self, what: Answer) -> AsyncIterator[float]:
        """Hold a slot for one request; yields the seconds per token, after the first token's time has passed."""
        arrived = time.monotonic()
        tokens = what.prompt_tokens + what.output_tokens
        self.waiting += 1
        self._publish()
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        others = self.running
        self.running += 1
        self._kv_used += tokens
        self._publish()
        try:
            await asyncio.sleep(self._model.ttft)
            self._ttft.observe(time.monotonic() - arrived)
            yield self._model.token_time(others)
            self._prompt.inc(what.prompt_tokens)
            self._generated.inc(what.output_tokens)
            self._success.inc()
            self._e2e.observe(time.monotonic() - arrived)
        finally:
            self.running -= 1
            self._kv_used -= tokens
            self._slots.release()
            self._publish()

    def _publish(self) -> None:
        self._gauge_running.set(self.running)
        self._gauge_waiting.set(self.waiting)
        self._gauge_cache.set(min(1.0, self._kv_used / self._kv_tokens))


async def _whole_request(receive: Any) -> dict[str, Any] | None:
    """Read a request to its end and return it as one message; None: the client went away before."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return {"type": "http.request", "body": body, "more_body": False}


class LlmSim:
    """The ASGI application.

    Args:
        settings: The server's settings.
    """

    def __init__(self, settings: LlmSimSettings) -> None:
        self.settings = settings
        self.registry = CollectorRegistry()
        self.engine = Engine(settings, self.registry)
        self._completions = 0
        self._routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.app = Starlette(routes=self._routes, exception_handlers={HTTPException: self._unknown})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection; one whose client goes away is given up."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = await _whole_request(receive)
        if request is None:
            return
        gone = asyncio.create_task(receive())
        first = iter([request])

        async def replayed() -> Any:
            for message in first:
                return message
            return await asyncio.shield(gone)

        answering = asyncio.create_task(self.app(scope, replayed, send))
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def _chat(self, request: Request) -> Response:
        return await self._say(request, CHAT)

    async def _complete(self, request: Request) -> Response:
        return await self._say(request, LEGACY)

    async def _say(self, request: Request, form: Form) -> Response:
        try:
            body, tokens = await self._parse(request, form)
        except BadRequest as error:
            return error.response()
        wrong = await self._fault()
        if isinstance(wrong, Response):
            return wrong
        what = answer(body, self.settings, output_tokens=tokens)
        if body.get("stream"):
            options = body.get("stream_options")
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            events = self._stream(what, form, cut=wrong == "cut", usage=usage)
            return StreamingResponse(events, media_type="text/event-stream")
        async with self.engine.slot(what) as token_time:
            await asyncio.sleep(what.output_tokens * token_time)
        whole = what.to_json(self.settings.model, self.settings.revision) if form is CHAT else self._legacy_json(what)
        return Response(whole[: len(whole) // 2] if wrong == "cut" else whole, media_type="application/json")

    async def _embeddings(self, request: Request) -> Response:
        try:
            made = embed(await self._read(request), self.settings)
        except BadInput as error:
            return BadRequest(str(error), error.param).response()
        except BadRequest as error:
            return error.response()
        wrong = await self._fault()
        if isinstance(wrong, Response):
            return wrong
        async with self.engine.slot(Answer("", "", made.prompt_tokens, 0, "stop")):
            whole = made.to_json(self.settings.model)
        return Response(whole[: len(whole) // 2] if wrong == "cut" else whole, media_type="application/json")

    async def _fault(self) -> Response | Literal["", "cut"]:
        """Go wrong, if it is this request's turn to: the error to answer with, or how the answer is to be damaged."""
        wrong = fault(self._completions, self.settings)
        self._completions += 1
        if wrong in ("error", "unavailable"):
            return failure(500 if wrong == "error" else 503)
        if wrong == "hang":
            await asyncio.Event().wait()  # until the client goes away
        return "cut" if wrong == "cut" else ""

    async def _parse(self, request: Request, form: Form) -> tuple[dict[str, Any], int | None]:
        body = await self._read(request)
        if form is LEGACY:
            messages = messages_of(body.get("prompt"))
            if messages is None:
                raise BadRequest("prompt: expected one text; this simulated model takes neither several nor tokens", "prompt")
            body = {**body, "messages": messages}
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("messages: expected a list with at least one message", "messages")
        if not isinstance(body.get("stream"), bool | None):
            raise BadRequest(f"stream: expected true or false, got {body['stream']!r}", "stream")
        given = request.headers.get(OUTPUT_TOKENS_HEADER)
        if given is None:
            return body, None
        if not given.isdecimal() or not 1 <= int(given) <= MAX_OUTPUT_TOKENS:
            raise BadRequest(f"header {OUTPUT_TOKENS_HEADER}: expected 1..{MAX_OUTPUT_TOKENS} tokens, got {given!r}")
        return body, int(given)

    async def _read(self, request: Request) -> dict[str, Any]:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest(f"the body: expected a JSON object, got {type(body).__name__}")
        if body.get("model") != self.settings.model:
            raise BadRequest(
                f"the model {body.get('model')!r} does not exist; this server has {self.settings.model!r}",
                "model",
                404,
                "model_not_found",
            )
        return body

    async def _stream(self, what: Answer, form: Form, *, cut: bool, usage: bool) -> AsyncIterator[bytes]:
        head = self._head(what, form)

        def event(choice: Mapping[str, Any], finish: str | None = None) -> bytes:
            return b"data: " + orjson.dumps({**head, "choices": [{"index": 0, **choice, "finish_reason": finish}]}) + b"\n\n"

        async with self.engine.slot(what) as token_time:
            if form.opening is not None:
                yield event(form.opening)
            for start in range(0, len(what.text) // 2 if cut else len(what.text), CHARS_PER_TOKEN):
                await asyncio.sleep(token_time)
                yield event(form.piece(what.text[start : start + CHARS_PER_TOKEN]))
            if cut:
                return
            yield event(form.closing, what.finish_reason)
            if usage:
                yield b"data: " + orjson.dumps({**head, "choices": [], "usage": what.usage()}) + b"\n\n"
            yield b"data: [DONE]\n\n"

    def _head(self, what: Answer, form: Form) -> dict[str, Any]:
        name = f"{form.prefix}{what.digest[:24]}"
        return {"id": name, "object": form.chunk, "created": _CREATED, "model": self.settings.model}

    def _legacy_json(self, what: Answer) -> bytes:
        choice = {"index": 0, **LEGACY.piece(what.text), "finish_reason": what.finish_reason}
        return orjson.dumps({**self._head(what, LEGACY), "choices": [choice], "usage": what.usage()})

    async def _unknown(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return unknown(request, error, self._routes)

    async def _models(self, request: Request) -> Response:
        card = {"id": self.settings.model, "object": "model", "created": _CREATED, "owned_by": "cachepilot"}
        return Response(orjson.dumps({"object": "list", "data": [card]}), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def run(settings: LlmSimSettings, *, on_start: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; returns when it has ended, whichever it was.

    Args:
        settings: The server's settings.
        on_start: Called with the base URL just before requests are accepted.

    Raises:
        OSError: If the port is in use.
    """
    import uvicorn

    # Requests that hang on purpose must not keep it from ending.
    config = uvicorn.Config(
        LlmSim(settings), log_level=settings.log_level, access_log=False, lifespan="off", timeout_graceful_shutdown=3
    )
    server = uvicorn.Server(config)
    with (
        _ended_by_signals(server),
        socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as listener,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"llm-sim cannot listen on {settings.host}:{settings.port}: {error.strerror};"
                " choose another port (0 takes a free one)",
            ) from error
        listener.listen(2048)
        if on_start is not None:
            on_start(f"http://{settings.host}:{listener.getsockname()[1]}/v1")
        server.run(sockets=[listener])


@contextlib.contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Have SIGINT and SIGTERM end the server, also before it listens to them itself, and nothing but the server.

    A server that a signal has ended raises it once more, for the handler from before: the system's would end the process by it.
    And of each request that it breaks off then it tells with a traceback.
    """
    log = logging.getLogger("uvicorn.error")

    def goes_on(record: logging.LogRecord) -> bool:
        return not server.should_exit

    if threading.current_thread() is not threading.main_thread():  # others cannot listen to signals
        yield
        return

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    log.addFilter(goes_on)
    try:
        yield
    finally:
        log.removeFilter(goes_on)
        for number, handler in before.items():
            signal.signal(number, handler)


class LlmSimProcess:
    """A simulated model in a process of its own, which ends with its owner (on Linux: with the thread that started it).

    Use as a context manager::

        with LlmSimProcess(LlmSimSettings(port=0)) as sim:
            sim.base_url  # http://127.0.0.1:41234/v1

    Args:
        settings: The server's settings; port 0 takes a free one.
        deadline: Seconds to wait for it to answer.

    Raises:
        RuntimeError: If it did not start; the message holds what it printed.
    """

    def __init__(self, settings: LlmSimSettings, *, deadline: float = 30.0) -> None:
        self.settings = settings
        self._deadline = deadline
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""

    @property
    def metrics_url(self) -> str:
        """Where its vLLM-named metrics are scraped."""
        return self.base_url.removesuffix("/v1") + "/metrics"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> LlmSimProcess:
        """Start it and wait until it answers."""
        # The child finds the package through our own location: it may run from a checkout that is not installed.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent.parent), *_pythonpath()])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.llm_sim", "--owner", str(os.getpid()), self.settings.model_dump_json()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C on the terminal reaches the owner, which ends it in order
        )
        assert self._process.stdout is not None
        self.base_url = self._process.stdout.readline().decode().strip()
        end = time.monotonic() + self._deadline
        while self.base_url and time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                with urllib.request.urlopen(self.base_url.removesuffix("/v1") + "/health", timeout=1.0):
                    return self
            time.sleep(0.02)
        self._process.kill()
        _, printed = self._process.communicate()
        raise RuntimeError(f"llm-sim did not start within {self._deadline:g} s: {printed.decode(errors='replace').strip()}")

    def stop(self) -> None:
        """End it; harmless when it has ended already."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> LlmSimProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _pythonpath() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _end_with(owner: int) -> None:
    """Ask the kernel to end this process when its owner dies (Linux); elsewhere it ends on SIGTERM only."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != owner:
            sys.exit("llm-sim: its owner is gone already")


def main() -> None:
    """Entry point of ``python -m serving.llm_sim [--owner PID] SETTINGS_JSON``; the first line printed is the base URL."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--owner"]:
        _end_with(int(arguments[1]))
        arguments = arguments[2:]
    settings = LlmSimSettings.model_validate_json(arguments[0] if arguments else "{}")
    try:
        run(settings, on_start=lambda url: (sys.stdout.write(url + "\n"), sys.stdout.flush())[1])
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
