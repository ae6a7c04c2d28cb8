"""What a caller asks of the cache: ``Cache-Control`` (RFC 9111), the body's ``cache`` (litellm's), ``x-cache-...`` headers.

A caller may only tighten what the operator allows: whatever is asked here makes fewer answers fit, never more. Where the header
and the body ask for the same thing the stricter one holds. Directives that would loosen (``max-stale``) are not heeded.

======================  ===============================  ========================================================================
given as                becomes                          means
======================  ===============================  ========================================================================
``no-store``            ``no_store``                     neither read nor written. RFC 9111, 5.2.1.5: "a cache MUST NOT store any
                                                         part of either this request or any response to it". The RFC would let a
                                                         stored answer be served; here the cache is not asked either, so that the
                                                         request leaves no trace in it
``no-cache``            ``no_cache``                     not answered from the cache; the new answer is stored. 5.2.1.4: "the
                                                         client prefers a stored response not be used to satisfy the request
                                                         without successful validation on the origin server"; a model cannot
                                                         validate, so it is asked anew
``max-age``             ``max_age``                      5.2.1.1: "the client prefers a response whose age is less than or equal
                                                         to the specified number of seconds"; and "the client does not wish to
                                                         receive a stale response"
``s-maxage`` (body)     ``max_age``                      the same in litellm's words; not RFC 9111's response directive
``min-fresh``           ``min_fresh``                    5.2.1.3: "a response whose freshness lifetime is no less than its
                                                         current age plus the specified time in seconds"
``only-if-cached``      ``only_if_cached``               5.2.1.7: "either a stored response consistent with the other
                                                         constraints of the request or [...] a 504 (Gateway Timeout)"
``stale-if-error``      ``stale_if_error``               RFC 5861, 4; here an upper bound on what the operator allows
``ttl`` (body)          ``ttl``                          the answer may be kept for so many seconds
``namespace`` (body)    ``namespace``                    the caller's own division of its cache
``use-cache`` (body)    ``no_store``                     ``false`` is ``no-store``; ``true`` is nothing
``x-cache-threshold``   ``threshold``                    least cosine of an answer by meaning
``x-cache-max-error``   ``max_error``                    largest probability of a wrong answer by meaning; 0: none by meaning
``x-cache-tags``        ``tags``                         names by which the entry can be flushed
``x-cache-documents``   ``documents``                    documents by which the entry can be flushed
======================  ===============================  ========================================================================
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

LONGEST_SECONDS = 2**31
"""RFC 9111, 1.2.2: a larger number of seconds counts as this one."""

MOST_NAMES = 32
"""Tags, or documents, of one request."""

LONGEST_NAME = 256
"""Characters of a namespace, a tag or a document; they are stored with every entry."""

_DIGITS = re.compile(r"[0-9]+")
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class DirectiveError(ValueError):
    """A caller asked for something of the cache in a way that cannot be understood or is not allowed.

    Attributes:
        param: The field or header at fault, as OpenAI's errors name it: ``cache.ttl``, ``x-cache-threshold``.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class CallerRules(Protocol):
    """What the operator lets callers ask for; :class:`serving.settings.CallerSettings` is one."""

    @property
    def directives(self) -> bool:
        """Whether directives are heeded at all."""
        ...

    @property
    def namespaces(self) -> bool:
        """Whether a caller may name a namespace."""
        ...


