"""Define the fields that clients of vLLM and llama.cpp send in addition to OpenAI's fields: alternative names for
fields, constraints in other formats, and fields that are accepted only with a value that has no effect.

Source: documentation of vLLM's and llama.cpp's servers. This module does not depend on routes.
"""

from __future__ import annotations

import re
from typing import Literal, TypeVar

from pydantic import Field

from mega.core.inference.request import REPETITION_PENALTIES
from mega.core.inference.server.fields import BadField, Body
from mega.core.untrusted import Json

MOST_CHOICES = 128
"""Maximum number of strings in a guided_choice."""

_SAME_AS = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""llama.cpp's name of a field -> the OpenAI or vLLM name that the routes read."""
_GUIDES = ("guided_json", "json_schema", "guided_regex", "guided_choice")
_METACHARACTERS = re.compile(r"([\\.+*?()|\[\]{}^$])")


class ClientFields(Body):
    """Fields of vLLM and llama.cpp clients. `resolved` converts the fields that have an effect."""

    n_predict: int | None = Field(None, ge=-1, le=1 << 62, description="the same as max_tokens")
    repeat_penalty: float | None = Field(
        None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1], description="the same as repetition_penalty"
    )
    guided_json: dict[str, object] | None = Field(None, description="JSON schema that the answer must match")
    json_schema: dict[str, object] | None = Field(None, description="the same as guided_json")
    guided_regex: str | None = Field(None, description="regular expression that the answer must match")
    guided_choice: list[object] | None = Field(
        None,
        description="strings, one of which is the answer",
        json_schema_extra={"minItems": 1, "maxItems": MOST_CHOICES, "items": {"type": "string", "minLength": 1}},
    )
    use_beam_search: Literal[False] | None = Field(None, description="only false; PUT /api has beams")
    length_penalty: float | None = Field(None, ge=1, le=1, description="only 1: it is about beams")
    min_tokens: int | None = Field(None, ge=0, le=0, description="only 0")
    spaces_between_special_tokens: Literal[True] | None = Field(None, description="only true")
    return_tokens_as_token_ids: Literal[False] | None = Field(None, description="only false")
    return_token_ids: Literal[False] | None = Field(None, description="only false")
    priority: int | None = Field(None, ge=0, le=0, description="only 0: requests are answered in their order")
    repeat_last_n: int | None = Field(None, ge=-1, le=-1, description="only -1: penalties read the complete text")
    typical_p: float | None = Field(None, ge=1, le=1, description="only 1, which is off")
    mirostat: int | None = Field(None, ge=0, le=0, description="only 0, which is off")
    dynatemp_range: float | None = Field(None, ge=0, le=0, description="only 0, which is off")
    xtc_probability: float | None = Field(None, ge=0, le=0, description="only 0, which is off")
    dry_multiplier: float | None = Field(None, ge=0, le=0, description="only 0, which is off")
    n_keep: int | None = Field(None, ge=0, le=0, description="only 0: a prompt that is too long is refused, not cut")
    min_keep: int | None = Field(None, ge=0, le=0, description="only 0")
    n_probs: int | None = Field(None, ge=0, le=0, description="only 0; see logprobs")
    id_slot: int | None = Field(None, ge=-1, le=-1, description="only -1: any")
    timings_per_token: Literal[False] | None = Field(None, description="only false; see /metrics")
    return_progress: Literal[False] | None = Field(None, description="only false")
    return_tokens: Literal[False] | None = Field(None, description="only false")
    store: Literal[False] | None = Field(None, description="only false: nothing is stored")
    service_tier: Literal["auto", "default"] | None = Field(None, description="accepted without effect on the answer")
    prompt_cache_key: str | None = Field(None, description="accepted without effect on the answer")
    safety_identifier: str | None = Field(None, description="accepted without effect on the answer")


Fields = TypeVar("Fields", bound=ClientFields)


def resolved(fields: Fields) -> Fields:
    """Return the fields, with the values of alternative fields moved to `max_tokens`, `repetition_penalty` and
    `response_format`.

    Errors: BadField if a field is given under two names.
    """
    changes: dict[str, object] = {}
    for alias, name in _SAME_AS.items():
        if (value := getattr(fields, alias)) is not None:
            if name in fields.model_fields_set:
                raise BadField(alias, f"{alias}: excludes {name}, which means the same")
            changes[name] = value
    guides = [name for name in _GUIDES if getattr(fields, name) is not None]
    if guides and (len(guides) > 1 or "response_format" in fields.model_fields_set):
        other = guides[1] if len(guides) > 1 else "response_format"
        raise BadField(guides[0], f"{guides[0]}: excludes {other}, which constrains the answer too")
    for name in guides:
        changes["response_format"] = _response_format(name, getattr(fields, name))
    return fields.model_copy(update=changes) if changes else fields


def constraint(fields: ClientFields) -> str:
    """Return the name that the request uses for the field that constrains the answer."""
    return next((name for name in _GUIDES if getattr(fields, name) is not None), "response_format")


def _response_format(name: str, value: object) -> dict[str, Json]:
    """Convert a constraint in vLLM's or llama.cpp's format to a response_format. Errors: BadField."""
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"schema": value}}
    if isinstance(value, str):
        return {"type": "regex", "pattern": value}
    choices = value if isinstance(value, list) else []
    if not 1 <= len(choices) <= MOST_CHOICES or not all(isinstance(each, str) and each for each in choices):
        raise BadField(name, f"{name}: must be 1 to {MOST_CHOICES} strings, none of them empty")
    return {"type": "regex", "pattern": "|".join(_METACHARACTERS.sub(r"\\\1", str(each)) for each in choices)}
