"""What a vector store is: which entries were asked in nearly the same words, whoever keeps the vectors.

A store holds no answers. An entry and its vector live and die together: whoever writes, evicts, flushes or loses an entry tells
the store, and a neighbour whose entry is gone is removed when it is met. Stores in the process belong to one replica; services
(``shared``) are written once, by the replica that wrote the entry, and searched by all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from serving.tiers.base import EntryMeta

if TYPE_CHECKING:
    from serving.settings import VectorSettings

_PACKAGES = {"faiss": "faiss", "milvus": "pymilvus", "chroma": "chromadb"}


@dataclass(frozen=True, slots=True)
class VectorItem:
    """One vector to be kept.

    Attributes:
        key: The entry's key, 32 bytes.
        context: Its context, 32 bytes.
        vector: Unit vector x 127, int8 bytes.
        meta: What can be filtered on; its text is not kept.
    """

    key: bytes
    context: bytes
    vector: bytes
    meta: EntryMeta = field(default_factory=EntryMeta)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One entry near in meaning.

    Attributes:
        key: The entry's key.
        context: Its context.
        similarity: Exact cosine of the int8 vectors, -1..1.
    """

    key: bytes
    context: bytes
    similarity: float


@dataclass(frozen=True, slots=True)
class Where:
    """A filter on metadata; what is None or empty is not filtered on, the rest must all hold.

    Attributes:
        model: The model.
        temperature: The temperature as given; entries without one never match a number.
        tenant: The tenant; ``""``: those without one.
        namespace: The caller's namespace; ``""``: those without one.
        tags: At least one of these.
        documents: At least one of these.
    """

    model: str | None = None
    temperature: float | None = None
    tenant: str | None = None
    namespace: str | None = None
    tags: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    def fits(self, meta: EntryMeta) -> bool:
        """Whether an entry with this metadata is wanted."""
        return (
            (self.model is None or meta.model == self.model)
            and (self.temperature is None or meta.temperature == self.temperature)
            and (self.tenant is None or meta.tenant == self.tenant)
            and (self.namespace is None or meta.namespace == self.namespace)
            and (not self.tags or not set(self.tags).isdisjoint(meta.tags))
            and (not self.documents or not set(self.documents).isdisjoint(meta.documents))
        )


@runtime_checkable
class VectorStore(Protocol):
    """Nearest neighbours by cosine, one index per arm.

    Every method is safe to call concurrently from one event loop. A service that does not answer within its deadline raises
    :class:`serving.tiers.base.TierUnavailable`; the cache turns that into a miss. What a service was told while it was away is
    lost: it costs hits, never a wrong answer, since a neighbour is worth nothing without its entry.

    Attributes:
        name: ``usearch``, ``faiss``, ``milvus`` or ``chroma``: the label of its metrics.
        shared: Whether all replicas share it, so that an entry is written by one of them alone.
        dim: Components of a vector.
    """

    name: str
    shared: bool
    dim: int

    async def add(self, arm: str, items: Sequence[VectorItem]) -> None:
        """Keep vectors under their entries' keys; each replaces an earlier one of its key. The last of equal keys counts.

        Raises:
            ValueError: If a vector does not have ``dim`` bytes; then none is kept.
            TierUnavailable: If the service did not answer.
        """
        ...

    async def remove(self, arm: str, keys: Sequence[bytes]) -> None:
        """Remove the keys' vectors; those that are not there are left out silently.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        ...

    async def near(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        """Return the nearest entries of this context, the most similar first.

        Search is approximate; the similarities are exact. Where no entry of the context is similar enough, a store may add
        entries of other contexts that are, if it met some: they say why nothing fits.

        Args:
            arm: The arm.
            context: The context sought.
            vector: int8 bytes; zeros find nothing.
            floor: Least similarity of what is returned.
            k: Most neighbours of the context, >= 1.
            where: Filter on metadata; None for none.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
            TierUnavailable: If the service did not answer.
        """
        ...

    async def count(self, arm: str) -> int:
        """Return how many vectors the arm has.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        ...

    async def limit(self, arm: str, entries: int) -> None:
        """Set how many vectors the arm may have; the earliest added beyond that are removed.

        A service looks after its limit from time to time only, since other replicas write to it as well.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        ...

    async def flush(self, arm: str) -> None:
        """Remove every vector of the arm.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        ...

    async def close(self) -> None:
        """Release connections, threads and memory. The store is not usable afterwards."""
        ...


