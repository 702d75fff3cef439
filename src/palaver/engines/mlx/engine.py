"""The MLX engine: loads a folder with mlx-lm or mlx-vlm, probes what its caches can do and starts its worker thread."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaver.engines.base import EXACTNESS_LABELS, MLX_RUNNER, Capability, EngineInfo, Fingerprint
from palaver.engines.core.checkpoint import Checkpoint, open_checkpoint
from palaver.engines.core.decoder_config import generation_settings
from palaver.engines.core.draft_model import RunnerDraftModel
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import (
    EngineOptions,
    Fit,
    check_cache_bytes,
    check_drafts,
    default_cache_bytes,
    divide_cache,
)
from palaver.engines.core.sampler import SAMPLER_VERSION
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.mlx.loader import check_dtype, import_mlx, load_module, load_vision, sees_pictures, thinker_config
from palaver.errors import BadParameter, BrokenModel, UnsupportedContent
from palaver.memory import available_bytes
from palaver.phases import Vocabulary

if TYPE_CHECKING:
    from palaver.engines.mlx.media import MlxMediaEncoder
    from palaver.engines.mlx.runner import MlxProbe, MLXRunner

CPU, GPU = "cpu", "gpu"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
UNBOUNDED_CONTEXT = 1_000_000


def load(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    device: str | None = None,
    dtype: str | None = None,
    options: EngineOptions | None = None,
    adapter: Path | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> LocalEngine:
    """Loads a model from a folder and starts its thread. Raises a ModelError where that fails.

    By default weights stay as they are stored; on the CPU they become float32, unless they are quantised. `adapter`:
    the folder of a LoRA adapter, of mlx-lm or of peft.
    """
    options = options or EngineOptions()
    import_mlx()
    checkpoint = open_checkpoint(model)
    name = _pick_device(device)
    dtype = _pick_dtype(dtype, name, checkpoint)
    fit(checkpoint, name, dtype).check(checkpoint.name)
    on_device = _device_context(name)
    with on_device():
        from palaver.engines.mlx.runner import EXACT_ROWS

        loaded = _load(checkpoint, dtype, adapter)
        exact_rows = EXACT_ROWS[name] if options.exact else None
        drafter = None if options.draft_model is None else _load_draft_model(options.draft_model, dtype, name)
        limit, draft_limit = _cache_bytes(options, name), 0
        if drafter is not None:
            limit, draft_limit = divide_cache(limit, loaded.probe.token_bytes, drafter.token_bytes)
        runner, exactness = loaded.probe.make_runner(limit, exact_rows, options.drafts)
        if drafter is not None:
            runner.draft_model = _draft_model(drafter, draft_limit, runner, options, loaded.probe.vocabulary_size)
    defaults, end_ids = generation_settings(checkpoint.folder, checkpoint.config)
    info = EngineInfo(
        model=checkpoint.name,
        context_length=_context_length(checkpoint.config, options),
        vocabulary_size=loaded.probe.vocabulary_size,
        end_ids=end_ids,
        defaults=defaults,
        device=name,
        dtype=_describe_dtype(loaded.module, checkpoint.config),
        reuse=runner.reuse,
        steps=f"{loaded.library} {version(loaded.library)}",
        exactness=exactness,
        lacks={Capability.MEDIA: loaded.text_only} if loaded.text_only else {},
    )
    info = replace(info, fingerprint=str(_fingerprint(info, loaded.library)))
    media = None if loaded.encoder is None else loaded.encoder.cache
    check_drafts(options, runner, info.steps)
    return LocalEngine(info, vocabulary, runner, _limits(options, name), on_device, on_failure, media)


def _load_draft_model(folder: Path, dtype: str | None, device: str) -> MlxProbe:
    checkpoint = open_checkpoint(folder)
    fit(checkpoint, device, dtype).check(checkpoint.name)
    return _load(checkpoint, dtype, None).probe


def _draft_model(
    probe: MlxProbe, limit_bytes: int, runner: MLXRunner, options: EngineOptions, shared_tokens: int
) -> RunnerDraftModel:
    assert options.draft_model is not None
    drafter, _ = probe.make_runner(limit_bytes, drafts=False)
    if runner.verify_drafts is None or drafter.reuse != "to the token":
        why = "needs --exact or --drafts with MLX, and models whose states can be cut"
        raise BadParameter("--draft-model", str(options.draft_model), why)
    length = _context_length(open_checkpoint(options.draft_model).config, EngineOptions())
    return RunnerDraftModel(drafter, length, probe.vocabulary_size, shared_tokens)


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    module: Any
    probe: MlxProbe
    library: str = "mlx-lm"
    encoder: MlxMediaEncoder | None = None
    text_only: str = ""
    """Why a model that sees takes text only."""


def _load(checkpoint: Checkpoint, dtype: str | None, adapter: Path | None) -> _LoadedModel:
    """With mlx-vlm if the model sees and that works, otherwise with mlx-lm."""
    from palaver.engines.mlx.runner import MlxProbe

    check_dtype(dtype)
    text_only = ""
    if sees_pictures(checkpoint):
        try:
            return _load_vision(checkpoint, dtype, adapter)
        except UnsupportedContent as error:
            text_only = str(error).rstrip(".")
    try:
        module = load_module(checkpoint, dtype, adapter)
    except BrokenModel as error:
        if not text_only or adapter is not None:
            raise
        raise BrokenModel(f"{str(error).rstrip('.')}, and with pictures: {text_only}.") from error
    try:
        return _LoadedModel(module, MlxProbe(module), text_only=text_only)
    except Exception as error:
        raise BrokenModel(f"The model {checkpoint.name!r} can't be run by mlx-lm: {error}") from error


def _load_vision(checkpoint: Checkpoint, dtype: str | None, adapter: Path | None) -> _LoadedModel:
    """Raises UnsupportedContent where mlx-vlm can't be used."""
    if adapter is not None:
        raise UnsupportedContent("with an adapter MLX runs only the text model")
    module, processor = load_vision(checkpoint, dtype)
    from palaver.engines.mlx.media import MlxMediaEncoder, VisionDecoder
    from palaver.engines.mlx.runner import MlxProbe

    try:
        encoder = MlxMediaEncoder(VisionDecoder(module), processor)
        probe = MlxProbe(module, encoder)
        probe.check_media()
    except UnsupportedContent:
        raise
    except Exception as error:
        raise UnsupportedContent(f"mlx-vlm fails on its media ({type(error).__name__}: {error})") from error
    return _LoadedModel(module, probe, "mlx-vlm", encoder)


