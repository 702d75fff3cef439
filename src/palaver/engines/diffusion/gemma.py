"""DiffusionGemma: block diffusion with the library's own sampler.

A canvas starts as random tokens. Each step predicts all of them, accepts those that are nearly independent of each
other (by their entropies), and makes the others random again; it ends when the prediction is stable. The library
computes every step; this module runs its steps one by one, so that requests share the engine, stop and go on.

The library draws from torch's generator. It is seeded before each step by seed, choice, position and step, so that a
canvas is the same when it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.generation import LocalGeneration, Outbox
from palaver.engines.core.rng import uniform
from palaver.engines.core.runner import as_engine_error
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.diffusion.block import STREAM, Block, BlockRules, make_step
from palaver.engines.diffusion.config import DiffusionConfig, Visibility
from palaver.engines.diffusion.scheduler import DenoisingSequence, DiffusionScheduler
from palaver.engines.torch.loader import quiet
from palaver.errors import BrokenModel

LEAST_TEMPERATURE = 1e-3
"""Temperature 0: the steps stay those of the library, with distributions that leave one token."""
SEED_RANGE = 2**53


def load_gemma(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model in evaluation mode. Raises BrokenModel where it can't be loaded."""
    from transformers import DiffusionGemmaForBlockDiffusion

    try:
        with quiet():
            model, report = DiffusionGemmaForBlockDiffusion.from_pretrained(
                checkpoint.folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except Exception as error:
        raise BrokenModel(f"The model {checkpoint.name!r} couldn't be loaded: {error}") from error
    if report.get("missing_keys"):
        raise BrokenModel(f"The weights of {checkpoint.name!r} lack tensors, such as {min(report['missing_keys'])}.")
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def gemma_config(model: Any) -> DiffusionConfig:
    """What the model says of itself."""
    settings, _ = model._prepare_generation_config(None)
    return DiffusionConfig(
        mask_id=None,
        attention=Visibility.BLOCK_CAUSAL,
        shift=False,
        block_length=int(model.config.canvas_length),
        steps=int(settings.max_denoising_steps),
        temperature=1.0,
    )


@contextmanager
def seeded(rules: BlockRules, position: int, step: int) -> Iterator[None]:
    """Seeds torch's generators for one step of the canvas at this position of the reply."""
    number = uniform(rules.sampling.seed, rules.choice, position, STREAM + step)
    with torch.random.fork_rng():
        torch.manual_seed(int(number * SEED_RANGE))
        yield


class CanvasBlock(Block):
    """A canvas and the state of the library's sampler. Given tokens are put back after every step."""

    def __init__(self, start: int, length: int, given: Sequence[int | None], rules: BlockRules, model: Any) -> None:
        super().__init__(start, length, given, rules)
        self._model = model
        settings, _ = model._prepare_generation_config(None, max_denoising_steps=rules.steps)
        self._max_steps = rules.steps
        self._sampler = model._prepare_sampler(settings)
        self._processors = model._prepare_logits_processor(settings, LogitsProcessorList([_Bias(rules)]))
        self._stopping = model._prepare_diffusion_stopping_criteria(settings)
        self._given = torch.tensor([self.fixed], dtype=torch.long, device=model.device)
        self._self_conditioning: Tensor | None = None
        self._finished = torch.zeros(1, dtype=torch.bool, device=model.device)
        self._accepted: list[bool] = [False] * length
        with seeded(rules, start, 0):
            self._canvas = self._with_given(self._sampler.initialize_canvas(1, model.device))
        self._argmax = self._canvas

    @property
    def done(self) -> bool:
        return self.step >= self._max_steps or bool(self._finished.all())

    def _with_given(self, canvas: Tensor) -> Tensor:
        if self.fixed:
            canvas = canvas.clone()
            canvas[:, : len(self.fixed)] = self._given
        return canvas

    def advance(self, cache: Any, context_length: int) -> None:
        """One step of the library. At the last one the tokens of the block are there."""
        model, length = self._model, self._canvas.shape[1]
        seen = torch.ones(1, context_length + length, dtype=torch.bool, device=model.device)
        masks = model.model.decoder.create_diffusion_decoder_attention_mask(
            config=model.config,
            inputs_embeds=self._canvas.unsqueeze(-1),
            past_key_values=cache,
            decoder_attention_mask=seen,
        )
        positions = torch.arange(context_length, context_length + length, dtype=torch.int32, device=model.device)
        with seeded(self._rules, self.start, self.step + 1):
            canvas, argmax, self._self_conditioning, self._finished = model._denoising_step(
                decoder_forward=model.forward,
                current_canvas=self._canvas,
                argmax_canvas=self._argmax,
                input_ids=self._canvas,
                decoder_position_ids=positions[None],
                self_conditioning_logits=self._self_conditioning,
                mask_mapping=masks,
                past_key_values=cache,
                finished_denoising=self._finished,
                cur_step=self._max_steps - self.step,
                sampler=self._sampler,
                logits_processor=self._processors,
                diffusion_stopping_criteria=self._stopping,
            )
        self._canvas, self._argmax = self._with_given(canvas), self._with_given(argmax)
        self._accepted = self._sampler.accepted_token_mask[0].tolist()
        self.step += 1
        self._update(self._argmax[0].tolist())

    def _update(self, ids: list[int]) -> None:
        assert self._self_conditioning is not None
        logprobs = self._self_conditioning[0].float().log_softmax(-1)
        picked = logprobs.gather(1, self._argmax[0][:, None])[:, 0].tolist()
        self._confidence = [min(1.0, math.exp(value)) for value in picked]
        self.tokens = [id if self._accepted[at] or at < len(self.fixed) else None for at, id in enumerate(ids)]
        if self.done:
            self.tokens = list(ids)
            count = self._rules.sampling.logprobs
            for at in range(len(self.fixed), len(ids)):
                self.results[at] = make_step(ids[at], logprobs[at], picked[at], count)


class _Bias:
    """The request's biases and bans, and its temperature, which multiplies that of the library's schedule."""

    def __init__(self, rules: BlockRules) -> None:
        self._bias = rules.bias
        self._temperature = max(rules.sampling.temperature, LEAST_TEMPERATURE)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return (scores + self._bias) / self._temperature


class GemmaScheduler(DiffusionScheduler):
    """Runs the library's encoder over contexts and its denoising steps over canvases, requests in turn step by step."""

    def __init__(
        self,
        model: Any,
        config: DiffusionConfig,
        outbox: Outbox,
        prepare: Callable[[LocalGeneration], DenoisingSequence],
        limits: SchedulerLimits,
    ) -> None:
        super().__init__(None, config, outbox, prepare, 0, limits, batched=False)
        self._gemma = model
        self._caches: dict[LocalGeneration, Any] = {}
        """The keys and values of the encoder."""

    def _start_reading(self, sequence: DenoisingSequence) -> None:
        prompt = sequence.generation.prompt
        settings, _ = self._gemma._prepare_generation_config(None)
        self._caches = {one: cache for one, cache in self._caches.items() if one in self._running}
        self._caches[sequence.generation] = self._gemma._prepare_cache_for_generation(settings, 1, 0)
        sequence.start_reading(sequence.context)
        blocks = len(prompt.reply_ids) // sequence.layout.block_length
        while len(sequence.unread) > blocks:
            sequence.unread.popleft()
        sequence.unread.appendleft(prompt.context_ids)  # the library reads a prompt at once

    def _read_contexts(self, sequences: Sequence[DenoisingSequence]) -> None:
        for sequence in sequences:
            try:
                self._encode(sequence, sequence.unread[0])
                sequence.unread.popleft()
                if not sequence.unread:
                    self._put_prefilled(sequence)
            except Exception as error:
                self._finish(sequence, as_engine_error(error))

    def _encode(self, sequence: DenoisingSequence, tokens: Sequence[int]) -> None:
        model, cache = self._gemma, self._caches[sequence.generation]
        start, end = sequence.context.length, sequence.context.length + len(tokens)
        positions = torch.arange(start, end, dtype=torch.int32, device=model.device)[None]
        ids, masks = model._prepare_encoder_inputs(
            input_ids=torch.tensor([list(tokens)], device=model.device),
            attention_mask=torch.ones(1, end, dtype=torch.bool, device=model.device),
            encoder_position_ids=positions,
            past_key_values=cache,
            is_prefill=True,
            canvas_length=len(tokens),
            batch_size=1,
        )
        model.model.encoder(input_ids=ids, attention_mask=masks, past_key_values=cache, position_ids=positions)
        sequence.context.length = end

    def _denoise_blocks(self, sequences: Sequence[DenoisingSequence]) -> None:
        for sequence in sequences:
            try:
                assert isinstance(sequence.block, CanvasBlock)
                sequence.block.advance(self._caches[sequence.generation], sequence.context.length)
                self._outbox.put(sequence.generation, sequence.block.draft())
            except Exception as error:
                self._finish(sequence, as_engine_error(error))
