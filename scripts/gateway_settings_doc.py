"""Write docs/gateway-settings.md from serving/settings: python scripts/gateway_settings_doc.py > docs/gateway-settings.md"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from pydantic_core import PydanticUndefined

from serving.settings import GatewaySettings, Settings

ELSEWHERE = {
    "arms.*.share": "The arm's share of the keys; the shares of all arms sum to 1.",
    "space.min_size": "Least `cache_size` that the tuner may set.",
    "space.max_size": "Greatest.",
    "space.min_ttl": "Least `ttl` that the tuner may set, seconds.",
    "space.max_ttl": "Greatest.",
    "space.max_warmup": "Greatest `warmup_ratio`; the least is 0.",
    "space.size_steps": "Points of the ghost's grid over `cache_size`, at equal ratios.",
    "space.ttl_steps": "Points of the ghost's grid over `ttl`, at equal ratios.",
    "space.warmup_steps": "Points of the grid over `warmup_ratio`, at equal distances.",
}
"""Settings whose model says in general what they are."""


def page() -> str:
    """Return the page."""
    lines = [
        "# Settings of the gateway",
        "",
        "Written by `python scripts/gateway_settings_doc.py > docs/gateway-settings.md` from `serving/settings`.",
        "",
        "They are the section `gateway` of the settings file (`cachepilot serve --config FILE`), and the whole file of",
        "`serve run serving.app:build config=FILE`. Sizes are bytes, times are seconds; unknown keys and values out of range are",
        "refused by their names. Variables override the file: `CACHEPILOT_GATEWAY__UPSTREAM__BASE_URL=http://model:8000/v1`.",
        "What they do together is in [gateway.md](gateway.md).",
    ]
    for section, model in sections(GatewaySettings):
        title = f"gateway.{section}" if section else "gateway"
        lines += ["", f"## {title}", "", "| setting | default | takes | meaning |", "|---|---|---|---|"]
        schema = model.model_json_schema()["properties"]
        told = _attributes(model)
        for name, field in model.model_fields.items():
            path = f"{section}.{name}" if section else name
            if _model(field.annotation) is not None:
                continue
            default = field.get_default(call_default_factory=True)
            meaning = told.get(name) or ELSEWHERE[path.replace("<name>", "*")]
            lines.append(f"| `{name}` | {_default(default)} | {_takes(schema[name])} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def sections(model: type[Settings], path: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Yield every model of settings below one, with the path of its section."""
    if any(_model(field.annotation) is None for field in model.model_fields.values()):
        yield path, model
    for name, field in model.model_fields.items():
        inner = _model(field.annotation)
        if inner is not None:
            below = f"{name}.<name>" if typing.get_origin(field.annotation) is dict else name
            yield from sections(inner, f"{path}.{below}" if path else below)


def _model(annotation: Any) -> type[Settings] | None:
    """The model of settings that a field holds, or holds by name."""
    if typing.get_origin(annotation) is dict:
        return _model(typing.get_args(annotation)[1])
    return annotation if inspect.isclass(annotation) and issubclass(annotation, Settings) else None


def _attributes(model: type[Settings]) -> Mapping[str, str]:
    """What the model's docstring says of its attributes."""
    _, _, listed = (inspect.getdoc(model) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in listed.splitlines():
        begun = re.match(r"    (\w+): (.*)", line)
        if begun is not None:
            name, found[begun[1]] = begun[1], begun[2]
        elif line.startswith("        ") and name:
            found[name] += " " + line.strip()
        else:
            break
    return {each: text.replace("``", "`") for each, text in found.items()}


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "-"
    return f"`{orjson.dumps(value, default=list).decode()}`" if value != "" else '`""`'


def _takes(schema: Mapping[str, Any]) -> str:
    options = schema.get("anyOf", [schema])
    return _cell(" or ".join(_kind(option) for option in options))


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind in ("number", "integer"):
        name = "number" if kind == "number" else "whole number"
        bounds = [
            f"{sign} {schema[key]:,.10g}"
            for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
            if key in schema
        ]
        multiple = [f"a multiple of {schema['multipleOf']}"] if "multipleOf" in schema else []
        return ", ".join([f"{name} {' and '.join(bounds)}".strip(), *multiple])
    if schema.get("writeOnly"):
        return "secret text"
    return {"null": "null", "boolean": "true, false", "string": "text", "array": "list of texts", "object": "lists by name"}[kind]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
