"""Many replies at once from a model as transformers loads it: greedy, or sampled with its defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from training import tokenizer as tokenizers


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: at temperature 0 the likeliest; all that are drawn in one batch share one sampling."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Writer:
    model: Any
    tokenizer: Tokenizer
    device: torch.device

    def replies(self, prompts: list[str], limits: list[int], samplings: list[Sampling], batch: int) -> list[str]:
        """A reply for each prompt, with its end token where it came within the limit."""
        ids = [e.ids for e in self.tokenizer.encode_batch_fast(prompts, add_special_tokens=False)]
        order = sorted(range(len(ids)), key=lambda at: (limits[at], len(ids[at])))
        found = [""] * len(ids)
        for chosen in _groups(order, ids, batch):
            group = [samplings[at] for at in chosen]
            texts = self._batch([ids[at] for at in chosen], max(limits[at] for at in chosen), group)
            for at, text in zip(chosen, texts, strict=True):
                found[at] = text
        return found

    @torch.inference_mode()
    def _batch(self, ids: list[list[int]], limit: int, samplings: list[Sampling]) -> list[str]:
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=self.device)
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=self.device)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        cache, rows = DynamicCache(), torch.arange(len(ids), device=self.device)
        written: list[list[int]] = [[] for _ in ids]
        drawn = torch.tensor([sampling.temperature > 0 for sampling in samplings], device=self.device)
        sampling = next((sampling for sampling in samplings if sampling.temperature > 0), Sampling())
        for _ in range(limit):
            logits = self.model(
                input_ids=tokens, attention_mask=seen, position_ids=places, past_key_values=cache, logits_to_keep=1
            ).logits[:, -1]
            chosen = logits.argmax(-1)
            if sampling.temperature > 0:
                chosen = torch.where(drawn[rows], _sampled(logits.float(), sampling), chosen)
            for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                written[row].append(token)
            going = chosen != 2
            if not going.any():
                break
            tokens, places = chosen[:, None], places[:, -1:] + 1
            seen = torch.cat([seen, torch.ones_like(tokens)], 1)
            if going.sum() <= 0.85 * len(going):
                kept = going.nonzero()[:, 0]
                cache.batch_select_indices(kept)
                tokens, places, seen, rows = tokens[kept], places[kept], seen[kept], rows[kept]
        return [self._text(row) for row in written]

    def _text(self, written: list[int]) -> str:
        ended = written[: written.index(2) + 1] if 2 in written else written
        return self.tokenizer.decode(ended, skip_special_tokens=False)


def _groups(order: list[int], ids: list[list[int]], batch: int) -> Iterator[list[int]]:
    """Batches of at most `batch` prompts, fewer where prompts are long."""
    group: list[int] = []
    for at in order:
        width = max([len(ids[at])] + [len(ids[other]) for other in group])
        if group and (len(group) >= batch or width * (len(group) + 1) > batch * 512):
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def _sampled(logits: Tensor, sampling: Sampling) -> Tensor:
    values, indices = (logits / sampling.temperature).topk(sampling.top_k or logits.shape[-1])
    shares = values.softmax(-1)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, 0.0)
    return indices.gather(1, torch.multinomial(shares, 1))[:, 0]


def defaults(folder: Path) -> Sampling:
    """The sampling that the model's own generation_config names."""
    named = json.loads((folder / "generation_config.json").read_text())
    return Sampling(named["temperature"], named["top_k"], named["top_p"])


def writer(folder: Path, device: torch.device) -> Writer:
    """The model in the folder, its weights as shipped, computed in 32 bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    words = folder if (folder / "tokenizer.json").exists() else tokenizers.SPROUT
    return Writer(model, tokenizers.load(words), device)
