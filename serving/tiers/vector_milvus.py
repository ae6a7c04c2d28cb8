"""Vectors in Milvus, shared by all replicas: a server by its URL, or Milvus Lite by the path of a file.

Texts of callers (model, tenant, namespace, tags, documents) are stored as digests: they are compared, never read, and a digest
cannot break out of a filter expression.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from serving.tiers.vector_service import OPENING_SECONDS, STEP, ServiceStore, digest
from serving.tiers.vector_store import VectorItem, Where, load_ray_first

EXPANSION = 128
"""Candidates that a search keeps (HNSW's ef)."""
MOST_NAMES = 64
"""Most tags, and most documents, of one entry; what is beyond is not filtered on."""
_COLLECTION_NOT_FOUND = 100


class MilvusStore(ServiceStore):
    """A Milvus collection per arm; see :class:`serving.tiers.vector_service.ServiceStore`.

    Args:
        url: ``http://host:19530``, ``https://...``, or the path of a file for Milvus Lite (ends in ``.db``), which one process
            may have open.
        dim: Components of a vector.
        namespace: Separates caches on one Milvus.
        token: ``user:password`` or an API key.
        deadline: Seconds that a call may take.
        clock: A monotonic clock, seconds.

    Raises:
        RuntimeError: If pymilvus is not installed.
        ValueError: If the address is neither a URL nor a file.
    """

    name = "milvus"

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
        if not re.match(r"https?://[^/]", url) and not url.endswith(".db"):
            raise ValueError(f"milvus: url: expected http://..., https://... or the path of a .db file, got {url!r}")
        load_ray_first()
        try:
            pymilvus = importlib.import_module("pymilvus")
        except ImportError as error:
            raise RuntimeError(f"pymilvus cannot be imported: {error}; pip install 'cachepilot[milvus]'") from error
        super().__init__(dim=dim, namespace=namespace, deadline=deadline, clock=clock)
        self._milvus: Any = pymilvus
        self._url, self._token = url, token

    def _connect(self) -> Any:
        options = {"token": self._token} if self._token else {}
        return self._milvus.MilvusClient(self._url, timeout=OPENING_SECONDS, **options)

    def _disconnect(self, client: Any) -> None:
        client.close()

    def _open(self, client: Any, name: str) -> _Collection:
        collection = _Collection(client, name)
        if client.has_collection(name, timeout=OPENING_SECONDS):
            client.load_collection(name, timeout=OPENING_SECONDS)
            return collection
        kinds = self._milvus.DataType
        schema = self._milvus.MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", kinds.VARCHAR, max_length=64, is_primary=True)
        schema.add_field("context", kinds.VARCHAR, max_length=64)
        schema.add_field("added", kinds.INT64)
        schema.add_field("temperature", kinds.DOUBLE, nullable=True)
        for field in ("model", "tenant", "namespace"):
            schema.add_field(field, kinds.VARCHAR, max_length=32)
        for field in ("tags", "documents"):
            schema.add_field(field, kinds.ARRAY, element_type=kinds.VARCHAR, max_capacity=MOST_NAMES, max_length=32)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=self.dim)
        index = client.prepare_index_params()
        index.add_index("vector", index_type="HNSW", metric_type="COSINE", params={"M": 16, "efConstruction": 128})
        client.create_collection(name, schema=schema, index_params=index, consistency_level="Session", timeout=OPENING_SECONDS)
        return collection

    def _is_gone(self, error: Exception) -> bool:
        return isinstance(error, self._milvus.MilvusException) and getattr(error, "code", None) == _COLLECTION_NOT_FOUND

    def _write(self, collection: _Collection, items: Sequence[VectorItem], added: int) -> None:
        rows = [_row(item, added + place) for place, item in enumerate(items)]
        collection.client.upsert(collection.name, rows, timeout=self.deadline)

    def _delete(self, collection: _Collection, ids: Sequence[str]) -> None:
        collection.client.delete(collection.name, ids=list(ids), timeout=self.deadline)

    def _search(
        self, collection: _Collection, context: bytes, query: npt.NDArray[np.float32], limit: int, where: Where | None
    ) -> list[tuple[str, npt.NDArray[np.float32]]]:
        found = collection.client.search(
            collection.name,
            data=[query.tolist()],
            anns_field="vector",
            limit=limit,
            filter=expression(context, where),
            output_fields=["vector"],
            search_params={"metric_type": "COSINE", "params": {"ef": max(EXPANSION, limit)}},
            timeout=self.deadline,
        )
        return [(hit["key"], np.array(hit["entity"]["vector"], np.float32)) for hit in (found[0] if len(found) else ())]

    def _count(self, collection: _Collection) -> int:
        found = collection.client.query(
            collection.name, filter="", output_fields=["count(*)"], consistency_level="Strong", timeout=self.deadline
        )
        return int(found[0]["count(*)"])

    def _ages(self, collection: _Collection) -> Iterator[tuple[int, str]]:
        pages = collection.client.query_iterator(
            collection.name, filter="added >= 0", output_fields=["key", "added"], batch_size=STEP, timeout=OPENING_SECONDS
        )
        try:
            while page := pages.next():
                for row in page:
                    yield row["added"], row["key"]
        finally:
            pages.close()

    def _clear(self, client: Any, name: str, collection: _Collection) -> None:
        client.delete(name, filter="added >= 0", timeout=OPENING_SECONDS)


class _Collection:
    def __init__(self, client: Any, name: str) -> None:
        self.client = client
        self.name = name


def _row(item: VectorItem, added: int) -> dict[str, Any]:
    meta = item.meta
    return {
        "key": item.key.hex(),
        "context": item.context.hex(),
        "added": added,
        "model": digest(meta.model),
        "temperature": meta.temperature,
        "tenant": digest(meta.tenant),
        "namespace": digest(meta.namespace),
        "tags": [digest(tag) for tag in meta.tags[:MOST_NAMES]],
        "documents": [digest(document) for document in meta.documents[:MOST_NAMES]],
        "vector": np.frombuffer(item.vector, np.int8).astype(np.float32).tolist(),
    }


def expression(context: bytes, where: Where | None) -> str:
    """Return the filter in Milvus' language. It holds nothing but field names, numbers and digests in hex."""
    terms = [f'context == "{context.hex()}"']
    if where is not None:
        terms += [
            f'{field} == "{digest(value)}"'
            for field in ("model", "tenant", "namespace")
            if (value := getattr(where, field)) is not None
        ]
        if where.temperature is not None:
            terms.append(f"temperature == {float(where.temperature)!r}")
        terms += [
            f"ARRAY_CONTAINS_ANY({field}, {orjson.dumps([digest(value) for value in values]).decode()})"
            for field in ("tags", "documents")
            if (values := getattr(where, field))
        ]
    return " and ".join(terms)
