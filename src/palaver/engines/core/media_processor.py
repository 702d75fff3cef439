"""What engines read from a processor of the transformers library, and from what it writes for one item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palaver.errors import UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem

_OPTIONS = ("max_slice_nums", "use_image_id")
_FLAGS = frozenset({"use_image_id"})


def find_placeholders(processor: Any) -> dict[str, str]:
    """The text that a processor expands, for each kind of media that it takes."""
    found = {}
    parts = {"image": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}
    for kind, names in parts.items():
        if any(getattr(processor, name, None) is not None for name in names):
            token = getattr(processor, f"{kind}_token", None)
            found[kind] = getattr(processor, "boi_token", token) if kind == "image" and token is None else token
    return {kind: str(token) for kind, token in found.items() if token is not None}


def find_numbers(processor: Any) -> dict[str, str]:
    """The text that a processor writes before an item, by kind, with the item's number for `{}`: MiniCPM numbers the
    pictures of a conversation."""
    if not getattr(processor, "default_use_image_id", False):
        return {}
    return {"image": f"{processor.image_id_start_token}{{}}{processor.image_id_end_token}"}


def find_options(processor: Any) -> tuple[str, ...]:
    """Names of `MediaItem.options` that a processor knows for pictures."""
    known = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
    return tuple(name for name in _OPTIONS if name in getattr(known, "__annotations__", {}))


def option_values(item: MediaItem) -> dict[str, int | bool]:
    """The item's options as a processor takes them."""
    return {name: bool(value) if name in _FLAGS else value for name, value in item.options}


def added_token_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of tokens that no text spells."""
    return frozenset(tokenizer.get_added_vocab().values()) | frozenset(tokenizer.all_special_ids)


def describe_expansion(ids: Sequence[int], added_ids: frozenset[int]) -> MediaExpansion:
    """The tokens that a processor wrote for an item alone; plain text at both ends may join the text around it."""
    places = [place for place, token_id in enumerate(ids) if token_id in added_ids]
    if not places:
        raise UnsupportedContent("The model's processor writes nothing for it.")
    return MediaExpansion(tuple(ids), places[0], len(ids) - 1 - places[-1])


def check_sound_length(content: MediaContent, max_samples: int) -> None:
    """Feature extractors of Whisper silently drop the rest of a longer sound. `max_samples`: 0 if there is no limit."""
    if 0 < max_samples < content.shape[0]:
        longest = max_samples / content.rate
        raise UnsupportedContent(f"This model hears at most {longest:g} seconds of sound at once.")


def processing_failed(kind: str, error: Exception) -> UnsupportedContent:
    why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
    return UnsupportedContent(f"The model's processor can't take this {kind}: {why}")
