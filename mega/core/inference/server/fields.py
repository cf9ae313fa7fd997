"""The fields of a request as tables: from one table come the checks, the refusals and the OpenAPI schema.

A field that is not in the table, or has no effect with the value it is given, is refused. It knows no route.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega.core.inference.request import MOST_TOP_K, REPETITION_PENALTIES, SEEDS
from mega.core.untrusted import Json

_PENALTY_LEAST, _PENALTY_MOST = REPETITION_PENALTIES

_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class BadField(ValueError):
    """A field of a request that cannot be accepted. field: its name, or None for the request as a whole."""

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


@dataclass(frozen=True, kw_only=True)
class Field:
    """types: JSON's, separated by |. least, most: of a number. only: the values that are accepted, of a field that is
    known and otherwise without effect here. shape: what JSON schema can say of it besides; the route checks it. null is
    the same as leaving a field out."""

    types: str
    help: str
    default: object = None
    least: float = -math.inf
    most: float = math.inf
    only: tuple[object, ...] = ()
    required: bool = False
    shape: Mapping[str, object] = field(default_factory=dict)

    def check(self, name: str, value: Any) -> Any:
        """The value. Errors: BadField."""
        kinds = self.types.split("|")
        fits = [
            kind
            for kind in kinds
            if isinstance(value, _TYPES[kind]) and (kind == "boolean") is (value is True or value is False)
        ]
        shown = repr(value)[:60]
        if not fits:
            raise BadField(name, f"{name} {shown}: must be of type {' or '.join(kinds)}")
        if self.only and value not in self.only:
            raise BadField(name, f"{name} {shown}: is not supported; valid: {' or '.join(map(repr, self.only))}")
        if fits[0] in ("integer", "number") and not self.least <= value <= self.most:
            raise BadField(name, f"{name} {shown}: must be {self.range()}")
        return value

    def range(self) -> str:
        """
        >>> Field(types="integer", help="", least=1).range()
        'at least 1'
        """
        if math.isinf(self.most):
            return f"at least {self.least}"
        return f"from {self.least} to {self.most}"

    def schema(self) -> dict[str, Json]:
        """As JSON schema."""
        kinds = self.types.split("|")
        found: dict[str, Any] = {"type": [*kinds, "null"], "description": self.help}
        if "array" in kinds:
            found["items"] = {}
        if self.only:
            found["enum"] = [*self.only, None]
        if not math.isinf(self.least):
            found["minimum"] = self.least
        if not math.isinf(self.most):
            found["maximum"] = self.most
        if self.default is not None:
            found["default"] = self.default
        return {**found, **self.shape}


Fields = Mapping[str, Field]


def read(body: Any, fields: Fields) -> dict[str, Any]:
    """All fields of the table by name, with defaults. Errors: BadField."""
    if not isinstance(body, dict):
        raise BadField(None, "the body must be a JSON object")
    for name in body:
        if name not in fields:
            raise BadField(name[:60], f"{name[:60]!r}: unknown field; valid: {', '.join(fields)}")
    found: dict[str, object] = {}
    for name, one in fields.items():
        value = body.get(name)
        if value is None and one.required:
            raise BadField(name, f"Missing '{name}' field")
        found[name] = one.default if value is None else one.check(name, value)
    return found


def schema(fields: Fields) -> dict[str, Json]:
    """The table as the JSON schema of a body."""
    return {
        "type": "object",
        "properties": {name: field.schema() for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }


SAMPLING: dict[str, Field] = {
    "temperature": Field(types="number", help="0 takes the likeliest token", least=0, most=100),
    "top_p": Field(types="number", help="draw from the likeliest tokens that make up p; 1 is off", least=0, most=1),
    "top_k": Field(types="integer", help="draw from the k likeliest; 0 is off", least=0, most=MOST_TOP_K),
    "min_p": Field(types="number", help="keep tokens of this share of the likeliest's probability", least=0, most=1),
    "top_p_decay": Field(types="number", help="top_p is multiplied by it after every token; 0 is off", least=0, most=1),
    "top_p_bound": Field(types="number", help="top_p does not fall below it; 0 is off", least=0, most=1),
    "repetition_penalty": Field(
        types="number", help="of tokens that were there; 1 is off", least=_PENALTY_LEAST, most=_PENALTY_MOST
    ),
    "seed": Field(types="integer", help="the same seed gives the same answer", least=SEEDS[0], most=SEEDS[1]),
}
"""How tokens are drawn; the server's own defaults stand where a request says nothing."""
