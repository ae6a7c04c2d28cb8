"""What the soak asks, and what may be answered: the generator knows which questions mean the same, and the model is a function.

The simulated model's answer depends on the messages and on the length that is asked for; each tenant asks for a length of its
own, so that an answer tells whose it is. Next to each question there are others that look alike and mean something else: another
number, the opposite, places that have changed places.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from serving.inbound import namespace_of
from serving.keys import fingerprint
from serving.llm_sim import OUTPUT_TOKENS_HEADER, Answer, answer
from serving.replies import entry_id
from serving.settings import LlmSimSettings

TENANTS: Mapping[str, int] = {"acme": 40, "globex": 61, "initech": 83}
"""Tokens of an answer, by tenant."""

SYSTEMS = ("",) * 8 + ("Be brief.", "Be kind and answer in full sentences.")
NAMESPACES = ("",) * 9 + ("drafts",)

Directive = Literal["", "no-store", "no-cache", "max-age", "only-if-cached", "ttl", "threshold", "max-error", "tags"]
Behaviour = Literal["reads", "leaves", "returns"]

_FIXED: tuple[tuple[str, ...], ...] = (
    ("How do I reset my card PIN?", "How can I reset my card PIN?", "How do I reset the PIN of my card?"),
    ("How do I turn on the alarm?", "How can I turn on the alarm?", "How do I turn the alarm on?"),
    ("How do I turn off the alarm?", "How can I turn off the alarm?", "How do I turn the alarm off?"),
    ("Is breakfast included?", "Is the breakfast included?"),
    ("Is breakfast not included?", "Is the breakfast not included?"),
    ("Which flights arrive before noon?", "Which flights do arrive before noon?"),
    ("Which flights arrive after noon?", "Which flights do arrive after noon?"),
    ("Can I pay with a credit card?", "Can I pay by credit card?"),
    ("Can I pay without a credit card?",),
    ("怎样重置密码？", "如何重置密码？"),
    ("怎样删除账户？", "如何删除账户？"),
    ("What does 🍎 mean?", "What does the 🍎 mean?"),
    ("What does 🍏 mean?", "What does the 🍏 mean?"),
)
_NUMBERED: tuple[tuple[str, ...], ...] = (
    ("Where is order {0}?", "Where is the order {0}?", "Where is my order {0}?"),
    ("What is {0} plus {1}?", "What's {0} plus {1}?"),
    ("What is {0} minus {1}?", "What's {0} minus {1}?"),
    ("Convert {0} kilometres to miles.", "Please convert {0} kilometres to miles."),
    ("Convert {0} miles to kilometres.", "Please convert {0} miles to kilometres."),
)
_CITIES = ("Bern", "Oslo", "Lima", "Kyoto", "Accra")
_PLACED: tuple[tuple[str, ...], ...] = (
    ("How long is the train from {0} to {1}?", "How long does the train from {0} to {1} take?"),
    ("Is {0} larger than {1}?", "Is {0} bigger than {1}?"),
)


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        text: Its words.
        alike: All texts that mean the same, itself included.
    """

    text: str
    alike: tuple[str, ...]


