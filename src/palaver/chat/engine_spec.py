"""How a process loads the engine for a model."""

from __future__ import annotations

from palaver.chat.model import LLAMACPP, MLX, LoadOptions, check_engine_options
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import llamacpp_spec, mlx_spec, torch_spec
from palaver.models.resolver import ResolvedModel
from palaver.phases import Vocabulary


def make_spec(model: ResolvedModel, vocabulary: Vocabulary, loading: LoadOptions) -> EngineSpec:
    """How a process loads the engine for a model. Raises BadParameter for options that it doesn't have."""
    engine = check_engine_options(model, loading)
    adapter = loading.adapter or model.adapter
    if engine == LLAMACPP:
        assert model.gguf is not None
        return llamacpp_spec(
            model.gguf,
            vocabulary,
            loading.device,
            loading.exact,
            adapter,
            model.context_length,
            loading.cache_bytes,
            loading.max_running,
            loading.gpu_layers,
        )
    if engine == MLX:
        return mlx_spec(
            model.folder,
            vocabulary,
            loading.device,
            loading.dtype,
            loading.exact,
            model.context_length,
            loading.cache_bytes,
            loading.max_running,
        )
    return torch_spec(
        model.folder,
        vocabulary,
        loading.device,
        loading.dtype,
        loading.exact,
        adapter,
        model.context_length,
        loading.compiled,
        loading.cache_bytes,
        loading.max_running,
        model.quantize_bits,
    )
