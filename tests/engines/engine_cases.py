"""The engines that the conformance suite and `benchmarks/engine_cycles.py` run: all over the embedded models."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palaver.engines.base import Engine
from palaver.engines.core.options import EngineOptions
from palaver.engines.diffusion.config import find_diffusion
from palaver.engines.host.frames import EngineSpec
from palaver.engines.mlx.loader import is_installed as has_mlx
from palaver.formats.base import Format, RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt
from palaver.messages import user
from palaver.models.resolver import resolve_folder
from tests.engines.threaded import ThreadedEngine
from tests.gguf_files import convert_qwen3
from tests.mlx_files import convert_sprout
from tests.scripted_engine import ScriptedEngine

NAMES = ("torch", "compiled", "quantised", "llamacpp", "mlx", "diffusion", "vllm", "vllm-native", "scripted")
"""`quantised`: compiled steps with a GGUF file. `vllm-native`: vLLM's own sampler chooses the tokens."""
VLLM = ("vllm", "vllm-native")
EXACT_MODES = ("torch", "llamacpp", "mlx")
"""Compiled steps are always exact."""
QUANTISED_TYPE = "q8_0"
DIFFUSION = {"block_length": 4, "steps": 2}
"""Short blocks: a continued reply denoises its last block again."""
CONTEXT = 512
RUNNING = 8
VLLM_VARIABLE = "PALAVER_VLLM_PYTHON"
"""The environment variable that names the Python of an environment with vLLM."""
SCRIPT = "I think that a plant needs light, water and some time, and so it grows a bit each day."


def missing(name: str) -> str:
    """What this machine lacks to run the engine; empty if nothing."""
    if name in ("compiled", "quantised") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "NOTHING IS SHOWN HERE: there is no C compiler"
    if name == "llamacpp" and find_spec("xllamacpp") is None:
        return "NOTHING IS SHOWN HERE: xllamacpp is not installed"
    if name == "mlx" and not has_mlx():
        return "NOTHING IS SHOWN HERE: mlx and mlx-lm are not installed"
    if name in VLLM and VLLM_VARIABLE not in os.environ:
        return f"NOTHING IS SHOWN HERE: {VLLM_VARIABLE} names no Python that has vLLM"
    return ""


@dataclass
class EngineCases:
    """Loads the engines. The embedded model is converted once, into `folder`."""

    folder: Path
    device: str = "cpu"
    gguf_type: str = "f32"
    """The type of the weights in the GGUF file."""
    threads: int | None = 1
    """None: each engine decides itself."""
    sprout: Path = field(default_factory=lambda: resolve_folder("sprout"))

    @cached_property
    def format(self) -> Format:
        return load_format(self.sprout, load_tokenizer(self.sprout))

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        return tuple(self.format.tokenizer.vocabulary)

    @cached_property
    def gguf(self) -> Path:
        return convert_qwen3(self.sprout, self.folder / "sprout.gguf", self.gguf_type)

    @cached_property
    def quantised_gguf(self) -> Path:
        return convert_qwen3(self.sprout, self.folder / "quantised.gguf", QUANTISED_TYPE)

    @cached_property
    def mlx(self) -> Path:
        return convert_sprout(self.folder / "mlx")

    @cached_property
    def sprout_diffusion(self) -> tuple[Path, tuple[bytes, ...], dict[str, Any]]:
        """The folder of the model, the vocabulary with its mask token, and its settings."""
        folder = resolve_folder("sprout-diffusion")
        settings = find_diffusion(folder)
        assert settings is not None
        return folder, tuple(load_tokenizer(folder).vocabulary), {**settings, **DIFFUSION}

    def prompt(self, text: str, thinking: bool | None = None) -> Prompt:
        return self.format.render([user(text)], options=RenderOptions(thinking=thinking))

    def load(self, name: str, exact: bool = False) -> Engine:
        """In this process; vLLM in a process of its own."""
        options = EngineOptions(exact=exact, threads=self.threads, context=CONTEXT, max_running=RUNNING)
        match name:
            case "torch":
                from palaver.engines.torch import load as load_torch

                options = replace(options, compiled=False)
                return load_torch(self.sprout, vocabulary=self.vocabulary, device=self.device, options=options)
            case "compiled" | "quantised":
                from palaver.engines.compiled.engine import load as load_compiled

                model = self.sprout if name == "compiled" else self.quantised_gguf
                return load_compiled(model, vocabulary=self.vocabulary, options=options)
            case "llamacpp":
                from palaver.engines.llamacpp.engine import load as load_llamacpp

                return load_llamacpp(self.gguf, vocabulary=self.vocabulary, options=options)
            case "mlx":
                from palaver.engines.mlx.engine import load as load_mlx

                return load_mlx(self.mlx, vocabulary=self.vocabulary, device=self.device, options=options)
            case "diffusion":
                from palaver.engines.diffusion.engine import load as load_diffusion

                folder, vocabulary, settings = self.sprout_diffusion
                return load_diffusion(
                    folder, vocabulary=vocabulary, trained=settings, device=self.device, options=options
                )
            case "vllm" | "vllm-native":
                return ThreadedEngine(self.spec(name))
            case _:
                return self._scripted()

    def spec(self, name: str) -> EngineSpec:
        """The same engine in a process of its own."""
        common: dict[str, Any] = {"device": self.device, "context": CONTEXT, "max_running": RUNNING}
        match name:
            case "quantised":
                return EngineSpec("compiled", self.quantised_gguf, self.vocabulary, compiled=True, **common)
            case "llamacpp":
                return EngineSpec("llamacpp", self.gguf, self.vocabulary, **common)
            case "mlx":
                return EngineSpec("mlx", self.mlx, self.vocabulary, **common)
            case "diffusion":
                folder, vocabulary, settings = self.sprout_diffusion
                return EngineSpec("diffusion", folder, vocabulary, diffusion=settings, **common)
            case "vllm" | "vllm-native":
                python = Path(os.environ[VLLM_VARIABLE])
                common |= {
                    "dtype": "float32",
                    "compiled": False,
                    "python": python,
                    "native_sampling": name == "vllm-native",
                }
                return EngineSpec("vllm", self.sprout, self.vocabulary, **common)
            case _:
                return EngineSpec("torch", self.sprout, self.vocabulary, compiled=name == "compiled", **common)

    def _scripted(self) -> ScriptedEngine:
        tokenizer = self.format.tokenizer
        think, close, end = (tokenizer.control[name] for name in ("<think>", "</think>", "<|im_end|>"))
        script = tokenizer.encode((think, SCRIPT, close, SCRIPT, end))
        ends = frozenset({end})
        return ScriptedEngine([script], self.vocabulary, context_length=CONTEXT, end_ids=ends, strict=True)
