"""What all models of the wire have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_PARAMETERS = 200
Parameters = Annotated[
    dict[str, Any], Field(max_length=MAX_PARAMETERS, description="Names and values, see `palaver.chat.parameters`.")
]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31)]


class Told(BaseModel):
    """What a server says. A field that a client doesn't know is passed over: the server may be newer."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True)


class Asked(BaseModel):
    """What a client asks. A field that the server doesn't know is refused, never ignored.

    A number that JSON has no word for is sent as it is, to be refused by its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


def _said(value: Any) -> Any:
    """JSON has no infinity."""
    return "-Infinity" if value == float("-inf") else value


Logprob = Annotated[float | Literal["-Infinity"], BeforeValidator(_said)]


def logprob(told: float | str) -> float:
    return float(told)
