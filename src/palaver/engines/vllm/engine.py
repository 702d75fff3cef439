"""Loads a model into vLLM (`AsyncLLM`) and streams its tokens. Runs in the user's Python environment."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import palaver
from palaver.engines.base import (
    BY_BATCH,
    EXACTNESS_LABELS,
    NATIVE_SAMPLER,
    VLLM_RUNNER,
    Capability,
    EngineInfo,
    Fingerprint,
)
from palaver.engines.core.checkpoint import Checkpoint, has_processor, open_checkpoint
from palaver.engines.core.decoder_config import generation_settings
from palaver.engines.core.logits_processor import with_grammars
from palaver.engines.core.media import with_media
from palaver.engines.core.token_stream import SourceDied, TokenRequest, TokenStreamEngine
from palaver.engines.host.frames import EngineSpec
from palaver.engines.vllm.adapter import lora_arguments
from palaver.engines.vllm.media import engine_input, open_media
from palaver.engines.vllm.sampling_params import (
    check_native,
    common_parameters,
    native_lacks,
    native_parameters,
    needs_own_sampling,
)
from palaver.engines.vllm.startup_log import StartupLog
from palaver.engines.vllm.workers import SamplingWorkers
from palaver.errors import BadParameter, BrokenModel, EngineError
from palaver.generation import Alternative, Prefilled, Prompt, Step
from palaver.phases import Vocabulary
from palaver.processes import HOST_VARIABLE
from palaver.sampling import Sampling

GIB = 1 << 30
DEFAULT_CPU_CACHE_GIB = 2
WHOLE_BLOCKS = "whole blocks of {size} tokens"
PROCESSOR = "palaver.engines.vllm.logits_processor:PalaverLogitsProcessor"
MEDIA_ARGUMENTS: dict[str, Any] = {
    "limit_mm_per_prompt": {"video": 0},  # a video comes as its frames
    "mm_processor_cache_gb": 0,  # `MediaCache` has the items
    "mm_device_do_normalize": False,  # would ignore numbers that only the class of the processor has, not its files
}
_WORKER_ERROR = re.compile(r"Worker failed with error ['\"](.+?)['\"], please check", re.DOTALL)


def load(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    device: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    cache_bytes: int | None = None,
    max_running: int | None = None,
    compiled: bool | None = None,
    adapter: Path | None = None,
    native_sampling: bool = False,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TokenStreamEngine:
    """Loads a model's folder. Blocks while vLLM starts its processes. Raises a ModelError where that fails.

    `native_sampling`: vLLM's own sampler chooses the tokens, which is faster and can do less.
    """
    checkpoint = open_checkpoint(model)
    has_media = has_processor(checkpoint.folder)
    lora = {} if adapter is None else lora_arguments(adapter, checkpoint)
    folder = Path(palaver.__file__).parent.parent  # of this process alone: see host/process.py
    spec = EngineSpec("vllm", checkpoint.folder, tuple(vocabulary))
    workers = None if native_sampling else SamplingWorkers(folder / "sampling", spec)
    _set_environment(cache_bytes, None if native_sampling else folder / "sampling")
    _complete_metadata(folder)

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = current_platform.is_cpu()
    if device is not None and device.split(":")[0] not in ("cpu" if on_cpu else "gpu", current_platform.device_type):
        raise BadParameter("--device", device, f"this build of vLLM computes on {current_platform.device_type}")
    arguments: dict[str, Any] = {
        "model": str(checkpoint.folder),
        "skip_tokenizer_init": not has_media,  # vLLM's processors of media need it
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enforce_eager": compiled is False,
        "dtype": dtype or "auto",
        "logits_processors": None if native_sampling else [PROCESSOR],
        "max_model_len": context,
        "max_num_seqs": max_running,
        "kv_cache_memory_bytes": None if on_cpu else cache_bytes,
        "block_size": 32 if on_cpu else None,
        **lora,
    }
    if has_media:
        known = AsyncEngineArgs.__dataclass_fields__
        arguments |= {name: value for name, value in MEDIA_ARGUMENTS.items() if name in known}
    engine_arguments = AsyncEngineArgs(**{name: value for name, value in arguments.items() if value is not None})
    log = StartupLog()
    try:
        with log.recording():
            llm = AsyncLLM.from_engine_args(engine_arguments)
    except Exception as error:
        raise BrokenModel(f"vLLM can't load this model: {log.root_cause() or _reason(error)}") from error
    info = describe(checkpoint, llm.vllm_config, native_sampling)
    media = open_media(llm.renderer) if has_media else None
    if isinstance(media, str):
        info, media = replace(info, lacks={**info.lacks, Capability.MEDIA: media}), None
    elif media is not None:
        info = with_media(info, media)
    lora_request = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
    source = VllmSource(llm, info, workers, SamplingParams, lora_request)
    return TokenStreamEngine(info, vocabulary, source, on_failure, media)


def _reason(error: Exception) -> str:
    """The first line of an error; of an error of validation, what the first check says."""
    checks = getattr(error, "errors", None)
    text = str(checks()[0]["msg"]) if callable(checks) else str(error).strip()
    return (text.removeprefix("Value error, ").splitlines() or [type(error).__name__])[0]


def _call_error(error: Exception) -> str:
    """What a worker raised: vLLM wraps it into sentences of its own."""
    found = _WORKER_ERROR.search(str(error))
    return (found[1] if found else _reason(error)).rstrip(" .") + "."


def _set_environment(cache_bytes: int | None, sampling_socket: Path | None) -> None:
    """What vLLM and its processes read from the environment. The user's own settings take precedence."""
    gib = DEFAULT_CPU_CACHE_GIB if cache_bytes is None else max(1, cache_bytes // GIB)
    defaults = {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    defaults["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # `StartupLog` reads it
    os.environ[HOST_VARIABLE] = str(os.getpid())
    if sampling_socket is not None:
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # it has no logits processors of this interface
        os.environ["PALAVER_SAMPLING_SOCKET"] = str(sampling_socket)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _complete_metadata(folder: Path) -> None:
    """vLLM asks for the version of the package `vllm`, which its build for CPUs, `vllm-cpu`, doesn't install."""
    try:
        version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu")
        metadata = folder / f"vllm-{found}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")


def describe(checkpoint: Checkpoint, config: Any, native: bool) -> EngineInfo:
    """What vLLM's configuration and the files say of the model."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    from palaver.engines.torch.device_sampler import sampler_version  # the workers sample by it

    defaults, end_ids = generation_settings(checkpoint.folder, checkpoint.config)
    device, dtype = current_platform.device_type, str(config.model_config.dtype).removeprefix("torch.")
    sampler = NATIVE_SAMPLER if native else f"sampler-{sampler_version(torch.device(device))}"
    build = f"vllm-{vllm.__version__}"
    fingerprint = Fingerprint(VLLM_RUNNER, build, device, dtype, EXACTNESS_LABELS[BY_BATCH], sampler)
    info = EngineInfo(
        model=checkpoint.name,
        context_length=config.model_config.max_model_len,
        vocabulary_size=config.model_config.get_vocab_size(),
        end_ids=end_ids,
        defaults=defaults,
        device=device,
        dtype=dtype,
        reuse=WHOLE_BLOCKS.format(size=config.cache_config.block_size),
        steps=f"vLLM {vllm.__version__}, {'its own sampler' if native else 'with the sampler of Palaver'}",
        exactness=BY_BATCH,
        fingerprint=str(fingerprint),
    )
    return replace(info, lacks=native_lacks(config.use_v2_model_runner)) if native else with_grammars(info)


class VllmSource:
    """vLLM in this process and its children. Without `workers` vLLM's own sampler chooses the tokens."""

    def __init__(
        self,
        llm: Any,
        info: EngineInfo,
        workers: SamplingWorkers | None,
        make_parameters: Callable[..., Any],
        lora_request: Any | None = None,
    ) -> None:
        self._llm = llm
        self._info = info
        self._workers = workers
        self._make_parameters = make_parameters
        self._lora_request = lora_request
        self.forces_tokens = workers is not None

    async def open(self) -> None:
        """Loads the adapter. With the first request instead, one that vLLM refuses would end its process."""
        if self._lora_request is None:
            return
        try:
            await self._llm.add_lora(self._lora_request)
        except Exception as error:
            raise BrokenModel(f"vLLM can't load the adapter: {_call_error(error)}") from error

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        if self._workers is None:
            check_native(prompt, sampling)

    async def prepare(self, request: TokenRequest) -> None:
        if self._workers is not None and needs_own_sampling(request.prompt, request.sampling):
            parallel = self._llm.vllm_config.parallel_config
            await self._workers.start(parallel.world_size * parallel.data_parallel_size, self._info)
            await self._workers.register(request)

    async def stream(self, request: TokenRequest) -> AsyncGenerator[Prefilled | Step]:
        workers = self._workers if needs_own_sampling(request.prompt, request.sampling) else None
        try:
            async with aclosing(self._outputs(request, workers is not None)) as outputs:
                first = True
                async for output in outputs:
                    if first:
                        yield Prefilled(len(request.prompt), output.num_cached_tokens or 0)
                        first = False
                    for step in _steps(output.outputs[0], request.sampling):
                        if workers is not None:
                            step = await self._confirm(workers, request, step)
                        yield step
        except Exception as error:
            self._translate(error)
        finally:
            if workers is not None:
                workers.release(request)

    async def _confirm(self, workers: SamplingWorkers, request: TokenRequest, step: Step) -> Step:
        """The step with its alternatives. Raises the error for which the sentinel stands, if it is one."""
        if not request.sampling.logprobs and step.token_id != _sentinel(request):
            return step
        reported = await workers.reported_step(request, step.token_id, step.logprob)
        return reported if request.sampling.logprobs else step

    def _outputs(self, request: TokenRequest, processed: bool) -> AsyncGenerator[Any]:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters: dict[str, Any]
        if processed:
            extra = {"palaver_request": request.number, "palaver_sentinel": _sentinel(request)}
            parameters = {"temperature": 0, "extra_args": extra, **common_parameters(request)}
        else:
            parameters = native_parameters(request)
        prompt: Any = TokensPrompt(prompt_token_ids=request.token_ids, cache_salt=request.salt)
        if request.prompt.media:
            prompt = engine_input(request)
        made = self._make_parameters(**parameters, output_kind=RequestOutputKind.DELTA, skip_clone=True)
        number, lora = str(request.number), self._lora_request
        outputs: AsyncGenerator[Any] = self._llm.generate(prompt, made, number, lora_request=lora)
        return outputs

    def _translate(self, error: Exception) -> None:
        """Raises what the error means to the engine."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError) or isinstance(error.__cause__, EngineDeadError) or self._llm.errored:
            raise SourceDied("vLLM's engine process has ended.") from error
        if isinstance(error, EngineGenerateError):
            raise EngineError(f"vLLM failed: {error.__cause__ or error}") from error
        if isinstance(error, ValueError):
            raise EngineError(f"vLLM refuses the request: {_reason(error)}") from error
        raise error

    async def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown, 1.0)
        if self._workers is not None:
            self._workers.close()


def _sentinel(request: TokenRequest) -> int:
    """A token that ends the request in vLLM, where there is one."""
    return min(request.stop_ids, default=0)


def _steps(output: Any, sampling: Sampling) -> list[Step]:
    """The tokens that came at once. Before and after the filters a greedy token has the same alternatives."""
    steps = []
    for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        own = logprobs[token_id].logprob
        best = sorted(logprobs.items(), key=lambda one: (one[1].rank, one[0]))[: sampling.logprobs]
        alternatives = tuple(Alternative(one, entry.logprob) for one, entry in best)
        if alternatives and sampling.temperature == 0:
            steps.append(Step(token_id, own, alternatives, own, alternatives))
        else:
            steps.append(Step(token_id, own if own is not None else math.nan, alternatives))
    return steps
