"""Which node owns a key: highest random weight (Thaler and Ravishankar, 1998).

A node that comes or goes so moves no other keys than its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def owner(key: bytes, nodes: Sequence[str]) -> str:
    """Return the node whose hash with the key is the highest; the same for all who know the same nodes, in any order. O(nodes).

    Args:
        key: Of the entry.
        nodes: Names of the nodes, at least one.

    Raises:
        ValueError: If there are no nodes.
    """
    if not nodes:
        raise ValueError("rendezvous hashing: expected at least one node, got none")
    return max(nodes, key=lambda node: (_weight(key, node), node))


def _weight(key: bytes, node: str) -> bytes:
    return hashlib.blake2b(key + node.encode(), digest_size=8).digest()
