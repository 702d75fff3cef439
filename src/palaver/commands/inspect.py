"""`palaver inspect`: describes a model: its size, engine, defaults and format."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands.options import CompileOption, ExactOption, report_errors

if TYPE_CHECKING:
    from palaver.engines.base import EngineInfo
    from palaver.sampling import Sampling


def inspect(
    model: Annotated[str | None, typer.Argument(help="A folder, a hub id (owner/name), or sprout.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 or mps.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = None,
    exact: ExactOption = False,
    compiled: CompileOption = None,
) -> None:
    """Say what a model is: whether it fits, its context, its defaults, how it talks, what is reused."""
    from palaver.commands.format_trials.report import describe_facts, describe_variables
    from palaver.engines.torch import EngineOptions, describe_fit, load
    from palaver.formats.loader import load_format
    from palaver.formats.tokenizer import load_tokenizer
    from palaver.models.resolver import DEFAULT_MODEL, resolve_folder

    with report_errors():
        folder = resolve_folder(model or DEFAULT_MODEL)
        print(describe_fit(folder, device=device, dtype=dtype, compiled=compiled))
        tokenizer = load_tokenizer(folder)
        options = EngineOptions(exact=exact, compiled=compiled)
        engine = load(folder, vocabulary=tokenizer.vocabulary, device=device, dtype=dtype, options=options)
        info = engine.info
        asyncio.run(engine.close())
        facts = load_format(folder, tokenizer).facts
        for name, value in (*_describe_engine(info), *describe_facts(facts), *describe_variables(facts)):
            print(f"{name}: {value}")


def _describe_engine(info: EngineInfo) -> Iterator[tuple[str, str]]:
    from palaver.engines.base import COMPILED

    yield "model", Path(info.model).name
    yield "runs on", f"{info.device}, {info.dtype}"
    yield "context", f"{info.context_length} tokens"
    yield "vocabulary", f"{info.vocabulary_size} tokens"
    yield "what was computed before is reused", info.reuse
    yield "the next tokens are computed by", "a compiled step" if info.steps == COMPILED else info.steps
    yield "the bits of a reply", info.exactness
    yield "fingerprint of its replies", info.fingerprint
    yield "sampling defaults", _describe_defaults(info.defaults)


def _describe_defaults(sampling: Sampling) -> str:
    from dataclasses import asdict

    from palaver.sampling import Sampling

    plain = asdict(Sampling())
    changed = {name: value for name, value in asdict(sampling).items() if value != plain[name]}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "none of its own"
