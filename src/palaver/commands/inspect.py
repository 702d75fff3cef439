"""`palaver inspect`: describes a model: its size, engine, defaults and format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import (
    EngineFlags,
    report_errors,
    with_engine_flags,
)

if TYPE_CHECKING:
    from palaver.chat.engine_choice import LoadOptions
    from palaver.engines.base import EngineInfo
    from palaver.formats.base import Format
    from palaver.formats.tokenizer import FastTokenizer
    from palaver.models.resolver import ResolvedModel
    from palaver.sampling import Sampling


SECONDS = 1.0
"""How long the speed is measured."""
PROMPT_TOKENS = 16


@with_engine_flags(
    "device",
    "dtype",
    "exact",
    "compiled",
    "engine",
    "engine_python",
    "native_sampling",
    "gpu_layers",
    "threads",
    "mmproj",
    "approximate_cache",
)
def inspect(
    model: Annotated[str | None, typer.Argument(help=strings.MODEL_TO_INSPECT)] = None,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
) -> None:
    """Say what a model is: which engine runs it and how fast, whether it fits, its defaults, how it talks."""
    import asyncio

    from palaver.chat.engine_choice import check_engine_options
    from palaver.chat.model import load_model_format
    from palaver.models.resolver import DEFAULT_MODEL, resolve_model

    with report_errors():
        resolved = resolve_model(model or DEFAULT_MODEL)
        options = replace(flags.load_options(), max_running=1)
        picked = check_engine_options(resolved, options)
        print(_describe_fit(resolved, picked, options))
        tokenizer, format = load_model_format(resolved, options)
        info, speed = asyncio.run(_measure(resolved, tokenizer, options))
        for name, value in (
            *_describe_choice(resolved, picked, options),
            *_describe_engine(info),
            *_describe_speed(speed),
        ):
            print(f"{name}: {value}")
        for name, value in _describe_format(format):
            print(f"{name}: {value}")


def _describe_fit(model: ResolvedModel, engine: str, options: LoadOptions) -> str:
    from palaver.chat.engine_choice import COMPILED, DIFFUSION, ELSEWHERE, MLX

    if engine in ELSEWHERE:
        return strings.INSPECT_ELSEWHERE
    if engine == MLX:
        from palaver.engines.mlx.engine import describe_fit as describe_mlx_fit

        return describe_mlx_fit(model.folder, options.device, options.dtype)
    if engine == COMPILED and model.gguf is not None:
        from palaver.engines.loader import describe_gguf_fit

        return describe_gguf_fit(model.gguf)
    if model.gguf is not None:
        from palaver.engines.llamacpp.engine import fit
        from palaver.gguf import read_gguf

        used = (model.gguf, options.mmproj or model.mmproj, options.draft_model)
        return str(fit(*(read_gguf(path) for path in used if path is not None)))
    from palaver.engines.loader import describe_fit

    compiled = False if engine == DIFFUSION else options.compiled
    return describe_fit(model.folder, device=options.device, dtype=options.dtype, compiled=compiled)


def _describe_choice(model: ResolvedModel, engine: str, options: LoadOptions) -> Iterator[tuple[str, str]]:
    from palaver.chat.engine_choice import AUTO, COMPILED, ENGINE_FILES, file_kind

    because = strings.INSPECT_BECAUSE if options.engine == AUTO else strings.INSPECT_CHOSEN
    files = ENGINE_FILES[COMPILED if engine == COMPILED else file_kind(model)]
    yield strings.INSPECT_ENGINE, because.format(engine=engine, files=files)


def _describe_speed(speed: float) -> Iterator[tuple[str, str]]:
    if speed:
        yield strings.INSPECT_SPEED, strings.INSPECT_TOKENS_PER_SECOND.format(count=f"{speed:,.0f}")


def _describe_format(format: Format) -> Iterator[tuple[str, str]]:
    from palaver.commands.format_report import describe_facts, describe_variables
    from palaver.formats.format import TemplateFormat

    assert isinstance(format, TemplateFormat)
    yield from describe_facts(format.facts)
    yield from describe_variables(format.facts)


async def _measure(model: ResolvedModel, tokenizer: FastTokenizer, options: LoadOptions) -> tuple[EngineInfo, float]:
    """What the engine says of itself, and the tokens that one reply gets in a second; 0 if it gets none."""
    from palaver.commands.ask import load_engine
    from palaver.generation import Prompt, Step
    from palaver.sampling import Sampling

    engine = await load_engine(model, tokenizer, options)
    times: list[float] = []
    try:
        length = min(PROMPT_TOKENS, engine.info.context_length - 1)
        ids = tuple(token % engine.info.vocabulary_size for token in range(length))
        greedy = Sampling(temperature=0, banned_ids=tuple(sorted(engine.info.end_ids)))
        async with engine.generate(Prompt(ids), greedy) as outputs:
            async for output in outputs:
                if isinstance(output, Step):
                    times.append(time.monotonic())
                    if times[-1] - times[0] >= SECONDS:
                        break
        return engine.info, (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    finally:
        await engine.close()


def _describe_engine(info: EngineInfo) -> Iterator[tuple[str, str]]:
    from palaver.engines.base import COMPILED

    yield strings.INSPECT_MODEL, Path(info.model).name
    yield strings.INSPECT_DEVICE, f"{info.device}, {info.dtype}"
    yield strings.INSPECT_CONTEXT, strings.INSPECT_TOKENS.format(count=f"{info.context_length:,}")
    yield strings.INSPECT_VOCABULARY, strings.INSPECT_TOKENS.format(count=f"{info.vocabulary_size:,}")
    yield strings.INSPECT_ACCEPTS, ", ".join((strings.INSPECT_TEXT, *info.media))
    yield strings.INSPECT_REUSE, info.reuse
    yield strings.INSPECT_STEPS, strings.INSPECT_COMPILED if info.steps == COMPILED else info.steps
    yield strings.INSPECT_EXACTNESS, info.exactness
    if info.lacks:
        yield strings.INSPECT_LACKS, "; ".join(f"{capability}: {why}" for capability, why in info.lacks.items())
    yield strings.INSPECT_FINGERPRINT, info.fingerprint
    yield strings.INSPECT_DEFAULTS, _describe_defaults(info.defaults)


def _describe_defaults(sampling: Sampling) -> str:
    from dataclasses import asdict

    from palaver.sampling import Sampling

    plain = asdict(Sampling())
    changed = {name: value for name, value in asdict(sampling).items() if value != plain[name]}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or strings.INSPECT_NO_DEFAULTS
