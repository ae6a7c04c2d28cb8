"""Encryption of what is kept outside the process: AES-256-GCM, by the package ``cryptography``."""

from __future__ import annotations

import base64
import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serving.settings import StorageSettings

KEY_SIZE = 32
"""Bytes of a key."""
_NONCE = 12
_TAG = 16
OVERHEAD = _NONCE + _TAG
"""Bytes that sealing adds."""


class Sealer:
    """Seals bytes so that only the same key opens them, and only in the place for which they were sealed.

    Every place has a key of its own, derived from the master key by HMAC-SHA256: random nonces of 96 bits would otherwise limit
    one key to 2**32 messages (NIST SP 800-38D, 8.3), which a busy cache writes in weeks.

    Args:
        key: The master key, 32 bytes.

    Raises:
        ValueError: If the key has another length.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_SIZE:
            raise ValueError(f"encryption key: expected {KEY_SIZE} bytes, got {len(key)}")
        self._key = key

    @classmethod
    def of(cls, storage: StorageSettings) -> Sealer | None:
        """Return the sealer that the settings ask for; None where they ask for none."""
        if storage.encryption_key is None:
            return None
        return cls(base64.b64decode(storage.encryption_key.get_secret_value(), validate=True))

    def seal(self, place: bytes, plain: bytes, header: bytes = b"") -> bytes:
        """Return the bytes sealed: nonce, ciphertext, tag; :data:`OVERHEAD` longer than they were.

        Args:
            place: Where they will be kept; opening needs the same.
            plain: The bytes.
            header: What is kept beside them in the clear but must not be altered; opening needs the same.
        """
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher(place).encrypt(nonce, plain, header)

    def open(self, place: bytes, sealed: bytes, header: bytes = b"") -> bytes | None:
        """Return what was sealed; None where the key, the place or the header is another one, or the bytes were damaged."""
        if len(sealed) < OVERHEAD:
            return None
        try:
            return self._cipher(place).decrypt(sealed[:_NONCE], sealed[_NONCE:], header)
        except InvalidTag:
            return None

    def secret(self, use: bytes) -> bytes:
        """Return 32 bytes that only this key gives, for another use than sealing."""
        return hmac.digest(self._key, b"cachepilot use\0" + use, "sha256")

    def _cipher(self, place: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._key, b"cachepilot entry\0" + place, "sha256"))
