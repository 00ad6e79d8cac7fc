"""What all parts of a TrainingJob share: camelCase in YAML, snake_case in Python, strict types, no unknown fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    StringConstraints,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

Path = tuple[str | int, ...]


class Part(BaseModel):
    """A mapping with known fields."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, data: Any) -> Any:
        # As in Kubernetes: `aggregation:` with nothing behind it takes the defaults.
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_serializer(mode="wrap")
    def _with_unknown_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What a newer version stored is kept when an older one reads and writes the object.
        return {**serialize(self), **(self.__pydantic_extra__ or {})}


@dataclass(frozen=True)
class Allowed:
    """Says in words what a text field may hold; messages and the reference quote it."""

    words: str


def problems(found: Sequence[tuple[Path, str]]) -> None:
    """Raises all of `found` at once, as (path below the field, text), from inside a field's validator."""
    if found:
        raise PydanticCustomError("problems", "problems", {"problems": list(found)})


def rules(*entries: tuple[str, str]) -> dict[str, Any]:
    """CEL rules of a type for its JSON schema, as (rule, message): what a Kubernetes of 1.25 or newer checks by itself.

    Each says in CEL what a validator beside it says in Python.
    """
    return {RULES: [{"rule": rule, "message": message} for rule, message in entries]}


RULES = "x-kubernetes-validations"
KEEP = "x-kubernetes-preserve-unknown-fields"
INT32 = 2**31 - 1
LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
LONGEST_NAME = 63

JobName = Annotated[
    str,
    StringConstraints(max_length=LONGEST_NAME, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$"),
    Allowed(
        "lower-case letters, digits and '-', starting with a letter, ending with a letter or digit, at most "
        f"{LONGEST_NAME} characters (the job's Service and the label of its pods carry it)"
    ),
]
ObjectName = Annotated[
    str,
    StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"),
    Allowed("the name of a Kubernetes object: lower-case letters, digits, '-' and '.', at most 253 characters"),
]
Namespace = Annotated[
    str,
    StringConstraints(max_length=63, pattern=LABEL),
    Allowed("lower-case letters, digits and '-', at most 63 characters"),
]
AbsolutePath = Annotated[
    str,
    StringConstraints(max_length=1024, pattern=r"^/[^:\x00]*[^:/\x00]$"),
    Allowed("an absolute path below /, without ':'"),
]
Uri = Annotated[
    str,
    StringConstraints(max_length=2048, pattern=r"^[a-z][a-z0-9+.-]*://\S+$"),
    Allowed("a URI with its scheme, such as s3://bucket/data, https://host/data or file:///data"),
]


def _number_as_text(value: Any) -> Any:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return str(int(value)) if whole else value


QUANTITY = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E|[eE][+-]?[0-9]{1,2})?$"
Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    StringConstraints(max_length=64, pattern=QUANTITY),
    Allowed(
        "a Kubernetes quantity of bytes, such as 500Gi, 64Mi or 2T (Ki, Mi, Gi … are powers of 1024; k, M, G … of 1000)"
    ),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": 0,
            "maxLength": 64,
            "pattern": QUANTITY,
        }
    ),
]
