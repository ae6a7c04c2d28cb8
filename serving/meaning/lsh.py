"""The semantic bucket: a signature of an embedding by random hyperplanes, whose first bits name a bucket.

Each bit says on which side of a random hyperplane a vector lies; two vectors at an angle of θ differ in a bit with
probability θ/π (Charikar, STOC 2002). Every replica has to put a question into the same bucket, so all arithmetic is on
integers that float64 holds exactly: the order in which a machine adds them up, the batch and the platform make no difference.
The hyperplanes come from a hash of the seed, which no release of numpy changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

_BYTES_PER_WEIGHT = 4
_SCALE = 1 << 14


@dataclass(frozen=True, eq=False)
class Projection:
    """Principal components that vectors are projected on before they are signed.

    It is fitted once and then shared by all replicas: two fits on two machines may differ in the last bit.

    Attributes:
        mean: What is taken off each vector first, int64, shape (D,), in units of the int8 vectors.
        components: One component a row, int64, shape (K, D), in units of 2^-14.
    """

    mean: npt.NDArray[np.int64]
    components: npt.NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write it to a file of numpy's ``npz`` format, which each replica is to be given."""
        with path.open("wb") as file:
            np.savez(file, mean=self.mean, components=self.components)

    @classmethod
    def load(cls, path: Path) -> Projection:
        """Return what :meth:`save` wrote.

        Raises:
            ValueError: If the file cannot be read or holds something else.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                mean, components = found["mean"], found["components"]
        except (OSError, EOFError, ValueError, KeyError, BadZipFile, AttributeError, TypeError) as error:
            raise ValueError(f"lsh: {path}: expected components that Projection.save wrote: {error}") from error
        if mean.dtype != np.int64 or components.dtype != np.int64 or mean.ndim != 1 or components.ndim != 2:
            raise ValueError(
                f"lsh: {path}: expected int64 arrays, mean of shape (D,) and components of shape (K, D), got {mean.dtype} "
                f"{mean.shape} and {components.dtype} {components.shape}"
            )
        return cls(mean, components)


def fit_pca(vectors: npt.NDArray[np.int8], components: int = 64) -> Projection:
    """Return the directions in which vectors vary the most.

    Embeddings of one field of knowledge lie in a narrow cone, where hyperplanes through the origin part few of them; their mean
    taken off, they do.

    Args:
        vectors: int8, shape (N, D).
        components: Directions to keep, 1..min(N, D).

    Raises:
        ValueError: If there are fewer vectors or dimensions than components.
    """
    if vectors.ndim != 2 or not 1 <= components <= min(vectors.shape):
        raise ValueError(
            f"fit_pca: expected vectors of shape (N, D) with N and D of at least {components} components, got {vectors.shape}"
        )
    values = vectors.astype(np.float64)
    mean = np.rint(values.mean(axis=0))
    _, _, directions = np.linalg.svd(values - mean, full_matrices=False)
    kept = directions[:components]
    # The sign of a direction is the solver's whim; the largest weight is made positive.
    largest = np.abs(kept).argmax(axis=1)
    kept = kept * np.sign(kept[np.arange(components), largest])[:, None]
    return Projection(mean.astype(np.int64), np.rint(kept * _SCALE).astype(np.int64))


class Signature:
    """Signs vectors. Pure; the same arguments give the same signatures everywhere.

    Args:
        dim: Components of a vector, at most 1,024.
        bits: Length of a signature, 8..64 in steps of 8.
        buckets: Number of buckets, a power of two of at most ``2 ** bits``.
        seed: Draws the hyperplanes.
        components: Principal components of :func:`fit_pca`, of ``dim`` dimensions; None: the vectors as they are.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self, dim: int = 384, bits: int = 64, buckets: int = 1024, seed: int = 0, components: Projection | None = None
    ) -> None:
        if not 1 <= dim <= 1024:
            raise ValueError(f"lsh: dim: expected 1 to 1024 components, got {dim}")
        if bits % 8 or not 8 <= bits <= 64:
            raise ValueError(f"lsh: bits: expected 8 to 64 in steps of 8, got {bits}")
        if buckets < 1 or buckets & (buckets - 1) or buckets > 1 << bits:
            raise ValueError(f"lsh: buckets: expected a power of two of at most 2^{bits}, got {buckets}")
        self.dim, self.bits, self.buckets, self.seed = dim, bits, buckets, seed
        self._shift = bits - (buckets.bit_length() - 1)
        if components is None:
            planes = _hyperplanes(seed, bits, dim)
            offset = np.zeros(bits, np.int64)
        else:
            if components.mean.shape != (dim,) or components.components.shape[1:] != (dim,):
                raise ValueError(
                    f"lsh: components: expected {dim} dimensions, got a mean of shape {components.mean.shape} and components of "
                    f"shape {components.components.shape}"
                )
            planes = _hyperplanes(seed, bits, len(components.components)) @ components.components
            offset = planes @ components.mean
        # At most 2^52 even with 1,024 components: every sum is exact in float64.
        self._planes = planes.astype(np.float64)
        self._offset = offset.astype(np.float64)

    def of(self, vector: bytes) -> int:
        """Return the signature of an int8 vector of ``dim`` bytes: ``bits`` bits, the first hyperplane's the most significant.

        Raises:
            ValueError: If the vector has another length.
        """
        if len(vector) != self.dim:
            raise ValueError(f"lsh: expected a vector of {self.dim} int8 bytes, got {len(vector)} bytes")
        sides = self._planes @ np.frombuffer(vector, np.int8).astype(np.float64) > self._offset
        return int.from_bytes(np.packbits(sides).tobytes(), "big")

    def bucket(self, signature: int) -> int:
        """Return the bucket of a signature, 0..buckets-1: its first bits."""
        return signature >> self._shift


def hamming(a: int, b: int) -> int:
    """Return in how many bits two signatures differ: ``bits * θ / π`` on average for vectors at an angle of θ."""
    return (a ^ b).bit_count()


def _hyperplanes(seed: int, bits: int, dim: int) -> npt.NDArray[np.int64]:
    """Return normals of integers, shape (bits, dim), of all directions alike: sums of four even bytes are close to normal."""
    stream = hashlib.shake_256(f"cachepilot lsh {seed}".encode()).digest(bits * dim * _BYTES_PER_WEIGHT)
    drawn = np.frombuffer(stream, np.uint8).reshape(bits, dim, _BYTES_PER_WEIGHT).astype(np.int64)
    normals: npt.NDArray[np.int64] = 2 * drawn.sum(axis=2) - _BYTES_PER_WEIGHT * 255
    return normals
