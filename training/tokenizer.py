"""The tokenizer: byte-level BPE learned on generated conversations. All text round-trips; digits are single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.mixture import samples
from training.phrasings import Split
from training.rendering import render

SPROUT = Path(__file__).parent.parent / "src" / "palaver" / "models" / "sprout"
ENTRIES = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT = 8192
# Line breaks never mix with other space, so a prompt and the reply after it have the tokens of their joint text.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"


def learned(seed: int, conversations: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES - len(ADDED),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, conversations), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def _texts(seed: int, conversations: int) -> Iterator[str]:
    tags = re.compile("|".join(re.escape(tag) for tag in SPECIAL + ADDED))
    for sample in islice(samples(seed, -1, Split.TRAIN, ()), conversations):
        yield from (text for text in tags.split("".join(render(sample))) if text)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Every entry of letters, without the space that may stand before it: what words are spelt from."""
    found = {entry.removeprefix("Ġ") for entry in tokenizer.get_vocab()}
    return tuple(sorted(piece for piece in found if re.fullmatch("[A-Za-z]?[a-z]{1,10}", piece) and len(piece) > 1))


def made(folder: Path, seed: int, conversations: int = 60_000) -> Tokenizer:
    """The tokenizer in the folder, learned and saved there first if it is missing."""
    if not (folder / "tokenizer.json").exists():
        save(learned(seed, conversations), folder)
    return load(folder)
