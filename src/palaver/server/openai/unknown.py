"""Fields nobody here knows: those that change nothing are ignored, all others are refused by their name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palaver.errors import BadParameter
from palaver.server.openai.fields import Fields

IGNORED = frozenset(
    (
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "timeout",
        "cache_prompt",
        "request_id",
        "litellm_call_id",
    )
)
"""They change no reply: hints for speed or accounting."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "verbosity": ("medium",),
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
