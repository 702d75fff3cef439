"""What a client may send: a message that opens a turn, stops one, or comes back to one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SEQ = 2**31


class Fields(BaseModel):
    """A field that is null is as good as left out; one that nobody knows is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one is not None}


class Said(Fields):
    role: Literal["system", "user", "assistant"]
    content: Any = ""
    """A text, or a list of parts: see `conversing.py`, which can say what is wrong with one."""
    thinking: str = ""
    """What the assistant thought, as `done` told it."""


class Tts(Fields):
    enabled: bool = False
    ref_audio_data: str = ""
    mode: Annotated[str, Field(max_length=64)] = ""
    """A template of the model's own talker, for which there is none here: taken and without effect."""


class ImageWish(Fields):
    max_slice_nums: Annotated[int, Field(ge=1, le=64)] = 1


class Opening(Fields):
    """Opens a turn: the whole history, and how the reply is wanted."""

    messages: list[Said] = Field(min_length=1)
    streaming: bool = True
    generation: dict[str, Any] = Field(default_factory=dict)
    tts: Tts = Field(default_factory=Tts)
    image: ImageWish = Field(default_factory=ImageWish)
    omni_mode: bool = False
    enable_thinking: bool | None = None
    conversation: Annotated[str, Field(max_length=100)] = ""
    """The one that the messages and the reply are kept in; `new` makes one."""
    use_tts_template: bool = False
    """Whether the text is to be fit for speech, even where none is made of it."""


class Stop(Fields):
    """Ends the turn that this socket reads."""

    type: Literal["stop"]


class Resume(Fields):
    """Comes back to a turn: what was told after that message is told, and what is still to come."""

    type: Literal["resume"]
    turn_id: str = Field(min_length=1, max_length=100)
    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
