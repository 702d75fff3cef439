"""llama.cpp's C API, and that of its multimodal library mtmd, by ctypes, from the library in the xllamacpp wheel.

llama.cpp changes the layout of its parameter structs without a version of its own. So the layouts are a table by build
number, and each is compared with the defaults that the library returns before anything else is called. A build that is
not in the table is refused.
"""

from __future__ import annotations

import ctypes as c
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from palaver.errors import ModelError

PACKAGE = "xllamacpp"
INSTALL = "pip install 'palaver[gguf]'"
LOG_CALLBACK = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
PROGRESS_CALLBACK = c.CFUNCTYPE(c.c_bool, c.c_float, c.c_void_p)
MAX_STRUCT = 1024
"""Bytes for a struct of unknown size: the library writes past one that is too small."""
F32, F16, Q8_0 = 0, 1, 8
"""Types of the KV cache."""
FLASH_ATTENTION = {None: -1, False: 0, True: 1}
"""None: llama.cpp decides."""
NO_ROOM, ABORTED = 1, 2
"""Results of `llama_decode`; 0 is success, and negative ones are errors."""
MAX_SEQUENCES = 256


class Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


class ModelParams10566(c.Structure):
    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", PROGRESS_CALLBACK),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    )


class ContextParams10566(c.Structure):
    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class MediaParams10566(c.Structure):
    _fields_ = (
        ("use_gpu", c.c_bool),
        ("device", c.c_void_p),
        ("print_timings", c.c_bool),
        ("n_threads", c.c_int),
        ("image_marker", c.c_char_p),
        ("media_marker", c.c_char_p),
        ("flash_attn_type", c.c_int),
        ("warmup", c.c_bool),
        ("image_min_tokens", c.c_int),
        ("image_max_tokens", c.c_int),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("batch_max_tokens", c.c_int32),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
    )


