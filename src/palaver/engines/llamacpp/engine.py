"""The llama.cpp engine: opens a GGUF file, sizes its cache, probes it and starts its worker thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from palaver.engines.base import (
    BY_BATCH,
    BY_CACHE,
    BY_TEXT,
    EXACT_CACHE,
    EXACTNESS_LABELS,
    LLAMACPP_RUNNER,
    EngineInfo,
    Fingerprint,
)
from palaver.engines.core import gguf_metadata
from palaver.engines.core.draft_model import RunnerDraftModel
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.generation import CancelCommand, Command
from palaver.engines.core.media import ProcessedMedia
from palaver.engines.core.options import EngineOptions, Fit, check_drafts, divide_cache, host_cache_bytes
from palaver.engines.core.runner import SMALL_MODEL, ThreadCounts
from palaver.engines.core.sampler import SAMPLER_VERSION
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.core.speculation import MAX_ROWS
from palaver.engines.llamacpp import metadata
from palaver.engines.llamacpp.context import (
    LONE_BATCH,
    MAX_BATCH,
    ROW_GROUP,
    Context,
    ContextSettings,
    LoadedModel,
)
from palaver.engines.llamacpp.exact import ROWS, LlamaExactPasses, probe_exactness
from palaver.engines.llamacpp.library import LlamaLibrary, load_library
from palaver.engines.llamacpp.media import LlamaMedia, Projector, read_projector
from palaver.engines.llamacpp.passes import (
    MAX_REPLAYED,
    GroupedPasses,
    LonePasses,
    Passes,
    SharedPasses,
    SteadyPasses,
    probe_company,
    probe_groups,
)
from palaver.engines.llamacpp.runner import LlamaRunner
from palaver.engines.llamacpp.state_files import StateFiles, file_identity
from palaver.errors import BadParameter, PalaverError
from palaver.generation import MediaItem
from palaver.gguf import GGUFHeader, read_gguf
from palaver.memory import available_bytes
from palaver.phases import Vocabulary

DEFAULT_RUNNING = 8
"""Sequences that run at once. Each has its part of the cache."""
SLOT_SHARE = 0.75
"""The part of the cache for running sequences; the rest is for saved states."""
_ISA = ("AVX", "AVX2", "AVX512", "NEON")
_FLASH_LABELS = {None: "auto", False: "off", True: "on"}
_GPU = 1
"""ggml's number for devices with memory of their own."""


def fit(*headers: GGUFHeader) -> Fit:
    """Of files that are loaded together."""
    return Fit.of(sum(header.weights_bytes for header in headers), available_bytes(), "cpu")