def describe_fit(model: str | Path, device: str | None = None, dtype: str | None = None) -> str:
    """One sentence on whether the model would fit, without loading it."""
    import_mlx()
    checkpoint, name = open_checkpoint(model), _pick_device(device)
    return str(fit(checkpoint, name, _pick_dtype(dtype, name, checkpoint)))


def _pick_dtype(dtype: str | None, device: str, checkpoint: Checkpoint) -> str | None:
    """None: the stored one."""
    is_plain = not checkpoint.config.get("quantization")
    return "float32" if dtype is None and device == CPU and is_plain else dtype


def _pick_device(name: str | None) -> str:
    import mlx.core as mx

    if name not in (None, CPU, GPU):
        raise BadParameter("--device", name, "MLX runs on cpu or gpu")
    if name == GPU and not mx.is_available(mx.gpu):
        raise BadParameter("--device", name, "MLX finds no GPU here; try cpu")
    return name or (GPU if mx.is_available(mx.gpu) else CPU)


def _device_context(name: str) -> Callable[[], AbstractContextManager[None]]:
    """Computations inside of the context run on the device, in the thread that enters it."""
    import mlx.core as mx

    @contextmanager
    def context() -> Iterator[None]:
        with mx.stream(getattr(mx, name)):
            yield

    return context


def fit(checkpoint: Checkpoint, device: str, dtype: str | None = None) -> Fit:
    """`dtype`: what floats become; None: they stay as they are stored."""
    size = {None: 0, "float32": 4}.get(dtype, 2)
    tensors = checkpoint.tensors.values()
    weights = sum(size * t.elements if size and t.dtype in FLOAT_DTYPES else t.nbytes for t in tensors)
    return Fit.of(weights, available_bytes(), device)


def _cache_bytes(options: EngineOptions, device: str) -> int:
    """Apple's GPUs use the memory of the CPU."""
    free = available_bytes()
    check_cache_bytes(options, free, device)
    return default_cache_bytes(device, free) if options.cache_bytes is None else options.cache_bytes


def _limits(options: EngineOptions, device: str) -> SchedulerLimits:
    """By default a chunk of a prompt takes a small part of a second."""
    limits = options.limits or SchedulerLimits(chunk_tokens=512 if device == GPU else 32)
    return limits if options.max_running is None else replace(limits, max_running=options.max_running)


def _describe_dtype(module: Any, config: Mapping[str, Any]) -> str:
    """The type of most numbers that aren't quantised, and the bits of those that are."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    counts: dict[str, int] = {}
    for _, array in tree_flatten(module.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            counts[name] = counts.get(name, 0) + array.size
    dtype = max(counts, key=lambda name: counts[name])
    quantization = config.get("quantization")
    return f"{dtype}, {quantization.get('bits')}-bit" if isinstance(quantization, Mapping) else dtype


def _fingerprint(info: EngineInfo, library: str) -> Fingerprint:
    import mlx.core as mx

    unit = mx.device_info().get("device_name", platform.machine())
    build = f"mlx-{version('mlx')}-{library.removeprefix('mlx-')}-{version(library)}-{unit}"
    exactness, sampler = EXACTNESS_LABELS[info.exactness], f"sampler-{SAMPLER_VERSION}"
    return Fingerprint(MLX_RUNNER, build, info.device, info.dtype, exactness, sampler)


def _context_length(config: Mapping[str, Any], options: EngineOptions) -> int:
    configs = (config, thinker_config(config).get("text_config") or {})
    found = [one[name] for one in configs for name in CONTEXT_NAMES if isinstance(one.get(name), int)]
    return min((found or [UNBOUNDED_CONTEXT])[0], options.context or UNBOUNDED_CONTEXT)