@dataclass(frozen=True, slots=True)
class Directives:
    """What one request asks of the cache; the defaults ask for nothing.

    Attributes:
        no_store: The cache is neither read nor written.
        no_cache: The cache is not read; the answer is written.
        only_if_cached: The model is not to be asked.
        max_age: Greatest age of a stored answer, seconds; None: any. Where given, no stale answer is served either.
        min_fresh: Seconds that a stored answer must still have to live, >= 0.
        stale_if_error: Seconds past its TTL that an answer may be served where the model fails; None: what the operator allows.
        ttl: Seconds that the answer may be kept, before the operator's bounds; None: what the operator allows.
        namespace: The caller's division of its cache; ``""``: none.
        threshold: Least cosine of an answer by meaning, 0..1; None: the operator's.
        max_error: Largest probability of a wrong answer by meaning, 0..1; None: the operator's; 0: none by meaning.
        tags: Names by which the entry can be flushed.
        documents: Documents by which the entry can be flushed.
    """

    no_store: bool = False
    no_cache: bool = False
    only_if_cached: bool = False
    max_age: float | None = None
    min_fresh: float = 0.0
    stale_if_error: float | None = None
    ttl: float | None = None
    namespace: str = ""
    threshold: float | None = None
    max_error: float | None = None
    tags: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    @property
    def by_meaning(self) -> bool:
        """Whether an answer to another question may be looked for at all."""
        return not (self.no_store or self.no_cache or self.max_error == 0.0)

    def error_bound(self, operator: float | None) -> float | None:
        """Return the error bound that holds, given the operator's (None: none): the smaller of the two."""
        return _least(operator, self.max_error)


NO_DIRECTIVES = Directives()
"""Of a request that asks nothing of the cache."""


def parse_directives(
    cache_control: str | None, headers: Mapping[str, str], body_cache: object, callers: CallerRules
) -> Directives:
    """Return what a request asks of the cache.

    ``Cache-Control`` is read as RFC 9111 wants it: names in any case, values with or without quotes, what is not known ignored
    (5.2.3); of several values of a directive the strictest counts, and one that is not a number of seconds counts as the
    strictest there is (4.2.1: "Caches are encouraged to consider responses that have invalid freshness information [...] to be
    stale"). Body and ``x-cache-...`` headers are this gateway's own and are refused where they are wrong.

    A namespace, tags and documents say what the entry is, not how to use the cache: they are read whether or not directives are.

    Args:
        cache_control: The header's value; several header lines joined with commas; None: absent.
        headers: The request's other headers by lower-case name, as HTTP gives them: a character per byte. Names in UTF-8 are
            understood.
        body_cache: The body's ``cache`` member, its members' names with ``-`` or ``_``; None: absent. The upstream does not
            know it.
        callers: What callers may ask for.

    Raises:
        DirectiveError: If the body's ``cache`` or an ``x-cache-...`` header is not understood or not allowed.
    """
    if not cache_control and body_cache is None and _HEADERS.isdisjoint(headers):
        return NO_DIRECTIVES
    body = _members(body_cache) if callers.directives or isinstance(body_cache, Mapping) else {}
    namespace = _namespace(body.get("namespace"), callers)
    tags, documents = _names(headers, "x-cache-tags"), _names(headers, "x-cache-documents")
    if not callers.directives:
        return Directives(namespace=namespace, tags=tags, documents=documents)
    unknown = sorted(set(body) - _MEMBERS)
    if unknown:
        raise DirectiveError(f"cache.{unknown[0]}", f"not known; expected one of {', '.join(sorted(_MEMBERS))}")
    asked = _cache_control(cache_control or "")
    given = {name: _seconds(body, name) for name in _SECONDS}
    return Directives(
        no_store="no-store" in asked or _flag(body, "no-store") is True or _flag(body, "use-cache") is False,
        no_cache="no-cache" in asked or _flag(body, "no-cache") is True,
        only_if_cached="only-if-cached" in asked or _flag(body, "only-if-cached") is True,
        max_age=_least(asked.get("max-age"), given["max-age"], given["s-maxage"], given["s-max-age"]),
        min_fresh=max(asked.get("min-fresh", 0.0), given["min-fresh"] or 0.0),
        stale_if_error=_least(asked.get("stale-if-error"), given["stale-if-error"]),
        ttl=given["ttl"],
        namespace=namespace,
        threshold=_share(headers, "x-cache-threshold"),
        max_error=_share(headers, "x-cache-max-error"),
        tags=tags,
        documents=documents,
    )


