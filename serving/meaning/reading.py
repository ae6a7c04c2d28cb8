"""What the guards see in a question: its numbers, negations, opposites, names, literal parts and the order of its words.

A reading is made once per text, in one pass over its tokens, by a lexicon and a few rules; nothing is parsed or learned.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from serving.meaning import lexicon

_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LITERAL = re.compile(
    r"""
    ```.*?``` | `[^`]+` | "[^"]+" | “[^”]+” | «[^»]+» | 「[^」]+」 | (?<!\w)'[^']+'(?!\w)      # quotations, code
    | \b[A-Za-z][A-Za-z0-9+.-]*://\S*[\w/] | \bwww\.\S*\w | \b[\w.+-]+@[\w-]+\.\w[\w.]*     # addresses
    | (?<![\w-])--?[A-Za-z][\w-]* | (?<!\w)[@\#$~]\w*[^\W\d]\w*                           # options, tags, variables
    | (?<![\w.])(?:[\w.~]*/){2,}[\w.]* | (?<!\w)[~.]?/[\w.]+                                # paths
    | \b[A-Za-z](?:\+\+|\#) | \b\w+(?:\.\w+)*\((?:[^(),]*(?:,[^(),]*)+)?\)                 # C++, C#, calls
    | \b[^\W\d]+(?:_\w*|::\w+)+ | \b_+\w+ | \b[^\W\d_]+(?:\.[a-z]\w*)+                     # identifiers
    | \b[a-z]+[A-Z]\w*
    """,
    re.VERBOSE | re.DOTALL,
)
# Where none of these is, there is no literal: most questions are spared the search.
_LITERAL_HINT = re.compile(r"""[`"“«「@#_~/:$+(]|\B['-]\w|[^\W\d]\.[^\W\d]""")
_WORDS_ONLY = re.compile("[A-Za-z ,?]*[.!]?")
_CAMEL = re.compile("[a-z][A-Z]")
_TOKEN = re.compile(
    rf"(?P<han>[{_HAN}]+)|(?P<word>[^\W\d_{_HAN}]+(?:'[^\W\d_{_HAN}]+)?(?![\d_]))|(?P<number>\w+(?:[.,:/'-]\w*\d\w*)*)"
    "|(?P<sign>[-−+$£€¥₹%.!?,;:]|°[CcFf]?)|(?P<literal>\0)"
)
_FOREIGN = re.compile(rf"[^\W\d_A-Za-zªµº\u00c0-\u024f\u1e00-\u1eff{_HAN}]")
_CAPITAL = re.compile("[A-Z]")
_HAN_LETTER = re.compile(rf"[{_HAN}]")
_PICTURES = re.compile("[©®\u203c-\u2bff\u200d\u20e3\U0001f000-\U0001faff\U000e0020-\U000e007f]")
_DATE = re.compile(r"\b\d{1,4}([-/])\d{1,2}\1\d{1,4}\b")
_SUPERSCRIPTS = re.compile("[²³¹⁰-₉]")
_MATHS = re.compile(
    r"[*^=<>+×÷√≤≥≠±∑∫∏π|]|[\d)\]]\s*[-/%!]\s*[\d(\[a-z]|\d\s*!|\d\s*(?:plus|minus|times|over|x|mod|divided|multiplied)\b|\([^()]*\d"
)
_MATHS_WORDS = re.compile(r"\b(?:plus|minus|times|multiplied by|divided by|over)\b|(?<=\d)\s*x\s*(?=\d)")
_MATHS_SIGNS = {"plus": "+", "minus": "-", "times": "*", "multiplied by": "*", "divided by": "/", "over": "/", "x": "*"}
_MATHS_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|\*\*|[-+*/^=<>√%!()\[\]{}|≤≥≠±∑∫∏]")
_MATHS_NAMES = lexicon.words("sin cos tan log ln exp sqrt mod min max abs gcd lcm det lim sum x y z dx dy pi")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SUFFIXED = re.compile(r"(\d+(?:[.,]\d+)*)([^\W\d_]+)")
_HAN_NUMBER = re.compile(f"[{lexicon.HAN_DIGITS}]+")
_HAN_CHOICE = re.compile("(.)[不没]\\1|是否|能否|可否|非常|不过|不同")


