"""Guards: what two questions must have in common, beside their embedding, to share an answer.

An embedding puts "turn it on" beside "turn it off", and 12*3 beside 12+3. Each guard looks for one kind of difference that
changes the answer, by the words alone. A guard that is in doubt refuses: a refusal costs a miss, a wrong answer costs trust.

================  ================  =====================================================================================
objection         setting           refuses when
================  ================  =====================================================================================
``too_long``      always            one is longer than 8,192 characters, and they are not the same
``script``        always            one has letters that the other has not (Latin, Chinese), or both have letters of a script
                                    whose words the guards do not know and are not the same text
``pictures``      always            their emoji or symbols differ
``literals``      always            their quotations, code, identifiers, addresses, paths or options differ
``maths``         ``numbers``       the signs, brackets, numbers or variables of a sum differ
``numbers``       ``numbers``       their numbers differ, in value, order or as ordinals; dates and versions are numbers
``units``         ``numbers``       the units of the numbers, or those named without one, differ
``negation``      ``negation``      one has more negations than the other ("I do not know how" is none)
``polarity``      ``polarity``      they name opposites, or a word and its negative form (legal, illegal)
``question``      ``polarity``      one asks who, when, where, why or how many, and the other for another of these
``entities``      ``entities``      a name in one is not in the other
``words``         ``words``         all that differs is one word, replaced by another that is unrelated
``order``         ``order``         the same words stand in another order, or after another of from, to, than, before, ...
``edit_distance`` ``edit_distance`` more characters differ than is allowed
================  ================  =====================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from serving.meaning import lexicon
from serving.meaning.edit import common_prefix, within
from serving.meaning.reading import Reading, read, stem

MAX_CHARACTERS = 8_192
"""Longer texts share an answer only if they are equal; no embedder reads them as a whole either."""


SYNONYM_STEMS = {stem(word): stem(first) for word, first in lexicon.SYNONYMS.items()}


class GuardFlags(Protocol):
    """Which guards are on; :class:`serving.settings.GuardSettings` is one."""

    @property
    def numbers(self) -> bool: ...  # noqa: D102
    @property
    def negation(self) -> bool: ...  # noqa: D102
    @property
    def polarity(self) -> bool: ...  # noqa: D102
    @property
    def entities(self) -> bool: ...  # noqa: D102
    @property
    def words(self) -> bool: ...  # noqa: D102
    @property
    def order(self) -> bool: ...  # noqa: D102
    @property
    def edit_distance(self) -> float | None: ...  # noqa: D102


class Guards:
    """Compares questions. Pure, symmetric, without a model.

    Readings of the latest questions are kept, so that comparing one with eight candidates reads it once.

    Args:
        settings: Which guards are on.
    """

    def __init__(self, settings: GuardFlags) -> None:
        checks: list[tuple[str, Callable[[Reading, Reading], bool]]] = [
            ("script", _script),
            ("pictures", _pictures),
            ("literals", _literals),
        ]
        if settings.numbers:
            checks += [("maths", _maths), ("numbers", _numbers), ("units", _units)]
        if settings.negation:
            checks.append(("negation", _negation))
        if settings.polarity:
            checks += [("polarity", _polarity), ("question", _question)]
        if settings.entities:
            checks.append(("entities", _entities))
        if settings.words:
            checks.append(("words", _replaced))
        if settings.order:
            checks.append(("order", _order))
        self._checks = tuple(checks)
        self._edit_distance = settings.edit_distance
        self._read = lru_cache(maxsize=512)(read)

    def objection(self, asked: str, stored: str) -> str:
        """Return the name of the guard that refuses to answer one question with the other's answer; ``""`` if none does.

        Args:
            asked: The question that is asked.
            stored: The question whose answer is stored.
        """
        if asked == stored:
            return ""
        if len(asked) > MAX_CHARACTERS or len(stored) > MAX_CHARACTERS:
            return "too_long"
        a, b = self._read(asked), self._read(stored)
        for name, differs in self._checks:
            if differs(a, b):
                return name
        if self._edit_distance is not None and not within(a.plain, b.plain, self._edit_distance):
            return "edit_distance"
        return ""


def _script(a: Reading, b: Reading) -> bool:
    if a.han != b.han or a.foreign != b.foreign:
        return True
    if a.foreign:
        return a.plain != b.plain
    return a.han and bool(a.words) != bool(b.words)


def _pictures(a: Reading, b: Reading) -> bool:
    return a.pictures != b.pictures


def _literals(a: Reading, b: Reading) -> bool:
    return a.literals != b.literals


def _maths(a: Reading, b: Reading) -> bool:
    return a.maths != b.maths


def _values(reading: Reading) -> list[str]:
    return [value if unit != "th" else value + "th" for value, unit in reading.numbers]


def _numbers(a: Reading, b: Reading) -> bool:
    if a.numbers == b.numbers:
        return False
    mine, others = _values(a), _values(b)
    if mine == others:
        return False
    if not a.ones and not b.ones:
        return True
    # "one" may be a number or not: either reading will do
    mine = [value for place, value in enumerate(mine) if place not in a.ones]
    others = [value for place, value in enumerate(others) if place not in b.ones]
    return mine != others


def _units(a: Reading, b: Reading) -> bool:
    if len(a.numbers) == len(b.numbers) and a.numbers != b.numbers:
        return True
    if a.units == b.units:
        return False
    mine, others = set(a.units), set(b.units)
    if mine == others:
        # the same units in another order: from miles to kilometres
        return a.units != b.units and len(mine) > 1
    kinds = [{kind for unit in units for kind in lexicon.UNIT_KINDS[unit]} for units in (mine, others)]
    # A time may be asked for without naming a unit; nobody says kilograms for nothing.
    strict = {"mass", "length", "volume", "temperature", "speed", "data", "power", "angle"}
    return bool(kinds[0] & kinds[1] and (mine - others) and (others - mine)) or bool((kinds[0] ^ kinds[1]) & strict)


def _negation(a: Reading, b: Reading) -> bool:
    return a.negations != b.negations


def _polarity(a: Reading, b: Reading) -> bool:
    if a.poles and b.poles:
        for kind, poles in a.poles.items():
            others = b.poles.get(kind)
            if others is not None and others != poles:
                return True
    mine, others_words = set(a.content), set(b.content)
    return _prefixed(mine - others_words, others_words - mine) or _prefixed(others_words - mine, mine - others_words)


def _prefixed(words: set[str], others: set[str]) -> bool:
    """Whether a word is another's with a negative prefix: legal, illegal."""
    return any(
        word.startswith(lexicon.NEGATIVE_PREFIXES)
        and any(word[len(p) :] in others for p in lexicon.NEGATIVE_PREFIXES if word.startswith(p))
        for word in words
    )