_HEADERS = frozenset({"x-cache-threshold", "x-cache-max-error", "x-cache-tags", "x-cache-documents"})
_FLAGS = frozenset({"no-store", "no-cache", "only-if-cached", "use-cache"})
_SECONDS = ("ttl", "max-age", "s-maxage", "s-max-age", "min-fresh", "stale-if-error")
_MEMBERS = _FLAGS | set(_SECONDS) | {"namespace"}
_STRICTEST = {"max-age": 0.0, "min-fresh": math.inf, "stale-if-error": 0.0}
"""What a directive of ``Cache-Control`` counts as where its value is not a number of seconds."""


def _cache_control(value: str) -> dict[str, float]:
    """The directives of a ``Cache-Control`` header that are known; flags have the value 0."""
    found: dict[str, float] = {}
    for name, argument in _directives(value):
        if name in _STRICTEST:
            seconds = _delta_seconds(argument, otherwise=_STRICTEST[name])
            stricter = max if name == "min-fresh" else min
            found[name] = stricter(found.get(name, seconds), seconds)
        elif name in _FLAGS:
            found[name] = 0.0
    return found


def _directives(value: str) -> Iterator[tuple[str, str]]:
    """Names in lower case and their arguments, in linear time whatever the header holds."""
    pieces = value.split('"')
    if len(pieces) % 2 and "\\" not in value:
        pieces[1::2] = [quoted.replace(",", " ") for quoted in pieces[1::2]]
    # else quotes do not pair up: a comma then always separates, which can only find more directives
    for part in '"'.join(pieces).split(","):
        name, _, argument = part.partition("=")
        yield name.strip().lower(), argument.strip().strip('"')


def _delta_seconds(argument: str, *, otherwise: float) -> float:
    if not _DIGITS.fullmatch(argument):
        return otherwise
    digits = argument.lstrip("0") or "0"
    return float(LONGEST_SECONDS if len(digits) > 10 else min(int(digits), LONGEST_SECONDS))


def _members(body_cache: object) -> dict[str, object]:
    if body_cache is None:
        return {}
    if not isinstance(body_cache, Mapping):
        raise DirectiveError("cache", f'expected an object such as {{"no-cache": true}}, got {_shown(body_cache)}')
    members = {str(name).replace("_", "-").lower(): value for name, value in body_cache.items()}
    if len(members) < len(body_cache):
        raise DirectiveError("cache", f"expected each member once, got {_shown(sorted(map(str, body_cache)))}")
    return members


def _flag(body: Mapping[str, object], name: str) -> bool | None:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise DirectiveError(f"cache.{name}", f"expected true or false, got {_shown(value)}")


def _seconds(body: Mapping[str, object], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or value == math.inf:
        raise DirectiveError(f"cache.{name}", f"expected a number of seconds >= 0, got {_shown(value)}")
    return float(min(value, LONGEST_SECONDS))


def _share(headers: Mapping[str, str], name: str) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    text = value.strip()
    share = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if not 0.0 <= share <= 1.0:
        raise DirectiveError(name, f"expected a number from 0 to 1, got {_shown(value)}")
    return share


def _namespace(value: object, callers: CallerRules) -> str:
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or len(value) > LONGEST_NAME or _UNPRINTABLE.search(value):
        raise DirectiveError(
            "cache.namespace", f"expected up to {LONGEST_NAME} characters without control characters, got {_shown(value)}"
        )
    if not callers.namespaces:  # ignored, it would share answers that the caller wants kept apart
        raise DirectiveError("cache.namespace", "this gateway does not let callers divide the cache; leave it out")
    return value


def _names(headers: Mapping[str, str], header: str) -> tuple[str, ...]:
    names = dict.fromkeys(name for part in _utf8(headers.get(header, "")).split(",") if (name := part.strip()))
    for name in names:
        if len(name) > LONGEST_NAME or _UNPRINTABLE.search(name):
            raise DirectiveError(
                header, f"expected names of up to {LONGEST_NAME} characters without control characters, got {_shown(name)}"
            )
    if len(names) > MOST_NAMES:
        raise DirectiveError(header, f"expected at most {MOST_NAMES} names, got {len(names)}")
    return tuple(names)


def _utf8(value: str) -> str:
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _shown(value: object) -> str:
    return reprlib.repr(value)