def missing_package(settings: VectorSettings) -> tuple[str, str] | None:
    """Return what the store that the settings name lacks and how to install it; None where it is there. Imports nothing."""
    package = _PACKAGES.get(settings.kind)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed", f"pip install 'cachepilot[{settings.kind}]'"


def open_store(settings: VectorSettings, *, dim: int, namespace: str) -> VectorStore:
    """Open the store that the settings name. What it needs is imported here, a service is not asked yet.

    Args:
        settings: Kind, address, deadline.
        dim: Components of a vector.
        namespace: Separates caches that share a service.

    Raises:
        RuntimeError: If the package that it needs is not installed; the message says which extra has it.
        ValueError: If the address or the namespace is not well-formed.
    """
    token = settings.token.get_secret_value() if settings.token is not None else None
    if settings.kind == "faiss":
        from serving.tiers.vector_faiss import FaissStore

        return FaissStore(dim=dim)
    if settings.kind == "milvus":
        from serving.tiers.vector_milvus import MilvusStore

        return MilvusStore(settings.url or "", dim=dim, namespace=namespace, token=token, deadline=settings.deadline)
    if settings.kind == "chroma":
        from serving.tiers.vector_chroma import ChromaStore

        return ChromaStore(settings.url or "", dim=dim, namespace=namespace, token=token, deadline=settings.deadline)
    from serving.tiers.vector import UsearchStore

    return UsearchStore(dim=dim)


# -- for the stores -----------------------------------------------------------------------------------------------------------


def components(vector: bytes, dim: int) -> npt.NDArray[np.int8]:
    """Return a vector's components, shape (dim,).

    Raises:
        ValueError: If it does not have ``dim`` bytes.
    """
    if len(vector) != dim:
        raise ValueError(f"vector tier: expected a vector of {dim} int8 bytes, got {len(vector)} bytes")
    return np.frombuffer(vector, dtype=np.int8)


def cosines(query: npt.NDArray[np.int8], vectors: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Return the exact cosine of a vector with each of several, shape (N,); 0 for a vector of zeros.

    Args:
        query: Shape (D,).
        vectors: Shape (N, D).
    """
    # Sums of products of int8 are below 2**24 up to 1,040 components: float32 holds them exactly, and its products are BLAS'.
    one, many = query.astype(np.float32), vectors.astype(np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", many, many) * float(one @ one))
    result: npt.NDArray[np.float32] = np.divide(many @ one, norms, out=np.zeros(len(many), np.float32), where=norms > 0)
    return result


def deduplicated(items: Sequence[VectorItem], dim: int) -> list[VectorItem]:
    """Return the items without their texts, the last of equal keys, in the order in which they were added last.

    Raises:
        ValueError: If a vector does not have ``dim`` bytes.
    """
    kept: dict[bytes, VectorItem] = {}
    for item in items:
        components(item.vector, dim)
        kept.pop(item.key, None)
        kept[item.key] = replace(item, meta=replace(item.meta, text="")) if item.meta.text else item
    return list(kept.values())


def load_ray_first() -> None:
    """Load Ray's core, where it is installed, before a package that brings a C++ library of its own.

    Several wheels carry symbols of libstdc++ that do not fit Ray's (usearch: ``regex_error: Invalid range in brace expression``
    out of ``ray.init()``, which aborts the process). Loaded after Ray's core they do no harm.
    """
    with suppress(ImportError):
        import ray._raylet  # noqa: F401
