"""The torch engine: loads a model and hands out generations."""

from __future__ import annotations

import asyncio
from pathlib import Path

from transformers import PreTrainedModel

from palaver.engines.base import EngineInfo
from palaver.engines.reply import Reply
from palaver.engines.torch.banned import BannedText, Spelling
from palaver.engines.torch.checkpoint import open_checkpoint
from palaver.engines.torch.chooser import Chooser
from palaver.engines.torch.defaults import context_length, end_ids, sampling_defaults
from palaver.engines.torch.generation import Close, Generation, Outbox
from palaver.engines.torch.loading import load_model, pick_device, pick_dtype
from palaver.engines.torch.runner import PlainRunner
from palaver.engines.torch.scheduler import Scheduler
from palaver.engines.torch.sequence import Sequence
from palaver.engines.torch.worker import Worker
from palaver.errors import BadParameter, ContextOverflow
from palaver.generation import Prompt
from palaver.phases import Phases, Vocabulary
from palaver.sampling import Sampling, checked


def load(
    model: str | Path, *, vocabulary: Vocabulary, device: str | None = None, dtype: str | None = None
) -> TorchEngine:
    """Loads a model from a folder or a hub id and starts its thread. Raises a ModelError where it can't.

    `vocabulary` holds the bytes of each token id: stop strings, banned strings and text markers are bytes.
    """
    checkpoint = open_checkpoint(model)
    place = pick_device(device)
    loaded = load_model(checkpoint, place, pick_dtype(dtype, place))
    return TorchEngine(checkpoint.name, loaded, vocabulary)


class TorchEngine:
    """Token ids in, token ids out, from one model on one device."""

    def __init__(self, name: str, model: PreTrainedModel, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._spelling: Spelling | None = None
        self._info = _info(name, model)
        outbox = Outbox()
        self._worker = Worker(Scheduler(PlainRunner(model), outbox, self._sequence), outbox)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> Generation:
        return Generation(prompt, checked(sampling), choice, self._worker.post)

    async def close(self) -> None:
        self._worker.post(Close())
        await asyncio.to_thread(self._worker.join)

    def _sequence(self, generation: Generation) -> Sequence:
        prompt, sampling = generation.prompt, generation.sampling
        self._check(prompt)
        reply = Reply(prompt, sampling, self._vocabulary, self._info.end_ids, self._info.context_length)
        banned = self._banned(prompt.phases, sampling)
        chooser = Chooser(prompt, sampling, generation.choice, reply, banned, self._info.vocabulary_size)
        return Sequence(generation, chooser)

    def _check(self, prompt: Prompt) -> None:
        size = self._info.vocabulary_size
        if len(prompt) == 0:
            raise BadParameter("prompt", (), "must hold at least one token")
        if len(prompt) > self._info.context_length:
            raise ContextOverflow(len(prompt), self._info.context_length)
        for ids in (prompt.context_ids, prompt.reply_ids):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise BadParameter("prompt", wrong, f"token ids here go from 0 to {size - 1}")

    def _banned(self, phases: Phases, sampling: Sampling) -> BannedText | None:
        if not sampling.banned_strings:
            return None
        if self._spelling is None:
            self._spelling = Spelling(self._vocabulary)
        return BannedText(sampling.banned_strings, self._spelling, _control(phases) | self._info.end_ids)


def _control(phases: Phases) -> frozenset[int]:
    markers = {t.marker for state in phases.states for t in state.triggers if isinstance(t.marker, int)}
    return phases.ends | phases.hidden | markers


def _info(name: str, model: PreTrainedModel) -> EngineInfo:
    return EngineInfo(
        model=name,
        context_length=context_length(model),
        vocabulary_size=int(model.get_output_embeddings().weight.shape[0]),
        end_ids=end_ids(model),
        defaults=sampling_defaults(model.generation_config),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )
