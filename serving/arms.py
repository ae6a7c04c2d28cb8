"""Which arm a key belongs to: a salted hash of the key, so that every replica agrees and a key never changes sides."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate


class ArmAssignment:
    """Splits keys between arms by hash. Pure, O(log arms) per key; the same salt and shares give the same split everywhere.

    Args:
        salt: Separates experiments: another salt gives an independent split.
        shares: Share of the keys by arm, each > 0, summing to 1; the order matters.

    Raises:
        ValueError: If there is no arm, a share is not > 0, or they do not sum to 1 (within 1e-6).
    """

    def __init__(self, salt: str, shares: Mapping[str, float]) -> None:
        if (
            not shares
            or any(not share > 0 for share in shares.values())
            or not math.isclose(sum(shares.values()), 1, abs_tol=1e-6)
        ):
            raise ValueError(
                f"arms: expected shares > 0 that sum to 1, such as {{'control': 0.5, 'treatment': 0.5}}; got {dict(shares)}"
            )
        self.salt = salt
        self.shares = dict(shares)
        self._arms = tuple(self.shares)
        self._edges = tuple(accumulate(self.shares.values()))[:-1]  # the last arm takes the rest, whatever the rounding
        self._hash_key = hashlib.blake2b(salt.encode(), digest_size=32).digest()

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms' names, in order."""
        return self._arms

    def arm(self, key: bytes) -> str:
        """Return the arm of a key (fingerprint, bytes)."""
        if not self._edges:
            return self._arms[0]
        digest = hashlib.blake2b(key, digest_size=8, key=self._hash_key).digest()
        return self._arms[bisect_right(self._edges, int.from_bytes(digest, "big") / 2.0**64)]
