"""Converts a `TurnRequest` into a `ReplyRequest`: history, generation parameters and the voice recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from palaver.chat.attachments import AttachmentReader, FileKind, check_accepted, decode_base64, named_in_errors
from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import MAX_STACKED_FRAMES, merge_parameters, resolve_parameters
from palaver.chat.reply_stream import ReplyRequest
from palaver.constraints import Grammar
from palaver.errors import BadParameter, EmptyMessage, NoMessages
from palaver.media import BadMedia, MediaDecoder
from palaver.media.decoder import wav_from_raw
from palaver.media.headers import sniff
from palaver.messages import Message, Part, Role, Text, Thinking
from palaver.sampling import NUMBERS, STRINGS
from palaver.server.openai.request import api_field_names
from palaver.server.openai.sampling_params import without_sentinels
from palaver.server.settings import ServerSettings
from palaver.server.socket.schemas import UNKNOWN, SocketMessage, TurnRequest, unknown_field
from palaver.server.state import ReplyIndex
from palaver.voice.base import SAMPLE_RATE

ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "length_penalty": "end_penalty",
    "max_inp_length": "max_prompt_tokens",
}
"""Names of the protocol for parameters with another name here. Both are accepted."""
_LIST_PARAMETERS = ("logit_bias", "banned_ids", "stop_ids", "constraint")
GENERATION_PARAMETERS = frozenset(
    (*ALIASES, *NUMBERS, *STRINGS, *_LIST_PARAMETERS, "do_sample", "max_prompt_tokens")
) - {"logprobs"}
DEFAULTS = {"max_tokens": 256, "end_penalty": 1.1, "thinking": False}
"""The protocol's defaults, below those of the operator and of the request."""
MAX_IDS = 1024
FIELD_NAMES = {
    **{name: f"generation.{name}" for name in GENERATION_PARAMETERS},
    **{name: f"generation.{alias}" for alias, name in ALIASES.items()},
    **{f"constraint ({grammar})": "generation.constraint" for grammar in Grammar},
    "min_tokens": "generation.min_tokens",
    "think": "enable_thinking",
    "thinking": "enable_thinking",
}
"""Field names of the protocol by the names that errors use."""
RAW_RATE = 16_000
MAX_SECONDS = 60
_RECORDING_FIELD = "tts.ref_audio_data"
_MEDIA: Mapping[str, tuple[str, ...]] = {"image": (), "audio": ("sample_rate",), "video": ("stack_frames",)}
"""The kinds of media, with the fields that only they have."""
_KINDS: Mapping[str, FileKind] = {"image": "image", "audio": "audio", "video": "video"}


def parse_history(request: TurnRequest, max_messages: int, attachments: AttachmentReader) -> tuple[Message, ...]:
    """The messages, of which the last one must be the user's. Blocking if it has media: call it in a thread."""
    if len(request.messages) > max_messages:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {max_messages} are taken")
    messages = tuple(
        _message(f"messages[{index}]", message, attachments) for index, message in enumerate(request.messages)
    )
    last = messages[-1]
    if last.role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    if last.role is not Role.USER:
        raise NoMessages
    if last.is_blank:
        raise EmptyMessage
    return messages


def _message(where: str, message: SocketMessage, attachments: AttachmentReader) -> Message:
    role = Role(message.role)
    if message.thinking and role is not Role.ASSISTANT:
        raise BadParameter(f"{where}.thinking", "...", "only assistant messages can have thinking")
    thinking: tuple[Part, ...] = (Thinking(message.thinking),) if message.thinking else ()
    return Message(role, (*thinking, *_parts(f"{where}.content", message.content, attachments)))


def _parts(where: str, content: Any, attachments: AttachmentReader) -> tuple[Part, ...]:
    match content:
        case str():
            return (Text(content),)
        case list():
            return tuple(_part(f"{where}[{index}]", part, attachments) for index, part in enumerate(content))
        case _:
            raise BadParameter(where, type(content).__name__, "must be a text or a list of parts")


