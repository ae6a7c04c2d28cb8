"""Whose request it is: tenants come from authentication, never from what a request says."""

from __future__ import annotations

import hashlib
import hmac
import os

from serving.settings import AuthSettings

_SCHEME = b"bearer "


class Unauthorised(Exception):
    """A request without a key that is known here.

    Attributes:
        status: The HTTP status to answer with.
        message: What to tell the caller; never holds a key.
        code: OpenAI's code for it.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class Tenants:
    """Tells the tenant of a request, and who may use the admin API, by the ``Authorization`` header.

    Keys are known by their SHA-256 alone. They are looked up under a keyed hash of that, with a secret of this process, so how
    long a lookup takes tells nothing of the keys. O(1), a few microseconds.

    Args:
        auth: The tenants and their keys' hashes.
    """

    def __init__(self, auth: AuthSettings) -> None:
        self._secret = os.urandom(32)
        self._required = auth.required
        self._tenants = {self._blinded(bytes.fromhex(key)): name for name, keys in auth.tenants.items() for key in keys}
        self._admins = frozenset(self._blinded(bytes.fromhex(key)) for key in auth.admin)

    @property
    def configured(self) -> bool:
        """Whether there are tenants. Then a client's ``Authorization`` is for this gateway and must not reach the upstream."""
        return bool(self._tenants)

    @property
    def administered(self) -> bool:
        """Whether anybody may use the admin API."""
        return bool(self._admins)

    def tenant_of(self, authorization: bytes | None) -> str:
        """Return the tenant of a request; ``""``: one without a tenant, where that is allowed.

        Args:
            authorization: The header's value, ``Bearer <key>``; None where there is none.

        Raises:
            Unauthorised: If keys are required and this is none that is known.
        """
        if not self._tenants:
            return ""
        key = _token(authorization)
        tenant = self._tenants.get(self._blinded(hashlib.sha256(key).digest())) if key else None
        if tenant is not None:
            return tenant
        if not self._required:
            return ""
        if not key:
            raise Unauthorised(401, "no API key: expected the header Authorization: Bearer <key>", "invalid_api_key")
        raise Unauthorised(401, "the API key is not known here: expected one that belongs to a tenant", "invalid_api_key")

    def is_admin(self, authorization: bytes | None) -> bool:
        """Whether the ``Authorization`` header holds a token of the admin API."""
        key = _token(authorization)
        return bool(key) and self._blinded(hashlib.sha256(key).digest()) in self._admins

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _token(authorization: bytes | None) -> bytes:
    if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
        return b""
    return authorization[len(_SCHEME) :].strip()
