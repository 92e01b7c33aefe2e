"""The ground the configuration models stand on: one base class, and the scalar types of `model_config.proto`.

Every class built on `ConfigMessage` mirrors one protobuf message field by field: proto3's defaults, `None` for a
message or oneof member that is absent, enum values by name. So a configuration passes unchanged between text,
protobuf, JSON, msgpack and Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]

DataType = Literal[
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
]
"""Element types by their names in `config.pbtxt`; `schemas.datatypes.BY_CONFIG_NAME` maps them to wire names."""


class ConfigMessage(BaseModel):
    """A protobuf message as an immutable value. Unknown fields are refused with pydantic's `ValidationError`.

    `model_dump(exclude_defaults=True)` is the compact form for messages between roles; `model_validate` takes it back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, serialize_by_alias=True)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with the given fields changed.

        Use it instead of `model_copy(update=...)`, which neither validates nor forgets cached properties.
        """
        kept = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(kept | changes)


def check_oneof(message: ConfigMessage, names: Iterable[str]) -> None:
    """Raises ValueError when more than one of the fields `names`, a protobuf oneof, is set."""
    chosen = [name for name in names if getattr(message, name) is not None]
    if len(chosen) > 1:
        raise ValueError(f"only one of {', '.join(chosen)} may be given")
