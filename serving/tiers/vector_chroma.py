"""Vectors in Chroma, shared by all replicas: a server by its URL."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from serving.tiers.vector_service import OPENING_SECONDS, STEP, ServiceStore
from serving.tiers.vector_store import VectorItem, Where, load_ray_first

EXPANSION = 128
"""Candidates that a search keeps (HNSW's ef)."""


class ChromaStore(ServiceStore):
    """A Chroma collection per arm; see :class:`serving.tiers.vector_service.ServiceStore`. Chroma's telemetry is off.

    Args:
        url: ``http://host:8000`` or ``https://...``.
        dim: Components of a vector.
        namespace: Separates caches on one Chroma.
        token: Sent as a bearer token and as ``x-chroma-token``.
        deadline: Seconds that a call may take.
        clock: A monotonic clock, seconds.

    Raises:
        RuntimeError: If chromadb is not installed.
        ValueError: If the address is not a URL.
    """

    name = "chroma"

    def __init__(
        self,
        url: str,
        *,
        dim: int,
        namespace: str,
        token: str | None = None,
        deadline: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"chroma: url: expected http://... or https://..., got {url!r}")
        load_ray_first()
        try:
            chromadb, httpx = importlib.import_module("chromadb"), importlib.import_module("httpx")
        except ImportError as error:
            raise RuntimeError(f"chromadb cannot be imported: {error}; pip install 'cachepilot[chroma]'") from error
        super().__init__(dim=dim, namespace=namespace, deadline=deadline, clock=clock)
        self._chroma: Any = chromadb
        self._http: Any = httpx
        self._url = url.rstrip("/")
        self._host, self._ssl = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._ssl else 80)
        self._headers = {"Authorization": f"Bearer {token}", "x-chroma-token": token} if token else {}

    def _connect(self) -> Any:
        # The client's constructor asks the server without any timeout: one that hangs is to be found out before.
        self._http.get(f"{self._url}/api/v2/heartbeat", headers=self._headers, timeout=OPENING_SECONDS).raise_for_status()
        client = self._chroma.HttpClient(
            host=self._host,
            port=self._port,
            ssl=self._ssl,
            headers=dict(self._headers),
            settings=self._chroma.config.Settings(anonymized_telemetry=False),
        )
        # It has no setting for this, and a thread that waits forever is lost.
        client._server._session.timeout = self._http.Timeout(OPENING_SECONDS)
        return client

    def _disconnect(self, client: Any) -> None:
        client._server._session.close()

    def _open(self, client: Any, name: str) -> Any:
        return client.get_or_create_collection(
            name, configuration={"hnsw": {"space": "cosine", "ef_search": EXPANSION}}, embedding_function=None
        )

    def _is_gone(self, error: Exception) -> bool:
        return isinstance(error, self._chroma.errors.NotFoundError)

    def _write(self, collection: Any, items: Sequence[VectorItem], added: int) -> None:
        ids = [item.key.hex() for item in items]
        # An update would keep the tags that the key's earlier entry had.
        collection.delete(ids=ids)
        collection.upsert(
            ids=ids,
            embeddings=[np.frombuffer(item.vector, np.int8).astype(np.float32) for item in items],
            metadatas=[_metadata(item, added + place) for place, item in enumerate(items)],
        )

    def _delete(self, collection: Any, ids: Sequence[str]) -> None:
        collection.delete(ids=list(ids))

    def _search(
        self, collection: Any, context: bytes, query: npt.NDArray[np.float32], limit: int, where: Where | None
    ) -> list[tuple[str, npt.NDArray[np.float32]]]:
        wanted = condition(context, where)
        found = collection.query(query_embeddings=[query], n_results=limit, where=wanted, include=["embeddings"])
        ids, vectors = found["ids"][0], found["embeddings"][0]
        if len(ids) < limit:
            # Few fit, and a graph searched with such a filter may miss even those: here are all of them.
            every = collection.get(where=wanted, limit=limit, include=["embeddings"])
            ids, vectors = every["ids"], every["embeddings"]
        return list(zip(ids, vectors, strict=True))

    def _count(self, collection: Any) -> int:
        return int(collection.count())

    def _ages(self, collection: Any) -> Iterator[tuple[int, str]]:
        offset = 0
        while True:
            page = collection.get(limit=STEP, offset=offset, include=["metadatas"])
            for key, metadata in zip(page["ids"], page["metadatas"], strict=True):
                yield int(metadata["added"]), key
            if len(page["ids"]) < STEP:
                return
            offset += STEP

    def _clear(self, client: Any, name: str, collection: Any) -> None:
        # Other replicas find their collection gone, and open the new one.
        client.delete_collection(name)
        self._collections.pop(name, None)


def _metadata(item: VectorItem, added: int) -> dict[str, str | int | float | bool]:
    meta = item.meta
    result: dict[str, str | int | float | bool] = {
        "context": item.context.hex(),
        "added": added,
        "model": meta.model,
        "tenant": meta.tenant,
        "namespace": meta.namespace,
    }
    if meta.temperature is not None:
        result["temperature"] = float(meta.temperature)
    # A field for each name is what every version of the server can filter on.
    result.update({f"tag:{tag}": True for tag in meta.tags})
    result.update({f"document:{document}": True for document in meta.documents})
    return result


def condition(context: bytes, where: Where | None) -> dict[str, Any]:
    """Return the filter in Chroma's form."""
    terms: list[dict[str, Any]] = [{"context": context.hex()}]
    if where is not None:
        terms += [
            {field: value}
            for field in ("model", "temperature", "tenant", "namespace")
            if (value := getattr(where, field)) is not None
        ]
        terms += [
            _joined("$or", [{f"{kind}:{name}": True} for name in names])
            for kind, names in (("tag", where.tags), ("document", where.documents))
            if names
        ]
    return _joined("$and", terms)


def _joined(operator: str, terms: list[dict[str, Any]]) -> dict[str, Any]:
    return terms[0] if len(terms) == 1 else {operator: terms}
