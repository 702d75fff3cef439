"""From a message that opens a turn to what is asked of the model."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import merge_parameters, resolve_parameters
from palaver.chat.reply_stream import ReplyRequest
from palaver.constraints import Grammar
from palaver.errors import BadParameter, NoMessages, UnsupportedContent
from palaver.messages import Message, Part, Role, Text, Thinking
from palaver.sampling import NUMBERS, STRINGS
from palaver.server.openai.reply_index import ReplyIndex
from palaver.server.openai.sampling_params import api_field_names, without_sentinels
from palaver.server.settings import ServerSettings
from palaver.server.socket.schemas import UNKNOWN, SocketMessage, TurnRequest, unknown_field
from palaver.voice.audio_format import resample
from palaver.voice.base import RATE, Samples, VoiceMissing

_MEDIA = {"image": "an image", "audio": "sound", "video": "a video"}
_ABOUT_MEDIA = ("type", "data", "name", "duration", "stack_frames")


def parse_history(opening: TurnRequest, most: int) -> tuple[Message, ...]:
    """The conversation up to the reply that is asked for."""
    if len(opening.messages) > most:
        raise BadParameter("messages", f"{len(opening.messages)} messages", f"at most {most} are taken")
    found = tuple(_message(f"messages[{place}]", said) for place, said in enumerate(opening.messages))
    last = found[-1]
    if last.role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    if last.role is not Role.USER:
        raise NoMessages
    return found


def _message(where: str, said: SocketMessage) -> Message:
    role = Role(said.role)
    if said.thinking and role is not Role.ASSISTANT:
        raise BadParameter(f"{where}.thinking", "...", "only the assistant's messages have thinking")
    thought: tuple[Part, ...] = (Thinking(said.thinking),) if said.thinking else ()
    return Message(role, (*thought, *_parts(f"{where}.content", said.content)))


def _parts(where: str, content: Any) -> tuple[Text, ...]:
    match content:
        case str():
            return (Text(content),)
        case list():
            return tuple(_part(f"{where}[{place}]", part) for place, part in enumerate(content))
        case _:
            raise BadParameter(where, type(content).__name__, "must be a text or a list of parts")


def _part(where: str, part: Any) -> Text:
    if not isinstance(part, Mapping):
        raise BadParameter(where, type(part).__name__, "a part is an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        _only(where, part, _ABOUT_MEDIA)
        raise UnsupportedContent(f"{where}: this model reads text alone and can't be given {_MEDIA[kind]}.")
    if kind != "text":
        raise BadParameter(f"{where}.type", kind, "must be text, image, audio or video")
    _only(where, part, ("type", "text"))
    if not isinstance(part.get("text"), str):
        raise BadParameter(f"{where}.text", part.get("text"), "must be a text")
    return Text(part["text"])


def _only(where: str, part: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name, value in part.items():
        if name not in names and value is not None:
            raise unknown_field(f"{where}.{name[:80]}", value)


OURS = {"max_new_tokens": "max_tokens", "length_penalty": "end_penalty"}
"""Names of the protocol for parameters that have another one here; both are taken."""
_LISTS = ("logit_bias", "banned_ids", "stop_ids", "constraint")
GENERATION = frozenset((*OURS, *NUMBERS, *STRINGS, *_LISTS, "do_sample")) - {"logprobs"}
DEFAULTS = {"max_tokens": 256, "end_penalty": 1.1, "thinking": False}
"""The protocol's own, for what neither a request nor the operator names."""
MAX_LISTED = 1024
THEIRS = {
    **{name: f"generation.{name}" for name in GENERATION},
    **{ours: f"generation.{theirs}" for theirs, ours in OURS.items()},
    **{f"constraint ({grammar})": "generation.constraint" for grammar in Grammar},
    "think": "enable_thinking",
    "thinking": "enable_thinking",
}
"""What the protocol calls the parameters that may be wrong."""


def parse_turn(
    opening: TurnRequest, model: Model, settings: ServerSettings, owner: str, remembered: ReplyIndex
) -> ReplyRequest:
    """May take a while: not for the event loop. Raises whatever makes the reply impossible."""
    messages = parse_history(opening, settings.limits.messages)
    with api_field_names(THEIRS):
        decided = resolve_parameters(
            model.engine.info.defaults, turn_parameters(opening, model, settings), draw_seed(), datetime.now()
        )
    past = remembered.past(owner, messages, (None,) * sum(one.role is Role.ASSISTANT for one in messages))
    return ReplyRequest(messages, decided.sampling, (), replace(decided.options, calls=False), 0, owner, past)


