"""Loads, stores and changes of one 64-bit word that other processes see whole and in order, for compiled code.

On x86-64 an aligned 8-byte load or store is whole anyway; these keep the compiler from moving what comes before a release behind
it, or what comes after an acquire before it. Each is called as ``load(words, index)`` and so on from compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

Words = npt.NDArray[np.int64]
_compiled: Any = intrinsic


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


def _load(typing: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, args), "acquire", 8)

    return types.int64(words, types.int64), generate


def _store(typing: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _address(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


def _change(operation: str) -> Callable[[Any, Any, Any, Any], Any]:
    def declare(typing: Any, words: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, _address(context, builder, signature, args), args[2], "seq_cst")

        return types.int64(words, types.int64, types.int64), generate

    return declare


def _replace(typing: Any, words: Any, index: Any, expected: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(address, args[2], args[3], "seq_cst"), 1)

    return types.boolean(words, types.int64, types.int64, types.int64), generate


def _fence(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


load: Callable[[Words, int], int] = _compiled(_load)
"""Return the word; what follows is read after it."""

store: Callable[[Words, int, int], None] = _compiled(_store)
"""Set the word; what came before is seen by all who see it."""

exchange: Callable[[Words, int, int], int] = _compiled(_change("xchg"))
"""Set the word and return what it was."""

set_bits: Callable[[Words, int, int], int] = _compiled(_change("or"))
"""Set those bits of the word and return what it was."""

keep_bits: Callable[[Words, int, int], int] = _compiled(_change("and"))
"""Clear all but those bits of the word and return what it was."""

add: Callable[[Words, int, int], int] = _compiled(_change("add"))
"""Add to the word and return what it was."""

replace: Callable[[Words, int, int, int], bool] = _compiled(_replace)
"""Set the word to the last argument if it is the one before; whether it was."""

fence: Callable[[], None] = _compiled(_fence)
"""Everything before it is done before anything after it."""
