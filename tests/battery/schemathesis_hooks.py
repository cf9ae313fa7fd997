"""A check of schemathesis that tests/battery/serve_schemathesis.py adds: a refusal says which field is wrong."""

from __future__ import annotations

import json
from typing import Any

import schemathesis


@schemathesis.check  # type: ignore[untyped-decorator]
def refusal_names_a_field(ctx: Any, response: Any, case: Any) -> None:
    """A 400 of a body that is an object names one of the route's fields, or one that the body has."""
    body = case.body
    if response.status_code != 400 or not isinstance(body, dict):
        return
    said = json.dumps(response.json())
    content = case.operation.definition.raw["requestBody"]["content"]["application/json"]
    if case.operation.path == "/api" and "beam_search" in said:
        return  # Megatron-LM's message about beam_width and prompts names neither
    names = {*content["schema"]["properties"], *(json.dumps(name)[1:-1][:60] for name in body)}
    assert any(name and name in said for name in names) or "JSON" in said, f"no field is named: {said[:200]}"
