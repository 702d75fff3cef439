"""Loads a model's folder or GGUF file with compiled steps or torch. What compiled steps run loads without torch,
transformers and llama.cpp. `chat/engine_choice.py` says which engine runs which model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.machine import has_accelerator, has_llamacpp
from palaver.errors import BadParameter, CantCompile, ModelError
from palaver.memory import no_collections
from palaver.phases import Vocabulary


def load_engine(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    device: str | None = None,
    dtype: str | None = None,
    options: EngineOptions | None = None,
    adapter: Path | None = None,
    quantize_bits: int | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> LocalEngine:
    """Loads a model from a folder and starts its thread. Raises a ModelError where that fails.

    The choice follows from the files, the options and the machine alone. Whatever keeps compiled steps from loading by
    themselves is left to the torch engine: it may still use them, and explains or raises what is wrong.
    """
    options = options or EngineOptions()
    refusal = "the device or another option keeps compiled steps from running it"
    if quantize_bits is None and _may_skip_torch(device, dtype, options, adapter):
        with no_collections():
            from palaver.engines.compiled.engine import load as load_compiled

        try:
            return load_compiled(model, vocabulary=vocabulary, options=options, on_failure=on_failure)
        except (UnsupportedModel, ModelError) as error:
            refusal = str(error)
    on_cpu = device == "cpu" or not has_accelerator()
    if options.draft_model is not None and on_cpu and not options.drafts:
        why = f"needs compiled steps for both models: {refusal}"
        raise BadParameter("--draft-model", str(options.draft_model), why)
    with no_collections():
        from palaver.engines.torch import load as load_torch

    return load_torch(
        model,
        vocabulary=vocabulary,
        device=device,
        dtype=dtype,
        options=options,
        adapter=adapter,
        quantize_bits=quantize_bits,
        on_failure=on_failure,
    )


def load_gguf(
    file: Path,
    *,
    vocabulary: Vocabulary,
    options: EngineOptions,
    on_failure: Callable[[BaseException], None] | None = None,
) -> LocalEngine | None:
    """Loads a GGUF file with compiled steps and starts its thread. Returns None where llama.cpp must run it.

    Raises a ModelError where compiled steps are required, or llama.cpp is not installed.
    """
    from palaver.engines.compiled.engine import load as load_compiled

    failure: ModelError
    try:
        return load_compiled(file, vocabulary=vocabulary, options=options, on_failure=on_failure)
    except UnsupportedModel as error:
        failure = CantCompile(str(error))
    except ModelError as error:
        failure = error
    if options.compiled or not has_llamacpp():
        raise failure
    return None


def describe_fit(
    model: str | Path, device: str | None = None, dtype: str | None = None, compiled: bool | None = None
) -> str:
    """One sentence on whether the model would fit, without loading it."""
    if _may_skip_torch(device, dtype, EngineOptions(compiled=compiled), None):
        from palaver.engines.compiled.engine import describe_fit as describe_compiled_fit

        try:
            return describe_compiled_fit(model)
        except (UnsupportedModel, ModelError):
            pass
    from palaver.engines.torch import describe_fit as describe_torch_fit

    return describe_torch_fit(model, device, dtype, compiled)


def describe_gguf_fit(file: Path) -> str:
    """The same of a GGUF file with compiled steps. Raises CantCompile where they can't run it."""
    from palaver.engines.compiled.engine import describe_fit as describe_compiled_fit

    try:
        return describe_compiled_fit(file)
    except UnsupportedModel as error:
        raise CantCompile(str(error)) from error


def _may_skip_torch(device: str | None, dtype: str | None, options: EngineOptions, adapter: Path | None) -> bool:
    """Whether compiled steps are wanted: by default on the CPU, where there is no accelerator that torch may use."""
    if options.compiled is False or not options.fused or adapter is not None:
        return False
    on_cpu = device == "cpu" or (device is None and not has_accelerator())
    return on_cpu and dtype in (None, "float32")