def _question(a: Reading, b: Reading) -> bool:
    return bool(a.asks and b.asks and not a.asks & b.asks)


def _entities(a: Reading, b: Reading) -> bool:
    return a.letters != b.letters or not _named(a, b) or not _named(b, a)


def _named(a: Reading, b: Reading) -> bool:
    """Whether all names of one question are in the other, as names or in small letters."""
    missing = a.names - b.names
    return not missing or missing <= b.spelled


def _replaced(a: Reading, b: Reading) -> bool:
    """Whether all that differs is one word for another, of which nothing says that they mean the same."""
    if a.characters != b.characters:
        mine, others = Counter(a.characters), Counter(b.characters)
        # Nothing is known of Chinese words, so that any that are replaced count.
        if mine - others and others - mine:
            return True
    if len(a.content) != len(b.content) or a.content == b.content:
        return False
    mine_only, others_only = Counter(a.content) - Counter(b.content), Counter(b.content) - Counter(a.content)
    if mine_only.total() != 1 or others_only.total() != 1:
        return False
    return not _alike(next(iter(mine_only)), next(iter(others_only)))


def _alike(word: str, other: str) -> bool:
    """Whether two stems are forms or spellings of one word, or are known to mean the same."""
    if SYNONYM_STEMS.get(word, word) == SYNONYM_STEMS.get(other, other):
        return True
    common = common_prefix(word, other)
    if common >= 4 and all(not rest or rest in lexicon.ENDINGS for rest in (word[common:], other[common:])):
        return True
    # letters that changed places: recieve
    return len(word) >= 6 and word[0] == other[0] and word[-1] == other[-1] and sorted(word) == sorted(other)


def _order(a: Reading, b: Reading) -> bool:
    if a.characters != b.characters and sorted(a.characters) == sorted(b.characters):
        return True
    if _moved(a, b) or _moved(b, a):
        return True
    # f(a, b): beside other single letters an "a" is hardly an article.
    if a.letters and a.singles != b.singles and sorted(a.singles) == sorted(b.singles):
        return True
    if a.content == b.content and a.pronouns == b.pronouns:
        return False
    return sorted(a.words) == sorted(b.words) and sorted(a.pronouns) == sorted(b.pronouns)


def _moved(a: Reading, b: Reading) -> bool:
    """Whether a word that stands after a marker in one question is elsewhere in the other."""
    for marker, words in a.places.items():
        others = b.places.get(marker, ())
        for word in words:
            if word in others or word not in b.content:
                continue
            if others or marker == "by" or any(word in placed for placed in b.places.values()):
                return True
    return False
