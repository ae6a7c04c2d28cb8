from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from serving.embedding import DIMENSIONS, quantise
from serving.meaning.lsh import Projection, Signature, fit_pca, hamming

RANDOM = np.random.default_rng(7)
VECTORS = quantise(RANDOM.normal(size=(2_000, DIMENSIONS)))


def turned(vectors: npt.NDArray[np.int8], cosine: float) -> npt.NDArray[np.int8]:
    """Vectors at the cosine from those given."""
    unit = vectors / np.linalg.norm(vectors.astype(float), axis=1, keepdims=True)
    away = RANDOM.normal(size=unit.shape)
    away -= (away * unit).sum(axis=1, keepdims=True) * unit
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    return quantise(cosine * unit + np.sqrt(1 - cosine**2) * away)


def test_every_replica_signs_alike_for_good() -> None:
    vector = bytes((7 * place * place + 3 * place) % 251 for place in range(DIMENSIONS))
    # A pinned sample: other hyperplanes would move all semantic traffic between arms and shards.
    assert Signature(seed=0).of(vector) == Signature().of(vector) == PINNED
    assert Signature(seed=0).of(vector) != Signature(seed=1).of(vector)


PINNED = 0xB70F097F40CB14B4


@pytest.mark.parametrize("components", [None, 64, 384])
def test_a_signature_is_the_sides_of_the_hyperplanes_in_exact_arithmetic(components: int | None) -> None:
    signature = Signature(components=None if components is None else fit_pca(VECTORS, components))
    planes, offset = signature._planes, signature._offset
    assert np.abs(planes).sum(axis=1).max() * 127 + np.abs(offset).max() < 2**53
    for vector in VECTORS[:5]:
        sides = [
            sum(int(weight) * int(value) for weight, value in zip(plane, vector, strict=True)) > int(edge)
            for plane, edge in zip(planes, offset, strict=True)
        ]
        assert signature.of(vector.tobytes()) == int("".join("01"[side] for side in sides), 2)


@pytest.mark.parametrize("cosine", [0.95, 0.8, 0.5, 0.0])
def test_bits_differ_in_proportion_to_the_angle(cosine: float) -> None:
    signature = Signature()
    distances = [
        hamming(signature.of(one.tobytes()), signature.of(other.tobytes()))
        for one, other in zip(VECTORS[:500], turned(VECTORS[:500], cosine), strict=True)
    ]
    assert np.mean(distances) == pytest.approx(64 * np.arccos(cosine) / np.pi, abs=1.2)


def test_near_vectors_share_a_bucket_far_more_often_than_others() -> None:
    signature = Signature()
    buckets = [signature.bucket(signature.of(vector.tobytes())) for vector in VECTORS]
    near = [signature.bucket(signature.of(vector.tobytes())) for vector in turned(VECTORS, 0.98)]
    together = np.mean(np.equal(buckets, near))
    apart = np.mean(np.equal(buckets, np.roll(buckets, 1)))
    # ten bits: (1 - arccos(0.98) / pi) ** 10 = 0.52, against 1 in 1,024
    assert together == pytest.approx(0.52, abs=0.05)
    assert apart < 0.01


@pytest.mark.parametrize(("bits", "buckets"), [(64, 1024), (64, 1), (8, 256), (16, 2), (64, 1 << 20)])
def test_buckets_are_all_in_use_and_about_equal(bits: int, buckets: int) -> None:
    signature = Signature(bits=bits, buckets=buckets)
    drawn = [signature.bucket(signature.of(vector.tobytes())) for vector in VECTORS]
    assert 0 <= min(drawn) <= max(drawn) < buckets
    counts = np.bincount(drawn, minlength=buckets)
    assert counts.max() < 2 * len(VECTORS) / buckets + 20
    if buckets == 1024:
        assert np.count_nonzero(counts) > 700


def test_without_their_mean_the_vectors_of_one_field_spread_over_the_buckets() -> None:
    field = quantise(RANDOM.normal(size=(2_000, 384)) + 2.5 * RANDOM.normal(size=384))
    plain, centred = Signature(), Signature(components=fit_pca(field, 64))
    used = [len({s.bucket(s.of(vector.tobytes())) for vector in field}) for s in (plain, centred)]
    assert used[1] > 2 * used[0]


def test_a_fit_finds_the_directions_of_the_data_whatever_the_solvers_signs() -> None:
    along = np.zeros((200, 16))
    along[:, 3] = RANDOM.normal(size=200)
    along[:, 5] = 0.2 * RANDOM.normal(size=200)
    fitted = fit_pca(np.rint(along * 40).clip(-127, 127).astype(np.int8), 2)
    assert np.abs(fitted.components).argmax(axis=1).tolist() == [3, 5]
    assert fitted.components.max(axis=1) == pytest.approx([1 << 14, 1 << 14], rel=0.01)


def test_a_fit_is_the_same_after_a_file(tmp_path: Path) -> None:
    fitted, path = fit_pca(VECTORS[:200], 16), tmp_path / "components"
    fitted.save(path)
    one, other = (Signature(components=given) for given in (fitted, Projection.load(path)))
    assert [one.of(vector.tobytes()) for vector in VECTORS] == [other.of(vector.tobytes()) for vector in VECTORS]
    assert Projection.load(path).components.dtype == np.int64


@pytest.mark.parametrize("written", [None, b"", b"no archive", b"PK\x03\x04 torn", "other arrays", "floats"])
def test_a_file_that_holds_no_fit_is_named(written: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "components.npz"
    if isinstance(written, bytes):
        path.write_bytes(written)
    elif written == "other arrays":
        np.savez(path, mean=np.zeros(3, np.int64))
    elif written == "floats":
        np.savez(path, mean=np.zeros(3), components=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"components\.npz: expected"):
        Projection.load(path)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected a vector of 384 int8 bytes, got 3 bytes"):
        Signature().of(b"abc")
    with pytest.raises(ValueError, match="buckets: expected a power of two of at most 2\\^8, got 512"):
        Signature(bits=8, buckets=512)
    with pytest.raises(ValueError, match="bits: expected 8 to 64 in steps of 8, got 12"):
        Signature(bits=12)
    with pytest.raises(ValueError, match="dim: expected 1 to 1024 components, got 0"):
        Signature(dim=0)
    with pytest.raises(ValueError, match="expected 384 dimensions"):
        Signature(components=Projection(np.zeros(3, np.int64), np.zeros((2, 3), np.int64)))
    with pytest.raises(ValueError, match="at least 64 components"):
        fit_pca(VECTORS[:10], 64)