def turn_parameters(opening: TurnRequest, model: Model, settings: ServerSettings) -> dict[str, Any]:
    """The parameters of the reply."""
    given = {**_generation(opening.generation), "thinking": opening.enable_thinking, "spoken": _spoken(opening)}
    chosen = {name: value for name, value in given.items() if value is not None}
    return _thinking(merge_parameters(DEFAULTS, settings.defaults, chosen, settings.forced), model)


def _spoken(opening: TurnRequest) -> bool | None:
    """Whether the text is to be fit for speech. One that must follow a grammar can't be made so."""
    if not opening.tts.enabled and not opening.use_tts_template:
        return None
    if opening.generation.get("constraint") is not None:
        raise BadParameter("generation.constraint", "...", "does not go with a reply that is spoken")
    return True


def _generation(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in GENERATION:
            raise BadParameter(f"generation.{name[:80]}", "...", UNKNOWN)
        ours = OURS.get(name, name)
        if ours in found and found[ours] != value:
            raise BadParameter(f"generation.{name}", value, "contradicts its other name")
        if value is not None:
            found[ours] = value
    for name in _LISTS[1:3]:
        if isinstance(ids := found.get(name), list) and len(ids) > MAX_LISTED:
            raise BadParameter(f"generation.{name}", f"{len(ids)} ids", f"at most {MAX_LISTED} are taken")
    return without_sentinels(_sampled(found))


def _sampled(found: dict[str, Any]) -> dict[str, Any]:
    """`do_sample` says whether tokens are drawn at all; without, the likeliest one is taken."""
    wanted = found.pop("do_sample", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise BadParameter("generation.do_sample", wanted, "must be true or false")
    return {**found, "temperature": 0} if wanted is False else found


def _thinking(parameters: dict[str, Any], model: Model) -> dict[str, Any]:
    """Thinking that is not wanted is switched off; where a template has no switch, the thought is closed at once."""
    wanted = parameters["thinking"]
    if model.format.thinking_switch is not None or not isinstance(wanted, bool) or (wanted and not model.format.thinks):
        return parameters
    others = {name: value for name, value in parameters.items() if name != "thinking"}
    return {**others, "thinking_budget": 0} if model.format.thinks and not wanted else others


RAW_RATE = 16_000
MAX_SECONDS = 60
_FIELD = "tts.ref_audio_data"
_FILES = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


def decode_recording(text: str) -> bytes:
    """As a `Voice` takes it: float32 at `RATE`. May take a while."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("must be base64") from None
    if not data:
        return b""
    samples, rate = _file(data) if data.startswith(_FILES) else (_raw(data), RAW_RATE)
    if not np.isfinite(samples).all():
        raise _wrong("holds values that are no numbers")
    return resample(samples, rate, RATE).tobytes()


def _raw(data: bytes) -> Samples:
    if len(data) % 4:
        raise _wrong("must be float32 samples at 16 kHz, or a WAV, FLAC, OGG or MP3 file")
    _check_length(len(data) // 4, RAW_RATE)
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _file(data: bytes) -> tuple[Samples, int]:
    """By its header first, so that a small file can't become a long sound."""
    try:
        import soundfile
    except ImportError:
        raise VoiceMissing("A recording in a file", "soundfile") from None
    try:
        about = soundfile.info(io.BytesIO(data))
        _check_length(about.frames, about.samplerate)
        most = MAX_SECONDS * about.samplerate
        channels, rate = soundfile.read(io.BytesIO(data), most, dtype="float32", always_2d=True)
    except soundfile.SoundFileError:
        raise _wrong("is no sound file that can be read") from None
    return channels.mean(axis=1, dtype=np.float32), rate


def _check_length(frames: int, rate: int) -> None:
    if frames > MAX_SECONDS * rate:
        raise _wrong(f"is longer than {MAX_SECONDS} s")


def _wrong(why: str) -> BadParameter:
    return BadParameter(_FIELD, "...", why)