def _part(where: str, part: Any, attachments: AttachmentReader) -> Part:
    if not isinstance(part, Mapping):
        raise BadParameter(where, type(part).__name__, "a part is an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        return _media_part(where, kind, part, attachments)
    if kind != "text":
        raise BadParameter(f"{where}.type", kind, "must be text, image, audio or video")
    _check_fields(where, part, ("type", "text"))
    if not isinstance(part.get("text"), str):
        raise BadParameter(f"{where}.text", part.get("text"), "must be a text")
    return Text(part["text"])


def _media_part(where: str, kind: str, part: Mapping[str, Any], attachments: AttachmentReader) -> Part:
    _check_fields(where, part, ("type", "data", "name", "duration", *_MEDIA[kind]))
    name = part.get("name") or ""
    if not isinstance(name, str):
        raise BadParameter(f"{where}.name", name, "must be a text")
    if not isinstance(part.get("data"), str):
        raise BadParameter(f"{where}.data", part.get("data"), "must be the file in base64")
    if attachments.accepts is not None:
        check_accepted(kind, attachments.model, attachments.accepts, attachments.why)
    rate = _sample_rate(where, part)
    with named_in_errors(where):
        data = decode_base64(part["data"], name)
        if kind == "audio" and sniff(data) is None:
            data = wav_from_raw(data, name, rate)
        return attachments.read(data, _KINDS[kind], name)


def _sample_rate(where: str, part: Mapping[str, Any]) -> int:
    """The rate of raw samples."""
    rate = part.get("sample_rate")
    if rate is None:
        return RAW_RATE
    if not isinstance(rate, int) or isinstance(rate, bool) or not 1_000 <= rate <= 384_000:
        raise BadParameter(f"{where}.sample_rate", rate, "must be from 1000 to 384000")
    return rate


def _check_fields(where: str, part: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name, value in part.items():
        if name not in names and value is not None:
            raise unknown_field(f"{where}.{name[:80]}", value)


def parse_turn(
    request: TurnRequest,
    model: Model,
    settings: ServerSettings,
    owner: str,
    reply_index: ReplyIndex,
    attachments: AttachmentReader,
) -> ReplyRequest:
    """Blocking: call it in a thread. Raises the error that makes the reply impossible."""
    messages = parse_history(request, settings.limits.messages, attachments)
    with api_field_names(FIELD_NAMES):
        resolved = resolve_parameters(
            model.engine.info.defaults, turn_parameters(request, model, settings), draw_seed(), datetime.now()
        )
    past = reply_index.lookup(owner, messages, (None,) * sum(message.role is Role.ASSISTANT for message in messages))
    return ReplyRequest(messages, resolved.sampling, (), replace(resolved.options, calls=False), 0, owner, past)


def turn_parameters(request: TurnRequest, model: Model, settings: ServerSettings) -> dict[str, Any]:
    """The parameters of the reply."""
    given = {
        **_generation(request.generation),
        "thinking": request.enable_thinking,
        "spoken": _is_spoken(request),
        "media": media_options(request),
    }
    set_fields = {name: value for name, value in given.items() if value is not None}
    return _resolve_thinking(merge_parameters(DEFAULTS, settings.defaults, set_fields, settings.forced), model)


def media_options(request: TurnRequest) -> dict[str, int] | None:
    """How the media are processed. Frames of a video are not sliced, unless the request says otherwise."""
    stacked = _stacked_frames(request)
    options = {
        "max_slice_nums": request.image.max_slice_nums or (1 if stacked or request.omni_mode else None),
        "use_image_id": request.image.use_image_id,
        "stack_frames": max(stacked, default=1) if stacked else None,
    }
    return {name: int(value) for name, value in options.items() if value is not None} or None


def _stacked_frames(request: TurnRequest) -> list[int]:
    """For each video: how many frames of a second there are. Raises BadParameter if they differ."""
    found: list[int] = []
    for index, message in enumerate(request.messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if not isinstance(part, Mapping) or part.get("type") != "video":
                continue
            value = 1 if part.get("stack_frames") is None else part["stack_frames"]
            where = f"messages[{index}].content[{place}].stack_frames"
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STACKED_FRAMES:
                raise BadParameter(where, value, f"must be from 1 to {MAX_STACKED_FRAMES}")
            if found and value != found[0]:
                raise BadParameter(where, value, f"must be the same for all videos of a turn ({found[0]})")
            found.append(value)
    return found


def _is_spoken(request: TurnRequest) -> bool | None:
    """Whether the text must be fit for speech, which excludes a grammar."""
    if not request.tts.enabled and not request.use_tts_template:
        return None
    if request.generation.get("constraint") is not None:
        raise BadParameter("generation.constraint", "...", "can't be combined with a spoken reply")
    return True


def _generation(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for name, value in given.items():
        if name not in GENERATION_PARAMETERS:
            raise BadParameter(f"generation.{name[:80]}", "...", UNKNOWN)
        parameter = ALIASES.get(name, name)
        if parameter in parameters and parameters[parameter] != value:
            raise BadParameter(f"generation.{name}", value, "contradicts its other name")
        if value is not None:
            parameters[parameter] = value
    for name in _LIST_PARAMETERS[1:3]:
        if isinstance(ids := parameters.get(name), list) and len(ids) > MAX_IDS:
            raise BadParameter(f"generation.{name}", f"{len(ids)} ids", f"at most {MAX_IDS} are taken")
    return without_sentinels(_apply_do_sample(parameters))


def _apply_do_sample(parameters: dict[str, Any]) -> dict[str, Any]:
    """`do_sample: false` means greedy decoding."""
    do_sample = parameters.pop("do_sample", None)
    if do_sample is not None and not isinstance(do_sample, bool):
        raise BadParameter("generation.do_sample", do_sample, "must be true or false")
    return {**parameters, "temperature": 0} if do_sample is False else parameters


def _resolve_thinking(parameters: dict[str, Any], model: Model) -> dict[str, Any]:
    """Without a switch in the template, thinking is turned off by a budget of 0."""
    enabled = parameters["thinking"]
    if (
        model.format.thinking_switch is not None
        or not isinstance(enabled, bool)
        or (enabled and not model.format.thinks)
    ):
        return parameters
    others = {name: value for name, value in parameters.items() if name != "thinking"}
    return {**others, "thinking_budget": 0} if model.format.thinks and not enabled else others


def decode_recording(text: str, decoder: MediaDecoder) -> bytes:
    """Decodes a recording to float32 samples at `SAMPLE_RATE`, as `VoiceSettings` takes it. Blocking: call it in a
    thread. Raises BadMedia."""
    with named_in_errors(_RECORDING_FIELD):
        data = decode_base64(text)
        if not data:
            return b""
        if sniff(data) is None:
            data = wav_from_raw(data)
        info = decoder.inspect(data)
        if info.seconds > MAX_SECONDS:
            raise BadMedia("", f"is longer than {MAX_SECONDS} s")
        return decoder.sound(data, SAMPLE_RATE).tobytes()
