"""What the schemas of the HTTP API are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAX_PARAMETERS = 200
Parameters = Annotated[
    dict[str, Any], Field(max_length=MAX_PARAMETERS, description="Names and values, see `palaver.chat.parameters`.")
]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31)]


class ValueModel(BaseModel):
    """A value of the API. Readers ignore unknown fields: the sender may be newer."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RequestModel(BaseModel):
    """The body of a request. The server refuses unknown fields.

    NaN and infinities are sent as constants, so that the server can refuse them by the parameter's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
