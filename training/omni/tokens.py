"""The tokens of pictures and sounds: Sprout's tokenizer with a few more entries, and where each token stands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from training import tokenizer as sprout

VISION_BEGIN, VISION_END, IMAGE, VIDEO = "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"
AUDIO_BEGIN, AUDIO_END, AUDIO = "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"
MEDIA = (VISION_BEGIN, VISION_END, IMAGE, VIDEO, AUDIO_BEGIN, AUDIO_END, AUDIO)
ENTRIES = 4112
"""A multiple of 16; the last few are never used."""
IDS = {text: sprout.ENTRIES + at for at, text in enumerate(MEDIA)}
PICTURE_PART = VISION_BEGIN + IMAGE + VISION_END
SOUND_PART = AUDIO_BEGIN + AUDIO + AUDIO_END
NAMES = {
    "image_token": IMAGE,
    "video_token": VIDEO,
    "audio_token": AUDIO,
    "vision_bos_token": VISION_BEGIN,
    "vision_eos_token": VISION_END,
    "audio_bos_token": AUDIO_BEGIN,
    "audio_eos_token": AUDIO_END,
}


def make(folder: Path = sprout.SPROUT) -> Tokenizer:
    tokenizer = sprout.load(folder)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MEDIA])
    assert all(tokenizer.token_to_id(text) == number for text, number in IDS.items())
    return tokenizer


def save(folder: Path) -> None:
    """Writes the tokenizer with the names by which transformers' processor finds its tokens."""
    sprout.save(make(), folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"extra_special_tokens": NAMES, **NAMES, "processor_class": "Qwen2_5OmniProcessor"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def expand(ids: NDArray[np.uint16], lengths: list[int]) -> NDArray[np.uint16]:
    """Each image or audio token as often as its part has embeddings."""
    counts = np.ones(len(ids), np.int64)
    places = np.flatnonzero((ids == IDS[IMAGE]) | (ids == IDS[AUDIO]))
    assert len(places) == len(lengths), (len(places), lengths)
    counts[places] = lengths
    return np.repeat(ids, counts)


def positions(ids: NDArray[np.uint16], grids: list[tuple[int, int]]) -> NDArray[np.int16]:
    """Time, height and width of every token, as transformers' `get_rope_index` counts them.

    `ids` is expanded; `grids` has the rows and columns of embeddings of each picture.
    """
    if not grids:
        return np.broadcast_to(np.arange(len(ids), dtype=np.int16), (3, len(ids)))
    found = np.empty((3, len(ids)), np.int16)
    at, here, is_image = 0, 0, ids == IDS[IMAGE]
    for rows, columns in grids:
        first = at + int(is_image[at:].argmax())
        found[:, at:first] = np.arange(here, here + first - at)
        here += first - at
        size = rows * columns
        found[0, first : first + size] = here
        found[1, first : first + size] = here + np.arange(size) // columns
        found[2, first : first + size] = here + np.arange(size) % columns
        at, here = first + size, here + max(rows, columns)
    found[:, at:] = np.arange(here, here + len(ids) - at)
    return found
