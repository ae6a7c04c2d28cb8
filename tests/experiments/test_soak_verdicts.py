"""What the soak makes of answers: a soak that finds nothing wrong has to be able to find it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from experiments.soak.model import WatchedModel
from experiments.soak.questions import TENANTS, Ask, Oracle, Question, draw_ask
from experiments.soak.report import Memory, SoakReport
from experiments.soak.verdicts import Reply, judge, read_stream
from serving import recording, sse
from serving.settings import LlmSimSettings
from tests.e2e.stack import fetch

MODEL = LlmSimSettings(ttft=0.0, tpot=0.0)
ORACLE = Oracle(MODEL, "soak")
ON = Question("How do I turn on the alarm?", ("How do I turn on the alarm?", "How can I turn on the alarm?"))
OFF = Question("How do I turn off the alarm?", ("How do I turn off the alarm?",))
ASK = Ask("acme", ON)
STREAM = replace(ASK, stream=True)


def reply(ask: Ask, text: str | None = None, *, label: str = "HIT", tier: str = "memory", **changed: Any) -> Reply:
    """The right answer, as to another text if one is given."""
    said = ask.question.text if text is None else text
    headers = {"x-cache": label, "x-cache-tier": tier, "x-cache-entry": ORACLE.entry(ask, said), "age": "0"}
    body = ORACLE.whole(ask, said)
    if ask.stream:
        body = recording.to_sse(body, usage=ask.usage)
    given = {"status": 200, "headers": headers, "body": body, **changed}
    return Reply(**given)


@pytest.mark.parametrize("ask", [ASK, STREAM, replace(STREAM, usage=True)])
@pytest.mark.parametrize("label", ["HIT", "MISS", "COLLAPSED", "STALE"])
def test_the_right_answer_is_right(ask: Ask, label: str) -> None:
    verdict = judge(ask, reply(ask, label=label), ORACLE)
    assert (verdict.counted, verdict.violation, verdict.excuse) == (label, "", "")


@pytest.mark.parametrize("ask", [ASK, STREAM])
def test_an_answer_to_what_means_the_same_is_right_only_where_it_says_so(ask: Ask) -> None:
    other = ON.alike[1]
    assert judge(ask, reply(ask, other, label="SEMANTIC", tier="vector"), ORACLE).violation == ""
    assert judge(ask, reply(ask, other), ORACLE).violation == "wrong_entry"
    own = {**reply(ask).headers}
    assert judge(ask, replace(reply(ask, other), headers=own), ORACLE).violation == "wrong_answer"


@pytest.mark.parametrize("ask", [ASK, STREAM])
def test_the_opposite_another_tenant_another_prompt_and_another_namespace_are_wrong(ask: Ask) -> None:
    for other in (
        replace(ask, question=OFF),
        replace(ask, tenant="globex"),
        replace(ask, system="Be brief."),
        replace(ask, namespace="drafts"),
    ):
        answered = reply(other, label="SEMANTIC", tier="vector")
        assert judge(ask, answered, ORACLE).violation == "wrong_entry"
        if other.namespace == ask.namespace:  # of which the words do not tell
            named = {**answered.headers, "x-cache-entry": ORACLE.entry(ask, ask.question.text)}
            assert judge(ask, replace(answered, headers=named), ORACLE).violation == "wrong_answer"


def test_a_cut_answer_is_the_models_fault_if_that_is_so_and_never_a_hit() -> None:
    for ask, name in ((ASK, "broken_json"), (STREAM, "broken_stream")):
        whole = reply(ask, label="MISS")
        cut = replace(whole, body=whole.body[: len(whole.body) // 2])
        verdict = judge(ask, cut, ORACLE)
        assert (verdict.violation, verdict.excuse) == (name, "cut")
        hit = judge(ask, replace(cut, headers={**cut.headers, "x-cache": "HIT"}), ORACLE)
        assert hit.violation
        assert hit.excuse == ""
        assert judge(ask, replace(cut, ended="broken"), ORACLE).violation == "broken_connection"
    whole = reply(STREAM)
    half = ORACLE.whole(ASK, ON.text).replace(b'"finish_reason":"stop"', b'"finish_reason":null')
    assert judge(ASK, reply(ASK, label="MISS", body=half), ORACLE).violation == "incomplete_answer"
    left = replace(whole, ended="left", body=whole.body[: sse.events(whole.body)[0].end])
    assert judge(STREAM, left, ORACLE).counted == "left"
    assert judge(STREAM, replace(left, body=left.body.replace(b'"content":"', b'"content":"no')), ORACLE).violation


def test_the_rest_of_a_stream_is_judged_together_with_what_the_client_had() -> None:
    whole = reply(STREAM).body
    had = whole[: sse.events(whole)[0].end]
    rest = reply(STREAM, body=sse.tail(whole, 1))
    assert judge(STREAM, rest, ORACLE, had).violation == ""
    twice = reply(STREAM, body=whole)
    assert judge(STREAM, twice, ORACLE, whole[: sse.events(whole)[-3].end]).violation == "wrong_answer"


def test_an_error_is_excused_by_what_the_model_did_and_by_nothing_else() -> None:
    failed = Reply(500, body=b'{"error":{"message":"a failure that the settings ask for (failure_rate)"}}')
    assert judge(ASK, failed, ORACLE).excuse == "error"
    assert judge(ASK, Reply(504, body=b'{"error":{"code":"upstream_timeout"}}'), ORACLE).excuse == "silent"
    for status in (500, 502, 503):
        verdict = judge(ASK, Reply(status, body=b"Internal Server Error"), ORACLE)
        assert (verdict.violation, verdict.excuse) == ("server_error", "")
    assert judge(ASK, Reply(429), ORACLE).violation == "refused"
    forbidden = Reply(504, body=b'{"error":{"code":"only_if_cached"}}')
    assert judge(replace(ASK, directive="only-if-cached"), forbidden, ORACLE).violation == ""
    assert judge(ASK, forbidden, ORACLE).violation == "server_error"


def test_directives_that_are_not_heeded_are_seen() -> None:
    old = {**reply(ASK).headers, "age": "3"}
    for directive, answered in (
        ("no-store", reply(ASK)),
        ("no-cache", reply(ASK)),
        ("max-age", replace(reply(ASK), headers=old)),
        ("only-if-cached", reply(ASK, label="MISS")),
    ):
        assert judge(replace(ASK, directive=directive), answered, ORACLE).violation == "directive_ignored", directive  # type: ignore[arg-type]


def test_no_two_meanings_share_a_text_and_tenants_have_answers_of_their_own() -> None:
    draw = random.Random(0)
    meanings: dict[str, tuple[str, ...]] = {}
    for _ in range(3000):
        question = draw_ask(draw).question
        assert question.text in question.alike
        assert meanings.setdefault(question.text, question.alike) == question.alike
    assert len(meanings) > 200
    assert len({ORACLE.answer(replace(ASK, tenant=tenant), ON.text).text for tenant in TENANTS}) == len(TENANTS)


def test_the_model_tells_of_its_failures_and_only_of_those_calls() -> None:
    failing = MODEL.model_copy(update={"failure_rate": 1.0})
    messages = ASK.messages()
    with WatchedModel(MODEL) as well, WatchedModel(failing) as ill:
        for model, status in ((well, 200), (ill, 500)):
            answered = fetch(f"{model.base_url}/chat/completions", json.dumps(ASK.body(MODEL.model)).encode())
            assert (answered.status == 200) == (status == 200)
    # They have ended: what a client has seen is on record now.
    assert well.counted() == {"ok": 1}
    assert ill.counted() == {"error": 1}
    assert ill.caused([messages], "error", 0.0, float("inf"))
    assert not ill.caused([messages], "cut", 0.0, float("inf"))
    assert not ill.caused([ASK.messages(OFF.text)], "error", 0.0, float("inf"))
    assert not ill.caused([messages], "error", 0.0, 1.0)
    assert not well.caused([messages], "error", 0.0, float("inf"))


def test_memory_is_compared_between_the_first_and_the_last_third_and_fails_the_soak_where_it_grew_too_much() -> None:
    held = Memory.of([100, 100, 120, 180, 200, 200])
    assert (held.first, held.last, held.most, held.growth) == (100.0, 200.0, 200.0, 100.0)
    report = SoakReport("soak", 1.0, {"HIT": 3}, {}, {"ok": 1}, (0.1, 0.2, 0.3), 0.3, {7: held}, 100, {}, {}, ())
    assert report.passed
    assert report.hit_quantile(0.5) == 0.2
    assert not replace(report, max_growth=99).passed
    assert not replace(report, violations={"wrong_answer": 1}).passed
    assert ("wrong answers", "1", "0") in replace(report, violations={"wrong_answer": 1}).rows()
    assert ("other violations", "2", "0") in replace(report, violations={"never_heard_of": 2}).rows()


def test_a_stream_that_goes_on_after_its_end_is_none() -> None:
    body = reply(STREAM).body
    assert read_stream(body).done
    with pytest.raises(ValueError, match="after"):
        read_stream(body + body)
