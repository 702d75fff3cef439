"""`palaver inspect`: describes a model: its size, engine, defaults and format."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import CompileOption, ExactOption, report_errors

if TYPE_CHECKING:
    from palaver.engines.base import EngineInfo
    from palaver.sampling import Sampling


def inspect(
    model: Annotated[str | None, typer.Argument(help=strings.MODEL_TO_INSPECT)] = None,
    device: Annotated[str | None, typer.Option("--device", help=strings.DEVICE)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help=strings.DTYPE)] = None,
    exact: ExactOption = False,
    compiled: CompileOption = None,
) -> None:
    """Say what a model is: whether it fits, its context, its defaults, how it talks, what is reused."""
    from palaver.commands.format_trials.report import describe_facts, describe_variables
    from palaver.engines.core.options import EngineOptions
    from palaver.engines.loader import describe_fit, load_engine
    from palaver.formats.loader import load_format
    from palaver.formats.tokenizer import load_tokenizer
    from palaver.models.resolver import DEFAULT_MODEL, resolve_folder

    with report_errors():
        folder = resolve_folder(model or DEFAULT_MODEL)
        print(describe_fit(folder, device=device, dtype=dtype, compiled=compiled))
        tokenizer = load_tokenizer(folder)
        options = EngineOptions(exact=exact, compiled=compiled)
        engine = load_engine(folder, vocabulary=tokenizer.vocabulary, device=device, dtype=dtype, options=options)
        info = engine.info
        asyncio.run(engine.close())
        facts = load_format(folder, tokenizer).facts
        for name, value in (*_describe_engine(info), *describe_facts(facts), *describe_variables(facts)):
            print(f"{name}: {value}")


def _describe_engine(info: EngineInfo) -> Iterator[tuple[str, str]]:
    from palaver.engines.base import COMPILED

    yield strings.INSPECT_MODEL, Path(info.model).name
    yield strings.INSPECT_DEVICE, f"{info.device}, {info.dtype}"
    yield strings.INSPECT_CONTEXT, strings.INSPECT_TOKENS.format(count=f"{info.context_length:,}")
    yield strings.INSPECT_VOCABULARY, strings.INSPECT_TOKENS.format(count=f"{info.vocabulary_size:,}")
    yield strings.INSPECT_REUSE, info.reuse
    yield strings.INSPECT_STEPS, strings.INSPECT_COMPILED if info.steps == COMPILED else info.steps
    yield strings.INSPECT_EXACTNESS, info.exactness
    yield strings.INSPECT_FINGERPRINT, info.fingerprint
    yield strings.INSPECT_DEFAULTS, _describe_defaults(info.defaults)


def _describe_defaults(sampling: Sampling) -> str:
    from dataclasses import asdict

    from palaver.sampling import Sampling

    plain = asdict(Sampling())
    changed = {name: value for name, value in asdict(sampling).items() if value != plain[name]}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or strings.INSPECT_NO_DEFAULTS
