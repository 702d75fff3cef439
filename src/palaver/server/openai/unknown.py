"""Fields nobody here knows: those that change nothing are ignored, all others are refused by their name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palaver.errors import BadParameter
from palaver.server.openai.fields import Fields

IGNORED = frozenset(
    (
        "cache_prompt",
        "guided_decoding_backend",
        "id_slot",
        "litellm_call_id",
        "max_tool_calls",
        "moderation",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "timeout",
        "user",
        "verbosity",
        "web_search_options",
    )
)
"""They change no reply: hints for speed, style or accounting, which clients send by themselves."""

HEADER = "x-palaver-ignored"
"""The response header that names the fields without effect."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "detokenize": (True,),
    "strict": (None,),
    "add_special_tokens": (False,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}
"""These mean nothing when they ask for what is done anyway."""


@dataclass(frozen=True, slots=True)
class Tolerated:
    """What one API's clients may send although it is not looked at."""

    ignored: Collection[str] = IGNORED
    harmless: Mapping[str, Sequence[Any]] = field(default_factory=lambda: _HARMLESS)


OPENAI = Tolerated()


def check_unknown(fields: Fields, where: str = "", tolerated: Tolerated = OPENAI) -> None:
    """Raises BadParameter for the first field that would change the reply, or that nobody knows."""
    for name, value in (fields.model_extra or {}).items():
        if value is None or name in tolerated.ignored or value in tolerated.harmless.get(name, ()):
            continue
        raise BadParameter(where + name, _short(value), "this field is not supported")


def ignored_fields(fields: Fields, tolerated: Tolerated = OPENAI) -> list[str]:
    """The fields of a request that were sent and have no effect."""
    sent = {**{name: getattr(fields, name) for name in type(fields).model_fields}, **(fields.model_extra or {})}
    return [name for name, value in sent.items() if value is not None and name in tolerated.ignored]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    return {HEADER: ", ".join(names)} if names else {}


def check_all(fields: Fields, where: str = "", tolerated: Tolerated = OPENAI) -> None:
    """The same for everything inside."""
    check_unknown(fields, where, tolerated)
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        if isinstance(value, Fields):
            check_all(value, f"{where}{name}.", tolerated)
        elif isinstance(value, list):
            for place, one in enumerate(value):
                if isinstance(one, Fields):
                    check_all(one, f"{where}{name}[{place}].", tolerated)


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