def load(
    file: Path,
    *,
    vocabulary: Vocabulary,
    options: EngineOptions | None = None,
    device: str | None = None,
    adapter: Path | None = None,
    mmproj: Path | None = None,
    report: Callable[[float], None] | None = None,
    weights: LoadedModel | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> LlamaEngine:
    """Loads a GGUF file and starts its thread. Raises a ModelError where that fails.

    llama.cpp ends the process where its assumptions fail, so call this in a process of its own. `adapter` is a LoRA
    adapter in a GGUF file; `mmproj` the file of the projector of a model that sees or hears; `report` is called with
    the part of the weights that is loaded. `weights`: the result of `start_loading` for this file.
    """
    options = options or EngineOptions()
    library = load_library()
    header = read_gguf(file)
    gpu_layers = _gpu_layers(device, options, library)
    on_cpu = gpu_layers == 0 or _gpu_name(library) is None
    draft_header = _read_draft_model(options)
    if on_cpu:  # the memory of a GPU is llama.cpp's concern
        others = (None if mmproj is None else read_projector(mmproj), draft_header)
        fit(header, *(one for one in others if one is not None)).check(header.name)
    model = LoadedModel(header.files, gpu_layers, report, library) if weights is None else weights
    draft_weights = None if draft_header is None else LoadedModel(draft_header.files, gpu_layers, library=library)
    draft_options = options
    if draft_header is not None:
        sizes = [metadata.token_bytes(one, float32=False) for one in (header, draft_header)]
        own, draft_bytes = divide_cache(host_cache_bytes(options), *sizes)
        options, draft_options = (replace(options, cache_bytes=size) for size in (own, draft_bytes))
    plan = CachePlan.make(header, options)
    settings = plan.settings(header, options, on_cpu, mmproj is not None)
    context = Context(model, settings, adapter)
    truncates = probe_truncation(context)
    passes, exactness = _choose_passes(context, header, options.exact, on_cpu, truncates)
    if settings.draft_rows:
        exactness = BY_BATCH
    info = EngineInfo(
        model=header.name,
        context_length=plan.context_length,
        vocabulary_size=model.vocabulary_size,
        end_ids=gguf_metadata.end_ids(header),
        defaults=gguf_metadata.sampling_defaults(header),
        device="cpu" if gpu_layers == 0 else _gpu_name(library) or "cpu",
        dtype=gguf_metadata.weights_type(header),
        reuse="to the token" if truncates else "snapshots",
        steps=f"{LLAMACPP_RUNNER} b{library.build}, flash attention {_FLASH_LABELS[settings.flash_attention]}",
        exactness=exactness,
    )
    info = replace(info, fingerprint=str(_fingerprint(info, library, settings)))
    projector = None
    if mmproj is not None:
        threads = ThreadCounts.choose(options.threads, small_model=False).large_pass
        projector = Projector(mmproj, model, header, threads, not on_cpu, options.exact)
    used = [*header.files, *(file for file in (adapter, mmproj) if file is not None)]
    files = None if options.states is None else _state_files(options.states, info, settings, used)
    runner = LlamaRunner(
        context, passes, plan.limit_bytes, plan.host_bytes, plan.token_bytes, truncates, files, projector, not on_cpu
    )
    check_drafts(options, runner, LLAMACPP_RUNNER)
    loaded = [LoadedContext(model, context)]
    if draft_header is not None and draft_weights is not None:
        drafter, drafts_with = _open_drafter(draft_header, draft_options, draft_weights, on_cpu)
        loaded.append(drafts_with)
        length = gguf_metadata.context_length(draft_header)
        runner.draft_model = RunnerDraftModel(drafter, length, drafts_with.model.vocabulary_size, info.vocabulary_size)
    return LlamaEngine(info, vocabulary, runner, _limits(header, plan, options), loaded, projector, on_failure)


def _read_draft_model(options: EngineOptions) -> GGUFHeader | None:
    path = options.draft_model
    if path is None:
        return None
    if not path.is_file():
        raise BadParameter("--draft-model", str(path), "a GGUF file takes another GGUF file as draft model")
    if not options.drafts or options.exact:
        why = "llama.cpp verifies drafts up to rounding: this needs --drafts, without --exact"
        raise BadParameter("--draft-model", str(path), why)
    return read_gguf(path)


def _open_drafter(
    header: GGUFHeader, options: EngineOptions, model: LoadedModel, on_cpu: bool
) -> tuple[LlamaRunner, LoadedContext]:
    """The runner of a draft model."""
    plan = CachePlan.make(header, options)
    context = Context(model, plan.settings(header, replace(options, drafts=False), on_cpu))
    if not probe_truncation(context):
        raise BadParameter("--draft-model", str(options.draft_model), "its state can't be cut back to earlier tokens")
    passes, _ = _choose_passes(context, header, False, on_cpu, True)
    runner = LlamaRunner(context, passes, plan.limit_bytes, plan.host_bytes, plan.token_bytes, uses_device=not on_cpu)
    return runner, LoadedContext(model, context)


def start_loading(file: Path) -> Future[LoadedModel | None]:
    """Loads the weights ahead of `load`, in a thread. None where options decide how, and for a file that `load` will
    refuse."""
    weights: Future[LoadedModel | None] = Future()

    def load_ahead() -> None:
        try:
            weights.set_result(_load_weights(file))
        except BaseException as error:
            weights.set_exception(error)

    threading.Thread(target=load_ahead, daemon=True).start()
    return weights


def _load_weights(file: Path) -> LoadedModel | None:
    try:
        library = load_library()
        if _gpu_name(library) is not None:
            return None
        header = read_gguf(file)
        fit(header).check(header.name)
        return LoadedModel(header.files, 0, library=library)
    except PalaverError:
        return None


class LoadedContext(NamedTuple):
    """Memory of llama.cpp."""

    model: LoadedModel
    context: Context

    def close(self) -> None:
        self.context.close()
        self.model.close()


class LlamaEngine(LocalEngine):
    """A local engine that frees llama.cpp's memory when it is closed."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        runner: LlamaRunner,
        limits: SchedulerLimits,
        loaded: Sequence[LoadedContext],
        projector: Projector | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`loaded`: the model, and its draft model if there is one."""
        media = None if projector is None else projector.cache
        super().__init__(
            info, vocabulary, runner, limits, on_failure=on_failure, on_idle=runner.use_idle_time, media=media
        )
        self._projector = projector
        self._close_runner = runner.close
        self._loaded = loaded
        self._interrupt = runner.interrupt

    def _post(self, command: Command) -> None:
        """A cancelled generation doesn't wait for the end of a long pass."""
        super()._post(command)
        if isinstance(command, CancelCommand):
            self._interrupt(command.generation)

    def _load_media(self, item: MediaItem) -> ProcessedMedia:
        """Encodes the item, too: other requests are computed meanwhile."""
        processed = super()._load_media(item)
        assert self._projector is not None
        assert isinstance(processed, LlamaMedia)
        self._projector.encode(processed)
        return processed

    async def close(self) -> None:
        for one in self._loaded:
            one.context.abort()
        await super().close()
        await asyncio.to_thread(self._close_runner)
        if self._projector is not None:
            await asyncio.to_thread(self._projector.close)
        for one in self._loaded:
            await asyncio.to_thread(one.close)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How the memory of the cache is divided."""

    limit_bytes: int
    token_bytes: int
    slots: int
    slot_tokens: int
    """Tokens that one sequence has room for."""
    unified: bool
    """Whether the slots share their cells, because they don't fit the memory one beside the other."""
    context_length: int

    @classmethod
    def make(cls, header: GGUFHeader, options: EngineOptions) -> CachePlan:
        limit = host_cache_bytes(options)
        size = metadata.token_bytes(header, float32=options.exact)
        context = min(gguf_metadata.context_length(header), options.context or gguf_metadata.context_length(header))
        tokens = context + (ROWS if options.exact else 0)
        slots, room = options.max_running or DEFAULT_RUNNING, int(limit * SLOT_SHARE) // size
        if slots * tokens <= room:
            return cls(limit, size, slots, tokens, False, context)
        if options.exact:  # shared cells would make rounding depend on other sequences
            slots = max(1, min(slots, room // tokens))
            return cls(limit, size, slots, min(tokens, max(ROWS, room)), False, context)
        return cls(limit, size, slots, max(1, room), True, context)

    @property
    def cells(self) -> int:
        return self.slot_tokens if self.unified else self.slots * self.slot_tokens

    @property
    def host_bytes(self) -> int:
        return max(0, self.limit_bytes - self.cells * self.token_bytes)

    def settings(
        self, header: GGUFHeader, options: EngineOptions, on_cpu: bool = True, media: bool = False
    ) -> ContextSettings:
        """Flash attention rounds by the length of a chunk and by threads, so it is off where the bits of a reply would
        not depend on others otherwise. Over shared cells it is quicker, because it skips those of other sequences.
        `media`: whether tokens of media may have to be computed in one pass."""
        own_cells, rounded = on_cpu and not self.unified, metadata.is_rounded_by_batch(header)
        small_half = header.weights_bytes <= SMALL_MODEL and gguf_metadata.weights_type(header) in metadata.HALF_FLOATS
        separate = own_cells and small_half and not options.exact
        threads = ThreadCounts.choose(options.threads, header.weights_bytes <= SMALL_MODEL)
        return ContextSettings(
            self.cells,
            self.slots,
            self.unified,
            separate=separate,
            max_batch=LONE_BATCH if separate and not media else MAX_BATCH,
            float32=options.exact,
            flash_attention=False if options.exact or (own_cells and not rounded) else None,
            draft_rows=MAX_ROWS if options.drafts and not options.exact else 0,
            threads=threads.small_pass,
            prompt_threads=threads.large_pass,
        )


def probe_truncation(context: Context) -> bool:
    """Whether a sequence can be cut. Uses the first sequence, which must be empty, and empties it."""
    context.decode([(0, 0, [0, 0, 0])], need_logits=False)
    cut = context.truncate(0, 1)
    context.truncate(0, 0)
    return cut


def _choose_passes(
    context: Context, header: GGUFHeader, exact: bool, on_cpu: bool, truncates: bool
) -> tuple[Passes, str]:
    """How steps are divided into passes, and what the bits of a reply depend on then. Mixtures are never exact by text
    alone."""
    mixture, shared = metadata.is_mixture(header), context.settings.unified
    if exact and truncates and not mixture:
        group = next((group for group in (2, ROW_GROUP) if probe_groups(context, group)), None)
        if group is not None:
            return GroupedPasses(context, group), BY_TEXT
    if exact:
        passes = LlamaExactPasses(context, truncates)
        exactness = probe_exactness(context, passes)
        weaker = exactness == BY_TEXT and (mixture or not truncates)
        return passes, BY_CACHE if weaker else exactness
    if context.settings.separate:
        return LonePasses(context, pads=truncates), BY_CACHE  # nothing else is in a pass
    if not on_cpu or not truncates or shared or metadata.is_rounded_by_batch(header):
        pads = on_cpu and truncates and not shared
        return SharedPasses(context, MAX_REPLAYED if on_cpu else 0, pads), BY_BATCH
    steady = SteadyPasses(context, pairs=gguf_metadata.weights_type(header) == "F32")
    return steady, probe_company(context, steady)


def _gpu_layers(device: str | None, options: EngineOptions, library: LlamaLibrary) -> int | None:
    """How many layers a GPU computes; None: llama.cpp decides."""
    if device not in (None, "cpu", "gpu"):
        raise BadParameter("--device", device, "a GGUF file runs on cpu or gpu; --gpu-layers divides it")
    if device == "gpu" and _gpu_name(library) is None:
        raise BadParameter("--device", device, "llama.cpp finds no GPU here")
    if options.gpu_layers and _gpu_name(library) is None:
        raise BadParameter("--gpu-layers", options.gpu_layers, "llama.cpp finds no GPU here")
    return 0 if device == "cpu" or options.exact else options.gpu_layers


def _gpu_name(library: LlamaLibrary) -> str | None:
    """The first GPU that the library can use."""
    if not library.llama_supports_gpu_offload():
        return None
    for index in range(library.ggml_backend_dev_count()):
        found = library.ggml_backend_dev_get(index)
        if library.ggml_backend_dev_type(found) == _GPU:
            name: bytes = library.ggml_backend_dev_description(found)
            return name.decode("utf-8", "replace")
    return None


def _fingerprint(info: EngineInfo, library: LlamaLibrary, settings: ContextSettings) -> Fingerprint:
    """Its build includes the type of the KV cache and flash attention, which change the bits too."""
    used = [name for name in _ISA if f"{name} = 1" in library.system_info]
    cache, flash = EXACT_CACHE if settings.float32 else "kv-f16", _FLASH_LABELS[settings.flash_attention]
    build = "-".join((f"b{library.build}", *used[-1:], cache, f"flash-{flash}"))
    exactness, sampler = EXACTNESS_LABELS[info.exactness], f"sampler-{SAMPLER_VERSION}"
    return Fingerprint(LLAMACPP_RUNNER, build, info.device, info.dtype, exactness, sampler)


def _state_files(folder: Path, info: EngineInfo, settings: ContextSettings, used: Sequence[Path]) -> StateFiles:
    """Files whose states this model can restore: those of the same files, build and kind of cache."""
    kind = (settings.unified, settings.separate)
    key = "\n".join((info.fingerprint, str(kind), *map(file_identity, used)))
    return StateFiles(folder, key)


def _limits(header: GGUFHeader, plan: CachePlan, options: EngineOptions) -> SchedulerLimits:
    """By default a chunk of a prompt takes a small part of a second. There are no more slots than running sequences."""
    limits = options.limits or SchedulerLimits(chunk_tokens=128 if header.weights_bytes <= SMALL_MODEL else 32)
    return replace(limits, max_running=min(plan.slots, options.max_running or limits.max_running))
