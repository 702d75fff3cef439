"""What the model's own files say about how to run it: its context, what ends a turn, how it likes to be sampled."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from palaver.errors import BadParameter
from palaver.sampling import NUMBERS, Sampling

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
UNBOUNDED = 1_000_000


def sampling_defaults(config: GenerationConfig | None) -> Sampling:
    """The model's own; a value that makes no sense is as good as none."""
    if config is None:
        return Sampling()
    settings = {name: value for name in NAMES if (value := _valid(name, getattr(config, name, None))) is not None}
    do_sample = getattr(config, "do_sample", None)
    if do_sample is False or (do_sample is None and "temperature" not in settings):
        settings["temperature"] = 0.0
    return Sampling(**settings)


def _valid(name: str, value: Any) -> Any:
    try:
        return NUMBERS[name].check(value)
    except BadParameter:
        return None


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """All that the model's files name as an end, be it one id or several."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def context_length(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return UNBOUNDED
