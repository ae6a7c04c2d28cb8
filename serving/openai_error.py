"""Errors in OpenAI's shape, so that a client sees one kind of error, whoever it is from.

Imports nothing that takes time: the simulated model, which stands for somebody else's server, uses it too.
"""

from __future__ import annotations

import orjson

JSON = "application/json"


def openai_error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return an error body in OpenAI's shape.

    Args:
        message: What is wrong, for people.
        kind: OpenAI's ``type``, as ``invalid_request_error``.
        param: The field at fault, if it is one.
        code: OpenAI's name of the fault, if it has one.
    """
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
