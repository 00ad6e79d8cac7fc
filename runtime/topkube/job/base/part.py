"""The base of all parts of a TrainingJob: camelCase in YAML, snake_case in Python, strict types, no unknown fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    StringConstraints,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

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
    def _limit_fields(cls, data: Any) -> Any:
        # Each unknown field is a mistake of its own, with a proposal. For a mapping with very many fields, that would
        # take long, so it is a single mistake.
        if isinstance(data, dict) and len(data) > MOST_FIELDS:
            known = {field.alias or name for name, field in cls.model_fields.items()}
            examples = ", ".join([str(key)[:30] for key in data if key not in known][:3])
            raise_problems(
                [((), f"has {len(data)} fields, more than {MOST_FIELDS}: remove the unknown ones ({examples}, …)")]
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # As in Kubernetes: an empty `aggregation:` takes the defaults.
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_serializer(mode="wrap")
    def _keep_unknown_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Fields of a newer version are kept when an older version reads and writes the object.
        return {**serialize(self), **(self.__pydantic_extra__ or {})}


@dataclass(frozen=True)
class Allowed:
    """Describes in words the allowed values of a text field. Messages and the reference quote the words."""

    words: str


@dataclass(frozen=True)
class OneOf:
    """Limits a text field to names that another module declares; messages, the reference and the schema list them."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


def raise_problems(mistakes: Sequence[tuple[Path, str]]) -> None:
    """Raise all `mistakes` in one error, as (path below the field, text). For validators of fields."""
    if mistakes:
        raise PydanticCustomError("problems", "problems", {"problems": list(mistakes)})


def limit_entries(data: Any) -> Any:
    """Refuse a mapping of more than MOST_ENTRIES entries before each of them is checked."""
    if isinstance(data, dict) and len(data) > MOST_ENTRIES:
        raise_problems([((), f"has {len(data)} entries, more than {MOST_ENTRIES}")])
    return data


def declare_rules(*entries: tuple[str, str]) -> dict[str, Any]:
    """Return the CEL rules of a type for its JSON schema, from (rule, message). Kubernetes 1.25 and newer versions
    check them. For older versions, a validator in Python checks the same as each rule."""
    return {RULES: [{"rule": rule, "message": message} for rule, message in entries]}


MOST_ENTRIES = 4096
"""The largest number of labels, and of annotations."""
MOST_FIELDS = 200
"""The largest number of fields in a part of a job. It is several times the present number of any part, so that newer
versions may have more fields."""
RULES = "x-kubernetes-validations"
KEEP = "x-kubernetes-preserve-unknown-fields"
"""Keys of a JSON schema that only Kubernetes has: rules in CEL, and fields that are kept unread."""
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


def _write_number_as_text(value: Any) -> Any:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return str(int(value)) if is_whole else value


QUANTITY = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E|[eE][+-]?[0-9]{1,2})?$"
Quantity = Annotated[
    str,
    BeforeValidator(_write_number_as_text),
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