@dataclass(frozen=True)
class Ask:
    """One request of the soak.

    Attributes:
        tenant: Who asks.
        question: The last user text.
        system: The system prompt; ``""``: none.
        history: Whether there is an earlier turn.
        temperature: As given; None: not given.
        namespace: The caller's division of its cache; ``""``: none.
        stream: Whether the answer is streamed.
        usage: Whether the stream's tokens are asked for.
        directive: What is asked of the cache.
        behaviour: ``reads`` to the end, ``leaves`` in mid-stream, or leaves and ``returns`` for the rest.
        patience: Events after which it leaves.
    """

    tenant: str
    question: Question
    system: str = ""
    history: bool = False
    temperature: float | None = None
    namespace: str = ""
    stream: bool = False
    usage: bool = False
    directive: Directive = ""
    behaviour: Behaviour = "reads"
    patience: int = 0

    def messages(self, text: str | None = None) -> list[dict[str, str]]:
        """Return the messages; with another last user text if one is given."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        if self.history:
            messages += [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello, what can I do?"}]
        return [*messages, {"role": "user", "content": self.question.text if text is None else text}]

    def body(self, model: str, text: str | None = None) -> dict[str, Any]:
        """Return the request's body; with another last user text if one is given."""
        body: dict[str, Any] = {"model": model, "messages": self.messages(text)}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.stream:
            body["stream"] = True
            if self.usage:
                body["stream_options"] = {"include_usage": True}
        cache: dict[str, Any] = {"namespace": self.namespace} if self.namespace else {}
        if self.directive == "ttl":
            cache["ttl"] = 1
        return {**body, "cache": cache} if cache else body

    def headers(self) -> dict[str, str]:
        """Return the request's headers but for its key."""
        given = {OUTPUT_TOKENS_HEADER: str(TENANTS[self.tenant])}
        if self.directive in ("no-store", "no-cache", "only-if-cached"):
            given["cache-control"] = self.directive
        elif self.directive == "max-age":
            given["cache-control"] = "max-age=2"
        elif self.directive == "threshold":
            given["x-cache-threshold"] = "0.99"
        elif self.directive == "max-error":
            given["x-cache-max-error"] = "0.02"
        elif self.directive == "tags":
            given["x-cache-tags"] = "seasonal"
        return given


class Oracle:
    """Says what is right.

    Args:
        model: The simulated model's settings.
        namespace: The gateway's namespace.
    """

    def __init__(self, model: LlmSimSettings, namespace: str) -> None:
        self._model, self._namespace = model, namespace

    def answer(self, ask: Ask, text: str) -> Answer:
        """Return the model's answer to the request with that last user text."""
        return answer({"messages": ask.messages(text)}, self._model, output_tokens=TENANTS[ask.tenant])

    def whole(self, ask: Ask, text: str) -> bytes:
        """Return the same as the body of a JSON answer."""
        return self.answer(ask, text).to_json(self._model.model, self._model.revision)

    def entry(self, ask: Ask, text: str) -> str:
        """Return the id of the entry that holds it."""
        namespace = namespace_of(self._namespace, ask.namespace)
        return entry_id(fingerprint(ask.body(self._model.model, text), tenant=ask.tenant, namespace=namespace).key)


def draw_ask(draw: random.Random) -> Ask:
    """Return the next request: a few questions are asked over and over, some only once."""
    stream = draw.random() < 0.5
    directive: Directive = ""
    if draw.random() < 0.2:
        directive = draw.choice(("no-store", "no-cache", "max-age", "only-if-cached", "ttl", "threshold", "max-error", "tags"))
    behaviour: Behaviour = "reads"
    if stream and draw.random() < 0.3:
        behaviour = draw.choice(("leaves", "returns"))
    return Ask(
        tenant=draw.choice(tuple(TENANTS)),
        question=_question(draw),
        system=draw.choice(SYSTEMS),
        history=draw.random() < 0.05,
        temperature=0.0 if draw.random() < 0.05 else None,
        namespace=draw.choice(NAMESPACES),
        stream=stream,
        usage=stream and draw.random() < 0.5,
        directive=directive,
        behaviour=behaviour,
        patience=draw.randrange(1, 30) if behaviour != "reads" else 0,
    )


def _question(draw: random.Random) -> Question:
    kind = draw.random()
    if kind < 0.6:
        alike = _FIXED[int(len(_FIXED) * draw.random() ** 3)]
    elif kind < 0.8:
        popular = draw.random() < 0.6
        numbers = [draw.randrange(2, 5) if popular else draw.randrange(10, 100_000) for _ in range(2)]
        alike = tuple(text.format(*numbers) for text in draw.choice(_NUMBERED))
    else:
        cities = draw.sample(_CITIES[:3] if draw.random() < 0.8 else _CITIES, 2)
        alike = tuple(text.format(*cities) for text in draw.choice(_PLACED))
    return Question(draw.choice(alike), alike)
