"""The fields of a request as models: from one model come the checks, the refusals and the OpenAPI schema.

A field that no model has, or that has no effect with the value it is given, is refused. It knows no route.
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
"""Pydantic's name of an error -> JSON's of the type that is wanted."""


class BadField(ValueError):
    """A field of a request that cannot be accepted. field: its name, or None for the request as a whole."""

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


class Body(BaseModel):
    """A request's body. JSON's types are taken as they are; null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Asked = TypeVar("Asked", bound=Body)


def read(body: object, kind: type[Asked]) -> Asked:
    """A body's fields, with defaults. Errors: BadField."""
    if not isinstance(body, dict):
        raise BadField(None, "the body must be a JSON object")
    for name in body:
        if name not in kind.model_fields:
            own_first = sorted(kind.model_fields, key=lambda valid: valid not in kind.__annotations__)
            raise BadField(name[:60], f"{name[:60]!r}: unknown field; valid: {', '.join(own_first)}")
    given = {name: _whole(value, kind, name) for name, value in body.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refused(error.errors(), kind) from None


def _whole(value: object, kind: type[Body], name: str) -> object:
    """A number such as 16.0 in the place of a whole one is that, as JSON schema has it."""
    takes = (kind.model_fields[name].annotation, *get_args(kind.model_fields[name].annotation))

    def whole(one: object) -> object:
        return int(one) if isinstance(one, float) and one.is_integer() else one

    if int not in takes or float in takes:
        return value
    return [whole(each) for each in value] if isinstance(value, list) else whole(value)


def _refused(found: Sequence[ErrorDetails], kind: type[Body]) -> BadField:
    """The first field that is wrong, its value, and the rule. A field that is known and without effect here takes one
    value alone: a bound from above and below, or a length of 0."""
    name, shown = str(found[0]["loc"][0]), repr(found[0]["input"])[:60]
    match found[0]["type"]:
        case "missing":
            return BadField(name, f"Missing '{name}' field")
        case "literal_error" | "string_too_long" | "too_long":
            valid = found[0]["ctx"].get("expected", repr(type(found[0]["input"])()))
            return BadField(name, f"{name} {shown}: is not supported; valid: {valid}")
        case "greater_than_equal" | "less_than_equal":
            limits = kind.model_fields[name].metadata
            least, most = (next((getattr(at, end) for at in limits if hasattr(at, end)), None) for end in ("ge", "le"))
            if least == most:
                return BadField(name, f"{name} {shown}: is not supported; valid: {most}")
            rule = f"at least {least}" if most is None else f"from {least} to {most}"
        case _:  # one error a type of those that are taken
            types = dict.fromkeys(_TYPES.get(each["type"], "integer") for each in found if each["loc"][0] == name)
            rule = f"of type {' or '.join(types)}"
    return BadField(name, f"{name} {shown}: must be {rule}")


def schema(kind: type[Body]) -> dict[str, Json]:
    """The model as the JSON schema of a body."""
    found = kind.model_json_schema()
    for name, one in found["properties"].items():
        if name not in found.get("required", ()) and "type" in one:
            one["type"] = [one["type"], "null"]
            if "enum" in one:
                one["enum"] = [*one["enum"], None]
    return found


class SamplingFields(Body):
    """How tokens are drawn; the server's own defaults stand where a request says nothing."""

    temperature: float | None = Field(None, ge=0, le=100, description="0 takes the likeliest token")
    top_p: float | None = Field(None, ge=0, le=1, description="draw from the likeliest that make up p; 1 is off")
    top_k: int | None = Field(None, ge=-1, le=MOST_TOP_K, description="draw from the k likeliest; 0 and -1 are off")
    min_p: float | None = Field(
        None, ge=0, le=1, description="keep tokens of this share of the likeliest's probability"
    )
    top_p_decay: float | None = Field(None, ge=0, le=1, description="top_p is multiplied by it each token; 0 is off")
    top_p_bound: float | None = Field(None, ge=0, le=1, description="top_p does not fall below it; 0 is off")
    repetition_penalty: float | None = Field(
        None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1], description="of tokens that were there; 1 is off"
    )
    seed: int | None = Field(None, ge=SEEDS[0], le=SEEDS[1], description="the same seed gives the same answer")
