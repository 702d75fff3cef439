"""Fields nobody here knows: those that change nothing are ignored, all others are refused by their name."""

from __future__ import annotations

from collections.abc import Mapping
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
    "modalities": (["text"],),
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


def check_unknown(fields: Fields, where: str = "") -> None:
    """Raises BadParameter for the first field that would change the reply, or that nobody knows."""
    for name, value in (fields.model_extra or {}).items():
        if value is None or name in IGNORED or value in _HARMLESS.get(name, ()):
            continue
        raise BadParameter(where + name, _short(value), "this field is not supported")


def check_all(fields: Fields, where: str = "") -> None:
    """The same for everything inside."""
    check_unknown(fields, where)
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        if isinstance(value, Fields):
            check_all(value, f"{where}{name}.")
        elif isinstance(value, list):
            for place, one in enumerate(value):
                if isinstance(one, Fields):
                    check_all(one, f"{where}{name}[{place}].")


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
