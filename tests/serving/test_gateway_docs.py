"""The gateway's pages say what the code does: rules, guards, reasons, headers and settings by name, and tests that exist."""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Mapping
from functools import cache

import pytest
import yaml

from serving import admission, directives, policy, replies
from serving.llm_sim import LlmSimProcess
from serving.meaning import guards
from serving.metrics import CATALOGUE
from serving.settings import GatewaySettings, LlmSimSettings
from tests.requirements import ROOT
from tests.serving.gateways import running

PAGE = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of a table, found by the line of its header."""
    lines = page[page.index(f"\n{header}\n") :].lstrip("\n").splitlines()
    found = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
    return found


def documented(module: object, columns: int) -> dict[str, str]:
    """First and second column of the table in a module's docstring, by the first; lines that go on are left out."""
    found = re.findall(r"^``([\w-]+)``\s+(?:``)?([\w-]*)", str(module.__doc__), re.MULTILINE)
    return {name: second if columns > 1 else "" for name, second in found}


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_of_settings_is_the_one_that_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gateway_settings_doc.py"))
    written = (ROOT / "docs" / "gateway-settings.md").read_text(encoding="utf-8")
    assert written == script["page"](), "run: python scripts/gateway_settings_doc.py > docs/gateway-settings.md"


def test_the_rules_are_those_of_the_decision_core_in_its_order() -> None:
    table = {named(rule)[0]: outcome for rule, outcome, _ in rows(PAGE, "| rule | outcome | fires when |")}
    assert list(table) == [rule.value for rule in policy.Rule]
    assert table == documented(policy, 2)


def test_the_guards_are_those_that_there_are_under_their_settings() -> None:
    table = {named(guard)[0]: setting.strip("`") for guard, setting, _ in rows(PAGE, "| guard | setting | refuses when |")}
    assert table == documented(guards, 2)


def test_the_reasons_not_to_keep_an_answer_are_those_that_there_are_in_their_order() -> None:
    assert [named(reason)[0] for reason, _ in rows(PAGE, "| reason | when |")] == [refusal.value for refusal in admission.Refusal]


def test_every_directive_is_told() -> None:
    table = rows(PAGE, "| header | body `cache` | means |")
    told = {name.split("=")[0].split(":")[0].strip('"') for header, body, _ in table for name in named(header) + named(body)}
    assert set(documented(directives, 1)) <= told


def test_every_header_of_an_answer_is_told() -> None:
    told = {name.lower() for header, _ in rows(PAGE, "| header | is |") for name in named(header)}
    assert told == {name.lower() for name in re.findall(r"``((?:x-|Cache-Status|Age|ETag)[\w-]*)``", str(replies.__doc__))}


async def test_the_headers_that_the_page_shows_are_those_of_a_gateway_as_it_is() -> None:
    question = re.search(r"-d '(\{.*PIN\?.*\})'", PAGE)
    sample = re.search(r"```\n(cache-status: .*?)```", PAGE, re.DOTALL)
    assert question is not None
    assert sample is not None
    told = dict(line.split(": ", 1) for line in sample[1].splitlines())
    with LlmSimProcess(LlmSimSettings(port=0, ttft=0.0, tpot=0.0)) as model:
        async with running({"upstream": {"base_url": model.base_url}}) as client:
            for _ in range(2):
                answer = await client.post(json.loads(question[1]))
    own = [name.lower() for name in answer.headers if name.lower().startswith(("cache-", "age", "x-"))]
    assert own == list(told)

    def but_for_age(headers: Mapping[str, str]) -> dict[str, object]:
        life = re.search(r"ttl=(\d+)", headers["cache-status"])
        assert life is not None
        status = headers["cache-status"].replace(life[0], "ttl")
        return {**{name: headers[name] for name in told}, "cache-status": status, "age": int(life[1]) + int(headers["age"])}

    # An age is rounded down, and so is what is left of a life: together they may be one short.
    here, there = but_for_age(answer.headers), but_for_age(told)
    assert abs(int(str(here.pop("age"))) - int(str(there.pop("age")))) <= 1
    assert here == there


def test_every_vector_store_is_told() -> None:
    kinds = GatewaySettings.model_json_schema()["$defs"]["VectorSettings"]["properties"]["kind"]["enum"]
    assert [named(kind)[0] for kind, _, _ in rows(PAGE, "| `rules.semantic.vectors.kind` | is | for |")] == kinds


def test_settings_and_metrics_that_the_page_names_exist() -> None:
    known = GatewaySettings().model_dump()
    for path in re.findall(r"`((?:rules|upstream|admission|callers|streams|auth|storage|warmup|ghost)\.[a-z_.]+)[`:]", PAGE):
        place: object = known
        for name in path.split("."):
            assert isinstance(place, Mapping), path
            assert name in place, path
            place = place[name]
    assert set(re.findall(r"cachepilot_\w+", PAGE)) <= {metric.name for metric in CATALOGUE}


def test_the_settings_that_the_page_shows_are_valid() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) >= 2
    for text in shown:
        GatewaySettings.model_validate(yaml.safe_load(text)["gateway"])


def test_links_within_the_pages_lead_to_headings() -> None:
    def anchors(page: str) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    for page, anchor in re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", PAGE):
        assert anchor in anchors(page or "gateway.md"), f"{page}#{anchor}"


CASES = re.findall(
    r"^\| .* \| `([\w/.]+)` \| `(\w+)` \|$", (ROOT / "docs" / "gateway-cases.md").read_text(encoding="utf-8"), re.MULTILINE
)


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_there_are_cases() -> None:
    lines = (ROOT / "docs" / "gateway-cases.md").read_text(encoding="utf-8").splitlines()
    assert len(CASES) == sum(line.startswith("| ") and not line.startswith("| case") for line in lines) > 50


@pytest.mark.parametrize(("file", "name"), CASES)
def test_the_test_that_holds_a_case_exists(file: str, name: str) -> None:
    assert name in names_in(file)
