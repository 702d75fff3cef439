"""Loads a folder with mlx-lm: unquantised safetensors, or weights that mlx-lm converted and quantised, with a LoRA
adapter if there is one. Models that see are loaded with mlx-vlm where it is installed. Imports MLX only when a model is
loaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from palaver.engines.core.checkpoint import Checkpoint, has_processor, read_json
from palaver.errors import BadParameter, BrokenModel, UnsafeWeights, UnsupportedContent

PACKAGE, TOKENIZERS = "mlx_lm", "mlx_lm.tokenizer_utils"
INSTALL = "pip install 'palaver[mlx]'"
INSTALL_VISION = "pip install 'palaver[mlx-vision]'"
MAX_HEADER = 100_000_000


def is_mlx_folder(folder: Path) -> bool:
    """Whether mlx-lm wrote the folder: its configuration has MLX's quantisation, or its weights name MLX."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if isinstance(config, dict) and isinstance(config.get("quantization"), dict):
        return True
    return any(_weights_format(path) == "mlx" for path in sorted(folder.glob("*.safetensors"))[:1])


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def is_installed() -> bool:
    return all(importlib.util.find_spec(package) is not None for package in ("mlx", "mlx_lm"))


def sees_pictures(checkpoint: Checkpoint) -> bool:
    """Whether the folder holds a model with an encoder for pictures, and the settings of its processor."""
    sees = isinstance(thinker_config(checkpoint.config).get("vision_config"), Mapping)
    return sees and has_processor(checkpoint.folder)


def thinker_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the part that sees, hears and writes: of an omni model its thinker."""
    found = config.get("thinker_config")
    return found if isinstance(found, Mapping) else config


def _weights_format(path: Path) -> str | None:
    """The format that a safetensors file names in its metadata."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size <= MAX_HEADER else {}
        found = header["__metadata__"]["format"]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return found if isinstance(found, str) else None


PLAIN_ROTARY = "default"
DTYPES = ("float32", "bfloat16", "float16")


@contextmanager
def _file_limit() -> Iterator[None]:
    """mlx-lm sets the process's limit of open files when it is imported, also where that lowers it for good."""
    import resource  # not every system has it

    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit


@contextmanager
def _without_tokenizers() -> Iterator[None]:
    """mlx-lm imports transformers for its tokenizers, which takes longer than to load a small model. Its model code
    needs neither: it is imported under an empty package, with tokenizers that are imported when they are used."""
    if PACKAGE in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package, tokenizers = ModuleType(PACKAGE), ModuleType(TOKENIZERS)
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    vars(tokenizers).update(TokenizerWrapper=object, load=_load_tokenizer)
    stand_ins = {PACKAGE: package, TOKENIZERS: tokenizers}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _load_tokenizer(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module(TOKENIZERS).load(*arguments, **options)


def import_mlx() -> None:
    """Imports mlx-lm. Raises BrokenModel where it isn't installed."""
    if not is_installed():
        raise BrokenModel(f"MLX models take the Python packages mlx and mlx-lm, which aren't installed: {INSTALL}")
    with _file_limit(), _without_tokenizers():
        import mlx_lm.models.cache
        import mlx_lm.utils  # noqa: F401


def check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise BadParameter("dtype", dtype, f"must be one of {', '.join(DTYPES)}")


def load_module(checkpoint: Checkpoint, dtype: str | None, adapter: Path | None = None) -> Any:
    """The model with all of its parameters evaluated, so that any thread can use it. None: the stored dtype."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    try:
        with _without_tokenizers():
            module, _ = load_model(checkpoint.folder, model_config=config_changes(checkpoint.config))
        if dtype is not None:
            module.set_dtype(getattr(mx, dtype))
        mx.eval(module.parameters())
    except Exception as error:
        reason = _first_line(error)
        advice = "" if is_mlx_folder(checkpoint.folder) else " --engine torch may run it."
        raise BrokenModel(f"The model {checkpoint.name!r} couldn't be loaded by mlx-lm: {reason}{advice}") from error
    if adapter is not None:
        apply_adapter(module, adapter)
    return module.eval()


def load_vision(checkpoint: Checkpoint, dtype: str | None) -> tuple[Any, Any]:
    """The model with all of its parameters evaluated, and its processor. Raises UnsupportedContent with the reason why
    mlx-vlm can't be used."""
    import mlx.core as mx

    _check_vision(checkpoint.config)
    try:
        with _file_limit():
            from mlx_vlm import utils
        with _config_read_by(utils):
            module = utils.load_model(checkpoint.folder)
        processor = utils.load_processor(
            checkpoint.folder, add_detokenizer=False, trust_remote_code=False, local_files_only=True
        )
        if dtype is not None:
            module.set_dtype(getattr(mx, dtype))
        mx.eval(module.parameters())
    except Exception as error:
        raise UnsupportedContent(f"mlx-vlm can't load it: {_first_line(error)}") from error
    return module.eval(), processor


def _check_vision(config: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UnsupportedContent(f"mlx-vlm isn't installed: {INSTALL_VISION}")
    if config.get("model_file"):
        raise UnsupportedContent("the model asks to run its own Python code.")
    if (thinker_config(config).get("text_config") or {}).get("use_bidirectional_attention"):
        raise UnsupportedContent("tokens of its pictures see each other, which only --engine torch computes.")


@contextmanager
def _config_read_by(utils: Any) -> Iterator[None]:
    """mlx-vlm reads the configuration of a model itself."""
    load_config = utils.load_config
    utils.load_config = lambda *args, **kwargs: vision_config(load_config(*args, **kwargs))
    try:
        yield
    finally:
        utils.load_config = load_config


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as mlx-vlm reads it: settings of the decoder under the names and in the places that it knows.

    It takes defaults of its own for what it doesn't find, and would compute something else."""
    if isinstance(config.get("thinker_config"), Mapping):
        return _omni_config(config)
    text = dict(config.get("text_config") or {})
    if not text:  # in the file's outermost level, as mlx-vlm reads it
        return dict(config)
    text |= config_changes(text)
    rotary = text.get("rope_parameters")
    if isinstance(rotary, Mapping):
        whole = rotary.get("full_attention", rotary)
        text.setdefault("rope_global_base_freq", whole.get("rope_theta"))
        if "mrope_section" in rotary and text.get("rope_scaling") is None:
            text["rope_scaling"] = {"type": rotary.get("rope_type", PLAIN_ROTARY), **rotary}
    others = {"sliding_window_pattern": text.get("_sliding_window_pattern")}
    others |= {name: config.get(name) for name in ("mm_tokens_per_image", "tie_word_embeddings")}
    text |= {name: value for name, value in others.items() if text.get(name) is None}
    text = {name: value for name, value in text.items() if value is not None}
    vision = dict(config["vision_config"])
    kind = str(vision.get("model_type"))
    if kind.startswith("qwen"):
        vision["model_type"] = kind.removesuffix("_vision")
    return {**text, **config, "text_config": text, "vision_config": vision}


def _omni_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an omni model, without its voice: mlx-vlm reads the voice's settings, but makes no talker."""
    thinker = vision_config(config["thinker_config"])
    voice = dict(config.get("talker_config") or {})
    voice["text_config"] = {**thinker["text_config"], **(voice.get("text_config") or {})}
    return {**config, "thinker_config": thinker, "talker_config": voice, "enable_audio_output": False}


def config_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that mlx-lm reads, where transformers 5 writes them under others.

    mlx-lm takes defaults of its own for what it doesn't find, and would compute something else.
    """
    changes = _rotary_settings(config.get("rope_parameters"))
    changes["num_experts"] = config.get("num_local_experts")
    return {name: value for name, value in changes.items() if value is not None and config.get(name) is None}


def _rotary_settings(parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        return {}
    by_layer = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    rotary = by_layer.get("full_attention", parameters)
    settings = {name: rotary.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    if rotary.get("rope_type", PLAIN_ROTARY) != PLAIN_ROTARY:
        settings["rope_scaling"] = dict(rotary)
    if "sliding_attention" in by_layer:
        settings["rope_local_base_freq"] = by_layer["sliding_attention"].get("rope_theta")
    return settings


OWN_ADAPTER, PEFT_ADAPTER, PICKLED_ADAPTER = "adapters.safetensors", "adapter_model.safetensors", "adapter_model.bin"
"""The files of adapters: as mlx-lm writes them, and as peft does."""
PEFT_PREFIX = "base_model.model."
PEFT_PARTS = (".lora_A.weight", ".lora_B.weight")


def apply_adapter(module: Any, folder: Path) -> None:
    """Adds a LoRA adapter to the layers of a model: one that mlx-lm wrote, or one of peft. It is merged into weights
    that aren't quantised. Raises BrokenModel or UnsafeWeights where there is none or it doesn't fit."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import load_adapters

    try:
        if (folder / OWN_ADAPTER).is_file():
            load_adapters(module, str(folder))
        elif (folder / PEFT_ADAPTER).is_file():
            _load_peft(module, folder)
        elif (folder / PICKLED_ADAPTER).is_file():
            raise UnsafeWeights(str(folder), PICKLED_ADAPTER)
        else:
            raise BrokenModel(f"The folder {str(folder)!r} contains no adapter ({PEFT_ADAPTER} or {OWN_ADAPTER}).")
        _merge_adapter(module)
        mx.eval(module.parameters())
    except (BrokenModel, UnsafeWeights):
        raise
    except Exception as error:
        raise BrokenModel(f"The adapter in {str(folder)!r} does not fit the model: {_first_line(error)}") from error


def _load_peft(module: Any, folder: Path) -> None:
    """peft's matrices as layers of mlx-lm. Raises ValueError for what these can't compute."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear

    config = read_json(folder / "adapter_config.json")
    tensors: dict[str, Any] = cast(Any, mx.load(str(folder / PEFT_ADAPTER)))
    other = [name for name in ("use_dora", "alpha_pattern", "fan_in_fan_out") if config.get(name)]
    other += [name for name in tensors if not name.startswith(PEFT_PREFIX) or not name.endswith(PEFT_PARTS)]
    if other:
        raise ValueError(f"MLX doesn't compute {other[0]!r} of an adapter. --engine torch may.")
    layers = dict(module.named_modules())
    for name in sorted(tensors):
        path, part = name.removeprefix(PEFT_PREFIX).split(".lora_")
        if part.startswith("B"):
            continue
        a, b = tensors[name], tensors[name.replace(*PEFT_PARTS)]
        rank = a.shape[0]
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        layer = layers.get(path)
        if layer is None:
            raise ValueError(f"there is no layer {path!r}.")
        adapted = LoRALinear.from_base(layer, rank, scale=scale)
        if (adapted.lora_a.shape, adapted.lora_b.shape) != (a.T.shape, b.T.shape):
            raise ValueError(f"the layer {path!r} has another size.")
        adapted.lora_a, adapted.lora_b = a.T, b.T
        module.update_modules(tree_unflatten([(path, adapted)]))


def _merge_adapter(module: Any) -> None:
    """A layer that isn't quantised becomes an ordinary one, which takes less time."""
    import mlx.nn as nn
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear

    plain = [
        (path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, LoRALinear) and isinstance(layer.linear, nn.Linear)
    ]
    module.update_modules(tree_unflatten([(path, layer.fuse()) for path, layer in plain]))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300].rstrip(" .:") + "."
