"""Define request bodies as pydantic models, from which checks, error messages and OpenAPI schemas are derived.

Unknown fields and values that would have no effect are rejected. This module does not depend on routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from mega.core.inference.request import MOST_TOP_K, REPETITION_PENALTIES, SEEDS
from mega.core.untrusted import Json

_TYPES = {
    "int_type": "integer",
    "float_type": "number",
    "string_type": "string",
    "bool_type": "boolean",
    "list_type": "array",
    "dict_type": "object",
}
"""Pydantic's error type -> the expected JSON type."""


class BadField(ValueError):
    """Raised for an invalid request. field: name of the invalid field; None for the whole request."""

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


class Body(BaseModel):
    """A request body. JSON types are not converted. A field that is null is treated as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Asked = TypeVar("Asked", bound=Body)


def read(body: object, kind: type[Asked]) -> Asked:
    """Parse and check a body. Errors: BadField."""
    if not isinstance(body, dict):
        raise BadField(None, "the body must be a JSON object")
    for name in body:
        if name not in kind.model_fields:
            own_first = sorted(_with_effect(kind), key=lambda valid: valid not in kind.__annotations__)
            raise BadField(name[:60], f"{name[:60]!r}: unknown field; valid: {', '.join(own_first)}")
    values = {name: _whole(value, kind, name) for name, value in body.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refused(error.errors(), kind) from None


def _with_effect(kind: type[Body]) -> list[str]:
    """Return the fields that accept more than one value. The descriptions of all other fields begin with "only"."""
    return [name for name, each in kind.model_fields.items() if not (each.description or "").startswith("only ")]


def _whole(value: object, kind: type[Body], name: str) -> object:
    """Convert numbers such as 16.0 in integer fields to integers, because such numbers are integers in JSON Schema."""
    types = (kind.model_fields[name].annotation, *get_args(kind.model_fields[name].annotation))

    def whole(one: object) -> object:
        return int(one) if isinstance(one, float) and one.is_integer() else one

    if int not in types or float in types:
        return value
    return [whole(each) for each in value] if isinstance(value, list) else whole(value)


def _refused(found: Sequence[ErrorDetails], kind: type[Body]) -> BadField:
    """Return an error that names the first invalid field, the field's value and the violated rule. A field that has no
    effect accepts only one value; its pydantic model has equal bounds or a length of 0."""
    name, value_text = str(found[0]["loc"][0]), repr(found[0]["input"])[:60]
    match found[0]["type"]:
        case "missing":
            return BadField(name, f"Missing '{name}' field")
        case "literal_error" | "string_too_long" | "too_long":
            valid = found[0]["ctx"].get("expected", repr(type(found[0]["input"])()))
            return BadField(name, f"{name} {value_text}: is not supported; valid: {valid}")
        case "greater_than_equal" | "less_than_equal":
            limits = kind.model_fields[name].metadata
            least, most = (next((getattr(at, end) for at in limits if hasattr(at, end)), None) for end in ("ge", "le"))
            if least == most:
                return BadField(name, f"{name} {value_text}: is not supported; valid: {most}")
            rule = f"at least {least}" if most is None else f"from {least} to {most}"
        case _:  # pydantic reports a separate error for each accepted type
            types = dict.fromkeys(_TYPES.get(each["type"], "integer") for each in found if each["loc"][0] == name)
            rule = f"of type {' or '.join(types)}"
    return BadField(name, f"{name} {value_text}: must be {rule}")


def schema(kind: type[Body]) -> dict[str, Json]:
    """Return the JSON schema of a body. Optional fields also accept null."""
    body_schema = kind.model_json_schema()
    for name, property_schema in body_schema["properties"].items():
        if name not in body_schema.get("required", ()) and "type" in property_schema:
            property_schema["type"] = [property_schema["type"], "null"]
            if "enum" in property_schema:
                property_schema["enum"] = [*property_schema["enum"], None]
    return body_schema


class SamplingFields(Body):
    """Fields for sampling. The server's options set their default values."""

    temperature: float | None = Field(None, ge=0, le=100, description="0 selects the most likely token")
    top_p: float | None = Field(
        None, ge=0, le=1, description="sample from the most likely tokens with total probability p; 1 is off"
    )
    top_k: int | None = Field(
        None, ge=-1, le=MOST_TOP_K, description="sample from the k most likely tokens; 0 and -1 are off"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="least probability of a token, relative to the most likely one"
    )
    top_p_decay: float | None = Field(
        None, ge=0, le=1, description="top_p is multiplied by it after each token; 0 is off"
    )
    top_p_bound: float | None = Field(None, ge=0, le=1, description="lower bound of the decayed top_p; 0 is off")
    repetition_penalty: float | None = Field(
        None,
        ge=REPETITION_PENALTIES[0],
        le=REPETITION_PENALTIES[1],
        description="divides the logits of tokens that occurred; 1 is off",
    )
    seed: int | None = Field(
        None, ge=SEEDS[0], le=SEEDS[1], description="requests with the same seed get the same answer"
    )