@dataclass(slots=True, eq=False)
class Reading:
    """What a question says that an embedding hardly sees.

    Attributes:
        plain: The text in small letters, without spaces at its ends and closing marks.
        han: Whether it has Chinese characters.
        foreign: Whether it has letters of a script whose words the guards do not know.
        pictures: Emoji and symbols, in order.
        literals: Quotations, code, identifiers, addresses, paths, options, in order.
        numbers: (value, unit) in order; the unit is ``""`` for none, ``"th"`` for an ordinal.
        ones: Places in ``numbers`` of the word "one", which is often no number.
        units: Names of units that stand without a number, in order.
        maths: Signs, brackets, numbers and variables of a sum, in order; empty where there is none.
        negations: How many.
        poles: Class of opposites -> the poles named.
        asks: Kinds of answers that are asked for.
        names: Names that are known as such, and words that their capitals make names.
        letters: Words of a single letter that can only be names, in order.
        singles: All words of a single letter, in order: beside others an "a" may be a name as well.
        spelled: All words, in small letters.
        words: All words but articles, question words and forms of to be and to do, as stems, in order.
        pronouns: Who does what to whom, where it is not named, in order.
        content: The words that say what it is about, as stems, in order.
        places: Marker (from, to, than, ...) -> the content words after it.
        characters: Chinese characters that say what it is about, in order.
    """

    plain: str
    han: bool = False
    foreign: bool = False
    pictures: tuple[str, ...] = ()
    literals: list[str] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    ones: list[int] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    maths: list[str] = field(default_factory=list)
    negations: int = 0
    poles: dict[int, set[int]] = field(default_factory=dict)
    asks: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    letters: list[str] = field(default_factory=list)
    singles: list[str] = field(default_factory=list)
    spelled: set[str] = field(default_factory=set)
    words: list[str] = field(default_factory=list)
    pronouns: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    places: dict[str, set[str]] = field(default_factory=dict)
    characters: str = ""


@dataclass(frozen=True, slots=True)
class _Word:
    """What the lexicon says of a word as it is written."""

    base: str
    stem: str
    content: bool
    bare: bool
    pronoun: bool
    special: bool
    negation: bool
    poles: tuple[tuple[int, int], ...]
    number: int
    scale: int
    ordinal: int
    unit: str
    marker: bool
    asks: str
    name: str
    capital: bool
    shouted: bool


_BARE = lexicon.words("a an the is are was were be been am do does did please why how what when where which")
_ONE_IS_NO_NUMBER_AFTER = lexicon.words(
    "this that the which new no any every each some another other old right wrong first last same good bad best only"
)
_SAID = {
    "me": "i",
    "mine": "my",
    "u": "you",
    "ur": "your",
    "yours": "your",
    "us": "we",
    "our": "we",
    "him": "he",
    "her": "she",
    "them": "they",
}
_EXACT_DIGITS = 16
"""Longer numbers are not multiplied, since Decimal would round them."""
_PARTICIPLES = ("ed", "en", "wn", "it", "ought", "aught", "ade", "ung", "uck", "ost", "ead", "old", "eld", "et", "ut")
_HOW = {"many": "number", "much": "amount", "soon": "time", "long": "time", "often": "often", "far": "far", "old": "old"}


