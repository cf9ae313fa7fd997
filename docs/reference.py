"""Write the tables that are derived from the code into the pages: `PYTHONPATH=. python docs/reference.py`. A test
compares the pages with the code.

On a page, such a table is between `<!-- reference: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`. The script
needs the extra `serve`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
WIDTH = 120
"""Maximum length of a line of prose."""
LARGE = 10**9
"""Bounds of at least this magnitude are limits of the number format, and are not shown."""
MARKED = re.compile(r"(<!-- reference: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


ORDER = {"completions, chat": 0, "completions": 1, "chat": 2, "api": 3}


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


def values(schema: dict[str, Any]) -> str:
    """Return a description of the values that a JSON schema accepts.

    >>> values({"type": ["integer", "null"], "minimum": 0, "maximum": 20}), values({"enum": ["float", "base64", None]})
    ('integer, 0 to 20', '`float` or `base64`')
    >>> values({"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]}), values({"type": "number"})
    ('string or array', 'number')
    """
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
    named = [str(value) for choice in choices for value in choice.get("enum", []) if value is not None]
    if named:
        return " or ".join(f"`{value}`" for value in named)
    bounds = {name: value for choice in (*choices, schema) for name, value in choice.items() if "imum" in name.lower()}
    kinds = [choice.get("type", "object") for choice in choices]
    kinds = [kind for each in kinds for kind in ([each] if isinstance(each, str) else each) if kind != "null"]
    text = " or ".join(dict.fromkeys(kinds))
    least, most = bounds.get("minimum"), bounds.get("maximum")
    if least is not None and most is not None and max(abs(least), most) < LARGE:
        return f"{text}, {least:g} to {most:g}"
    above = "" if "exclusiveMinimum" not in bounds else f", above {bounds['exclusiveMinimum']:g}"
    from_ = "" if least is None or abs(least) >= LARGE else f", at least {least:g}"
    return text + above + from_ + ("" if most is None or most >= LARGE else f", at most {most:g}")


def request_fields() -> str:
    """Return a table of the request fields for text, and of the fields that are accepted with only one value."""
    from mega.core.inference.server.fields import schema
    from mega.core.inference.server.megatron_api import MegatronRequest
    from mega.core.inference.server.openai_api import Chat, Completion

    rows: dict[tuple[str, ...], list[str]] = {}
    single: dict[tuple[str, str], list[str]] = {}
    for route, body in (("completions", Completion), ("chat", Chat), ("api", MegatronRequest)):
        properties: Any = schema(body)["properties"]
        for name, field in properties.items():
            meaning = str(field.get("description", "")).replace("|", "\\|")
            if meaning.startswith("only "):
                value = re.split("[:;,]", meaning.removeprefix("only "))[0]
                single.setdefault((name, value), []).append(route)
            else:
                default = field.get("default")
                shown = "" if default is None else f"`{str(default).lower()}`"
                rows.setdefault((f"`{name}`", values(field), shown, meaning), []).append(route)
    cells = sorted(
        ([key[0], ", ".join(routes), *key[1:]] for key, routes in rows.items()), key=lambda row: ORDER[row[1]]
    )
    table = _table(["field", "routes", "values", "default", "meaning"], cells)
    both = {name for name, _ in single if sum(other == name for other, _ in single) > 1}
    names = (
        f"`{name}` ({value}{', ' + routes[0] if name in both else ''})" for (name, value), routes in single.items()
    )
    sentence = f"The OpenAI routes accept these fields only with the value in parentheses: {', '.join(names)}."
    return f"{table}\n{textwrap.fill(sentence, WIDTH, break_long_words=False, break_on_hyphens=False)}\n"


def checkpoint_forms() -> str:
    """Return a table of the checkpoint formats: how each is recognised and written."""
    from mega.core.checkpoint.forms.form import FORMS, OWN

    def flags(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    rows = [[OWN.words, "step-NNNNNNN", "both commands", "`mega`", "", flags(OWN.writes)]]
    for form in reversed(FORMS):
        targets = flags(form.targets) or "not written"
        rows.append(
            [form.words, form.sign or form.alone, f"`{form.verb}`", targets, flags(form.reads), flags(form.writes)]
        )
    return _table(["format", "recognised by", "command", "target", "flags for reading", "flags for writing"], rows)


TABLES = {"request_fields": request_fields, "checkpoint_forms": checkpoint_forms}
"""Table name -> function that returns the table."""


def filled(page: str) -> str:
    """Return the text of a page with its tables regenerated."""
    return MARKED.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