class MediaText(c.Structure):
    """`mtmd_input_text`: a text with a marker for each item."""

    _fields_ = (("text", c.c_char_p), ("text_len", c.c_size_t), ("add_special", c.c_bool), ("parse_special", c.c_bool))


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameter structs of a build, and their defaults other than zero; 1 for a pointer that is set."""

    model_params: type[c.Structure]
    context_params: type[c.Structure]
    media_params: type[c.Structure]
    model_defaults: Mapping[str, float]
    context_defaults: Mapping[str, float]
    media_defaults: Mapping[str, float]


LAYOUTS: Mapping[int, Layout] = {
    10566: Layout(
        ModelParams10566,
        ContextParams10566,
        MediaParams10566,
        {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "use_extra_bufts": True},
        {
            "n_ctx": 512,
            "n_batch": 2048,
            "n_ubatch": 512,
            "n_seq_max": 1,
            "n_outputs_max_per_seq": 1,
            "n_threads": 4,
            "n_threads_batch": 4,
            "rope_scaling_type": -1,
            "pooling_type": -1,
            "attention_type": -1,
            "flash_attn_type": -1,
            "yarn_ext_factor": -1,
            "yarn_attn_factor": -1,
            "yarn_beta_fast": -1,
            "yarn_beta_slow": -1,
            "defrag_thold": -1,
            "type_k": F16,
            "type_v": F16,
            "offload_kqv": True,
            "no_perf": True,
            "op_offload": True,
            "swa_full": True,
        },
        {
            "use_gpu": True,
            "print_timings": True,
            "n_threads": 4,
            "media_marker": 1,
            "flash_attn_type": -1,
            "warmup": True,
            "image_min_tokens": -1,
            "image_max_tokens": -1,
            "batch_max_tokens": 1024,
        },
    ),
}
"""By llama.cpp's build number, which is the last part of the wheel's version."""

_FILLER = 0xA5
_POINTER, _INT, _BYTES = c.c_void_p, c.c_int32, c.POINTER(c.c_uint8)
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_print_system_info": (c.c_char_p, ()),
    "llama_log_set": (None, (LOG_CALLBACK, _POINTER)),
    "llama_supports_gpu_offload": (c.c_bool, ()),
    "llama_model_free": (None, (_POINTER,)),
    "llama_free": (None, (_POINTER,)),
    "llama_n_ctx_seq": (c.c_uint32, (_POINTER,)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_model_is_recurrent": (c.c_bool, (_POINTER,)),
    "llama_model_is_hybrid": (c.c_bool, (_POINTER,)),
    "llama_model_is_diffusion": (c.c_bool, (_POINTER,)),
    "llama_model_has_encoder": (c.c_bool, (_POINTER,)),
    "llama_model_has_decoder": (c.c_bool, (_POINTER,)),
    "llama_model_n_swa": (_INT, (_POINTER,)),
    "llama_decode": (_INT, (_POINTER, Batch)),
    "llama_synchronize": (None, (_POINTER,)),
    "llama_set_n_threads": (None, (_POINTER, _INT, _INT)),
    "llama_get_logits_ith": (c.POINTER(c.c_float), (_POINTER, _INT)),
    "llama_set_abort_callback": (None, (_POINTER, _POINTER, _POINTER)),
    "llama_memory_seq_rm": (c.c_bool, (_POINTER, _INT, _INT, _INT)),
    "llama_memory_seq_cp": (None, (_POINTER, _INT, _INT, _INT, _INT)),
    "llama_memory_seq_pos_max": (_INT, (_POINTER, _INT)),
    "llama_memory_seq_pos_min": (_INT, (_POINTER, _INT)),
    "llama_state_seq_get_size": (c.c_size_t, (_POINTER, _INT)),
    "llama_state_seq_get_data": (c.c_size_t, (_POINTER, _BYTES, c.c_size_t, _INT)),
    "llama_state_seq_set_data": (c.c_size_t, (_POINTER, _BYTES, c.c_size_t, _INT)),
    "llama_adapter_lora_init": (_POINTER, (_POINTER, c.c_char_p)),
    "llama_set_adapters_lora": (_INT, (_POINTER, c.POINTER(_POINTER), c.c_size_t, c.POINTER(c.c_float))),
    "llama_model_n_embd_inp": (_INT, (_POINTER,)),
    "mtmd_log_set": (None, (LOG_CALLBACK, _POINTER)),
    "mtmd_helper_log_set": (None, (LOG_CALLBACK, _POINTER)),
    "mtmd_default_marker": (c.c_char_p, ()),
    "mtmd_free": (None, (_POINTER,)),
    "mtmd_support_vision": (c.c_bool, (_POINTER,)),
    "mtmd_support_audio": (c.c_bool, (_POINTER,)),
    "mtmd_get_audio_sample_rate": (c.c_int, (_POINTER,)),
    "mtmd_decode_use_non_causal": (c.c_bool, (_POINTER, _POINTER)),
    "mtmd_bitmap_init": (_POINTER, (c.c_uint32, c.c_uint32, c.c_char_p)),
    "mtmd_bitmap_init_from_audio": (_POINTER, (c.c_size_t, c.c_char_p)),
    "mtmd_bitmap_free": (None, (_POINTER,)),
    "mtmd_input_chunks_init": (_POINTER, ()),
    "mtmd_input_chunks_size": (c.c_size_t, (_POINTER,)),
    "mtmd_input_chunks_get": (_POINTER, (_POINTER, c.c_size_t)),
    "mtmd_input_chunks_free": (None, (_POINTER,)),
    "mtmd_input_chunk_get_type": (c.c_int, (_POINTER,)),
    "mtmd_input_chunk_get_tokens_text": (c.POINTER(_INT), (_POINTER, c.POINTER(c.c_size_t))),
    "mtmd_input_chunk_get_n_tokens": (c.c_size_t, (_POINTER,)),
    "mtmd_input_chunk_get_n_pos": (_INT, (_POINTER,)),
    "mtmd_tokenize": (_INT, (_POINTER, _POINTER, c.POINTER(MediaText), c.POINTER(_POINTER), c.c_size_t)),
    "mtmd_encode_chunk": (_INT, (_POINTER, _POINTER)),
    "mtmd_get_output_embd": (c.POINTER(c.c_float), (_POINTER,)),
    "mtmd_helper_decode_image_chunk": (
        _INT,
        (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, c.POINTER(_INT), _POINTER, _POINTER),
    ),
    "ggml_backend_dev_count": (c.c_size_t, ()),
    "ggml_backend_dev_get": (_POINTER, (c.c_size_t,)),
    "ggml_backend_dev_type": (c.c_int, (_POINTER,)),
    "ggml_backend_dev_description": (c.c_char_p, (_POINTER,)),
    "ggml_backend_dev_memory": (None, (_POINTER, c.POINTER(c.c_size_t), c.POINTER(c.c_size_t))),
}


class CantUseLlamaCpp(ModelError):
    def __init__(self, why: str) -> None:
        super().__init__(f"GGUF files can't be run here: {why}")


class LlamaLibrary:
    """The functions of llama.h, with the layout of this build. Its log is switched off."""

    def __init__(self, path: Path, build: int) -> None:
        self.build = build
        self.layout = find_layout(build)
        self._library = c.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            self._declare(name, result, arguments)
        self._check_defaults("llama_model_default_params", self.layout.model_params, self.layout.model_defaults)
        self._check_defaults("llama_context_default_params", self.layout.context_params, self.layout.context_defaults)
        self._check_defaults("mtmd_context_params_default", self.layout.media_params, self.layout.media_defaults)
        model, context = self.layout.model_params, self.layout.context_params
        self._declare("llama_model_default_params", model, ())
        self._declare("llama_context_default_params", context, ())
        self._declare("mtmd_context_params_default", self.layout.media_params, ())
        splits = (c.POINTER(c.c_char_p), c.c_size_t, model)
        self._declare("llama_model_load_from_splits", _POINTER, splits)
        self._declare("llama_init_from_model", _POINTER, (_POINTER, context))
        self._declare("mtmd_init_from_file", _POINTER, (c.c_char_p, _POINTER, self.layout.media_params))
        self._log = LOG_CALLBACK(self._keep_error)
        self.last_error = ""
        """What llama.cpp logged as an error since this was cleared."""
        for set_log in (self.llama_log_set, self.mtmd_log_set, self.mtmd_helper_log_set):
            set_log(self._log, None)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:
        """A function of llama.h."""
        return getattr(self._library, name)

    @property
    def system_info(self) -> str:
        """The instruction sets that the library uses, such as "AVX2"."""
        text: bytes = self.llama_print_system_info()
        return text.decode("utf-8", "replace")

    def _declare(self, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CantUseLlamaCpp(f"{PACKAGE} {self.build} has no function {name}.") from None
        function.restype, function.argtypes = result, arguments

    def _check_defaults(self, name: str, struct: type[c.Structure], defaults: Mapping[str, float]) -> None:
        """Compares a struct of the table with the defaults that the library writes into an oversized one."""

        class Oversized(c.Structure):
            _fields_ = (("known", struct), ("rest", c.c_uint8 * (MAX_STRUCT - c.sizeof(struct))))

        self._declare(name, Oversized, ())
        found = getattr(self._library, name)().known
        values = {field[0]: _plain(getattr(found, field[0])) for field in struct._fields_}
        expected = {field: defaults.get(field, 0) for field in values}
        if values != expected or self._written_bytes(name) > c.sizeof(struct):
            raise CantUseLlamaCpp(f"the structs of {PACKAGE} {self.build} have another layout than expected.")

    def _written_bytes(self, name: str) -> int:
        """How many bytes of a struct the library writes; 0 where that can't be seen.

        On x86-64 a large struct is returned through a pointer that is passed as the first argument.
        """
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return 0
        buffer = (c.c_uint8 * MAX_STRUCT)(*([_FILLER] * MAX_STRUCT))
        self._declare(name, _POINTER, (_POINTER,))
        getattr(self._library, name)(c.addressof(buffer))
        return len(bytes(buffer).rstrip(bytes([_FILLER])))

    def _keep_error(self, level: int, text: bytes, data: Any) -> None:
        """Keeps the first error of a call: later ones only say that it failed."""
        if level == 4 and text and not self.last_error:
            line = " ".join(text.decode("utf-8", "replace").split())
            self.last_error = re.sub(r"^\w+: ", "", line)


def _plain(value: Any) -> float:
    """A field of a struct as a number; 0 for a null pointer."""
    return value if isinstance(value, int | float) else int(bool(value))


def find_layout(build: int) -> Layout:
    if build not in LAYOUTS:
        known = ", ".join(str(number) for number in LAYOUTS)
        raise CantUseLlamaCpp(f"build {build} of llama.cpp is not known to Palaver, only {known}: {INSTALL}")
    return LAYOUTS[build]


def check_platform(system: str = sys.platform, machine: str | None = None) -> None:
    """Raises CantUseLlamaCpp where the wheel doesn't export llama.cpp's functions."""
    machine = (machine or platform.machine()).lower()
    if system == "darwin" or (system == "linux" and machine in ("x86_64", "amd64")):
        return
    name = {"win32": "Windows", "linux": f"Linux on {machine}"}.get(system, system)
    raise CantUseLlamaCpp(f"llama.cpp's library for {name} is not supported, only for Linux on x86-64 and for macOS.")


@cache
def load_library() -> LlamaLibrary:
    """Loads the library of the wheel, once in a process. Raises CantUseLlamaCpp."""
    check_platform()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # where it aborts, it would attach a debugger first
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve other processes
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise CantUseLlamaCpp(f"the package {PACKAGE} is not installed: {INSTALL}")
    version = importlib.metadata.version(PACKAGE)
    build = int(version.rsplit(".", 1)[-1]) if version.rsplit(".", 1)[-1].isdigit() else 0
    find_layout(build)  # before any code of an unknown build runs
    paths = sorted(Path(spec.origin).parent.glob(f"{PACKAGE}*.so"))
    if not paths:
        raise CantUseLlamaCpp(f"the package {PACKAGE} has no library: {INSTALL}")
    return LlamaLibrary(paths[0], build)