@lru_cache(maxsize=32_768)
def _look_up(token: str) -> _Word:
    lower = token.lower()
    base, apostrophe, ending = lower.partition("'")
    negation = lower in lexicon.NEGATIONS or base in lexicon.NEGATIONS or (apostrophe == "'" and ending == "t")
    poles = lexicon.OPPOSITES.get(base, ())
    number = lexicon.NUMBERS.get(base, -1)
    scale, ordinal = lexicon.SCALES.get(base, 0), lexicon.ORDINALS.get(base, 0)
    # Single letters are units only right after a number: 5 m.
    unit, asks = lexicon.UNITS.get(base, ""), lexicon.QUESTIONS.get(base, "")
    marker = base in lexicon.MARKERS
    name = lexicon.SAME_NAME.get(base, base) if base in lexicon.NAMES or base in lexicon.SAME_NAME else ""
    name = "us" if token == "US" else name
    common = base in lexicon.FUNCTION_WORDS
    capital, shouted = token[0].isupper() and not common, len(token) > 1 and token.isupper() and not common
    special = bool(
        negation or poles or number >= 0 or scale or ordinal or unit or asks or marker or name or capital or len(base) == 1
    )
    special = special or base in _HOW or base in ("in", "out", "and")
    return _Word(
        base=base,
        stem=stem(_SAID.get(base, base)),
        content=not common and not negation and len(base) > 1,
        bare=base in _BARE,
        pronoun=base in lexicon.PRONOUNS,
        special=special,
        negation=negation,
        poles=poles,
        number=number,
        scale=scale,
        ordinal=ordinal,
        unit=unit,
        marker=marker,
        asks=asks,
        name=name,
        capital=capital,
        shouted=shouted,
    )


def stem(word: str) -> str:
    """Return a word without its regular endings, so that forms of one word are one; rough, and the same for all texts."""
    for ending in ("ies", "ied"):
        if word.endswith(ending) and len(word) > 4:
            return word[:-3] + "y"
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) > 2 and not word.endswith("ss"):
            word = word[: -len(ending)]
            if ending in ("ing", "ed") and len(word) > 3 and word[-1] == word[-2] and word[-1] not in "sl":
                word = word[:-1]
            return word.removesuffix("e")
    return word


def _number(text: str) -> tuple[str, str]:
    """Return (value, unit) of a token with digits. What it cannot take apart is its own value, to the character."""
    if text.isdigit():
        return text, ""
    if _GROUPED.fullmatch(text):
        return text.replace(",", ""), ""
    found = _SUFFIXED.fullmatch(text)
    if found is None:
        return text, ""
    value, suffix = found.groups()
    if suffix in ("st", "nd", "rd", "th"):
        return value, "th"
    if suffix == "k":
        return _scaled(value, 1000), ""
    unit = lexicon.UNITS.get(suffix, "")
    if not unit:
        return text, ""
    return (value.replace(",", "") if _GROUPED.fullmatch(value) else value), unit


def _scaled(value: str, scale: int) -> str:
    if len(value) > _EXACT_DIGITS:
        return f"{value} x {scale}"
    try:
        return format((Decimal(value.replace(",", "")) * scale).normalize(), "f")
    except InvalidOperation:
        return f"{value} x {scale}"


def _maths(text: str) -> list[str]:
    if _MATHS.search(text) is None:
        return []
    text = _DATE.sub(" ", text)
    if _MATHS.search(text) is None:
        return []
    text = text.replace("×", "*").replace("÷", "/").replace("−", "-")
    if any(character.isdigit() for character in text):
        text = _MATHS_WORDS.sub(lambda found: _MATHS_SIGNS[found.group().strip()], text)
    found = ["^" if token == "**" else token for token in _MATHS_TOKEN.findall(text)]
    while found and found[-1] == "!" and (len(found) < 2 or not found[-2][-1].isdigit()):
        found.pop()
    return [t for t in found if not t[0].isalpha() or len(t) == 1 or t in _MATHS_NAMES]


def _superscript(found: re.Match[str]) -> str:
    return "^" + unicodedata.normalize("NFKC", found.group())


def read(text: str) -> Reading:
    """Read a question. Linear in its length."""
    # the place of a literal is marked by it
    text = text.replace("\0", " ")
    if text.isascii():
        return _Reader(text, Reading(text.lower().strip().rstrip(" .?"))).read()
    text = unicodedata.normalize("NFKC", _SUPERSCRIPTS.sub(_superscript, text)).replace("’", "'").replace("‘", "'")
    reading = Reading(
        text.lower().strip().rstrip(" .?。？"),
        han=_HAN_LETTER.search(text) is not None,
        foreign=_FOREIGN.search(text) is not None,
        pictures=tuple(_PICTURES.findall(text)),
    )
    return _Reader(text, reading).read()


class _Reader:
    """Walks over the tokens of a text and fills in its reading."""

    __slots__ = ("_after_negation", "_before", "_currency", "_fresh", "_literals", "_loud", "_marker", "_minus", "_open", "_r",
                 "_spoken", "_taken", "_text")  # fmt: skip

    def __init__(self, text: str, reading: Reading) -> None:
        self._text = text
        self._r = reading
        capitals = len(_CAPITAL.findall(text))
        # A text in capitals, or With Each Word In Capitals, says nothing by them.
        self._loud = capitals > 3 and capitals * 4 > len(text)
        self._fresh = True
        self._before = ""
        self._after_negation = False
        # A unit or a scale that comes now belongs to the last number; what was spoken of it so far, -1: it was written.
        self._open = False
        self._spoken = -1
        self._currency = ""
        self._minus = False
        self._marker = ""
        self._taken = 0

    def read(self) -> Reading:
        reading = self._r
        text = self._text
        words_only = _WORDS_ONLY.fullmatch(text) is not None
        if not words_only:
            reading.maths = _maths(reading.plain)
        if _CAMEL.search(text) or (not words_only and _LITERAL_HINT.search(text)):
            text = _LITERAL.sub(self._literal, text)
        self._literals = iter(reading.literals)
        for chunk in text.split():
            if chunk.isalpha() and chunk.isascii():
                self._word(chunk)
                continue
            for found in _TOKEN.finditer(chunk):
                kind, token = found.lastgroup, found.group()
                if kind == "word":
                    self._word(token)
                elif kind == "number":
                    self._number(token)
                elif kind == "sign":
                    self._sign(token, found.start() == 0 or chunk[found.start() - 1] in "([{,;:=")
                elif kind == "han":
                    self._read_han(token)
                else:
                    self._literal_place(next(self._literals))
        return reading

    def _word(self, token: str) -> None:
        word = _look_up(token)
        reading = self._r
        reading.spelled.add(word.name or word.base)
        if word.special:
            self._special(word, token)
        else:
            if self._after_negation:
                reading.negations -= word.stem in lexicon.NOT_NEGATIONS
                self._after_negation = False
            if not word.bare:
                reading.words.append(word.stem)
            if word.pronoun:
                reading.pronouns.append(word.stem)
            if word.content:
                self._about(word.stem)
            elif self._taken:
                self._marker = ""
            self._open, self._currency, self._minus = False, "", False
        self._before = word.base
        self._fresh = False

    def _about(self, stem: str) -> None:
        self._r.content.append(stem)
        if self._marker and self._taken < 3:
            self._r.places.setdefault(self._marker, set()).add(stem)
            self._taken += 1

    def _special(self, word: _Word, token: str) -> None:
        reading = self._r
        base = word.base
        if word.number >= 0 or word.scale or word.ordinal or word.unit or self._open:
            counted = self._spoken_number(word)
        else:
            counted = False
        if word.negation:
            reading.negations += 1
        elif self._after_negation:
            reading.negations -= word.stem in lexicon.NOT_NEGATIONS
        self._after_negation = word.negation
        for opposite, pole in word.poles:
            reading.poles.setdefault(opposite, set()).add(pole)
        if base in ("in", "out") and self._before in lexicon.PARTICLE_VERBS:
            reading.poles.setdefault(-1, set()).add(int(base == "out"))
        if word.asks:
            reading.asks.add(word.asks)
        elif self._before == "how" and base in _HOW:
            reading.asks.add(_HOW[base])
        if word.name:
            reading.names.add(word.name)
        elif not self._loud and (word.shouted or (word.capital and not self._fresh)):
            reading.names.add(base)
        letter = len(base) == 1 and (base not in "aisu" or (token == "A" and not self._fresh))
        if letter:
            reading.letters.append(base)
        if len(base) == 1 and token != "I":
            reading.singles.append(base)
        if not counted and (letter or not word.bare):
            reading.words.append(word.stem)
        if word.pronoun:
            reading.pronouns.append(word.stem)
        if word.marker and self._places(base):
            self._marker, self._taken = base, 0
        elif not counted and (word.content or letter):
            self._about(word.stem)
        elif self._taken:
            self._marker = ""
        self._currency, self._minus = "", False

    def _places(self, marker: str) -> bool:
        """Whether what follows a marker is a place or a doer: not where "to" begins a verb or "by" a means."""
        if marker == "to":
            return self._before not in lexicon.BEFORE_INFINITIVES
        return marker != "by" or self._before.endswith(_PARTICIPLES)

    def _spoken_number(self, word: _Word) -> bool:
        """Whether the word is a number or a part of one."""
        numbers = self._r.numbers
        spoken = self._spoken if self._open else -1
        if word.number >= 0:
            if word.number == 1 and self._before in _ONE_IS_NO_NUMBER_AFTER:
                self._open = False
                return False
            tens = spoken >= 20 and spoken % 10 == 0 and spoken % 100 != 0 and word.number < 10
            if tens or (spoken >= 100 and spoken % 100 == 0 and 0 < word.number < 100):
                self._spoken = spoken + word.number
                numbers[-1] = (str(self._spoken), "")
            else:
                if word.number == 1:
                    self._r.ones.append(len(numbers))
                self._spoken = word.number
                numbers.append((str(word.number), ""))
            self._open = True
            return True
        if word.scale and (self._open or len(word.base) > 1):
            if self._open:
                value = _scaled(numbers[-1][0], word.scale)
                numbers[-1] = (value, numbers[-1][1])
                if self._r.ones and self._r.ones[-1] == len(numbers) - 1:
                    self._r.ones.pop()
            else:
                value = str(word.scale)
                numbers.append((value, ""))
            self._spoken = int(value) if value.isdigit() and len(value) < 19 else -1
            self._open = True
            return True
        if word.unit and self._open and not numbers[-1][1]:
            numbers[-1] = (numbers[-1][0], word.unit)
            self._open = False
            return True
        self._open = self._open and word.base == "and"
        if word.ordinal:
            numbers.append((str(word.ordinal), "th"))
        elif word.unit and len(word.base) > 1:
            self._r.units.append(word.unit)
        return bool(word.ordinal)

    def _number(self, token: str) -> None:
        reading = self._r
        value, unit = _number(token.lower())
        value = "-" + value if self._minus else value
        reading.numbers.append((value, unit or self._currency))
        self._open, self._spoken = True, -1
        self._currency, self._minus, self._fresh, self._after_negation, self._before = "", False, False, False, ""

    def _sign(self, token: str, leads: bool) -> None:
        numbers = self._r.numbers
        unit = lexicon.UNITS.get(token, "")
        if token[0] == "°":
            unit = {"c": "celsius", "f": "fahrenheit"}.get(token[1:].lower(), "degree")
        if unit and self._open and not numbers[-1][1]:
            numbers[-1] = (numbers[-1][0], unit)
        elif unit and token not in "%°":
            self._currency = unit
            return
        elif unit:
            self._r.units.append(unit)
        elif token in "-−":
            self._minus = leads
            return
        else:
            self._fresh, self._marker = self._fresh or token in ".!?", ""
        self._open = False

    def _literal(self, found: re.Match[str]) -> str:
        self._r.literals.append(found.group())
        return " \0 "

    def _literal_place(self, literal: str) -> None:
        self._r.words.append(literal)
        self._about(literal)
        self._open, self._fresh, self._before = False, False, ""

    def _read_han(self, run: str) -> None:
        reading = self._r
        reading.negations += sum(character in lexicon.HAN_NEGATIONS for character in _HAN_CHOICE.sub("", run))
        for number in _HAN_NUMBER.findall(run):
            if number == "一":
                reading.ones.append(len(reading.numbers))
            reading.numbers.append((number, ""))
        for character in run:
            for kind, pole in lexicon.HAN_OPPOSITES.get(character, ()):
                reading.poles.setdefault(-2 - kind, set()).add(pole)
        reading.pronouns += [character for character in run if character in lexicon.HAN_PRONOUNS]
        reading.characters += "".join(character for character in run if character not in lexicon.HAN_FILLERS)
        self._open, self._fresh = False, False
