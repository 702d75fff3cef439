"""`palaver replay`: generates a stored reply again and compares the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from palaver.commands import strings
from palaver.commands.options import (
    EXIT_FAILED,
    DatabaseOption,
    DataOption,
    EngineFlags,
    ModelOption,
    store_context,
    with_engine_flags,
)

if TYPE_CHECKING:
    from palaver.chat.continuation import ReplayResult
    from palaver.chat.engine_choice import LoadOptions
    from palaver.store import Store

Fingerprints: TypeAlias = tuple[tuple[int, str], ...]
"""Pairs of first token and fingerprint, one for each engine that computed a part of a reply."""


@with_engine_flags("device", "exact", "compiled", "engine_python")
def replay(
    id: Annotated[str, typer.Argument(metavar="ID", help=strings.REPLY_ID)],
    model: ModelOption = None,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Generate a stored reply again from its settings and seed, and say whether it is the same."""
    import asyncio

    with store_context(data, database) as store:
        reply_id = _reply_id(store, id)
        stored = store.messages.get(reply_id).reply
        settings = stored.settings if stored else None
        name = model or (settings.model if settings else None)
        recorded = settings.fingerprints if settings else ()
        options = _recorded_options(recorded, flags.load_options())
        result, fingerprint = asyncio.run(_replay(store, reply_id, name, options))
        for line in _describe_engines(recorded, fingerprint):
            print(line)
        if result.same:
            print(strings.REPLAY_SAME.format(tokens=f"{len(result.replayed):,}"))
            return
        counts = {"recorded": f"{len(result.recorded):,}", "replayed": f"{len(result.replayed):,}"}
        print(strings.REPLAY_DIFFERENT.format(position=result.difference, **counts))
    raise typer.Exit(EXIT_FAILED)


def _recorded_options(recorded: Fingerprints, options: LoadOptions) -> LoadOptions:
    """Load options as recorded with the reply; explicit flags take precedence."""
    from dataclasses import replace

    from palaver.chat.engine_choice import LLAMACPP, MLX, VLLM
    from palaver.engines.base import (
        APPROXIMATE_RUNNER,
        BATCHED,
        COMPILED_RUNNER,
        DIFFUSION_RUNNER,
        EXACT_CACHE,
        LLAMACPP_RUNNER,
        MLX_RUNNER,
        NATIVE_SAMPLER,
        VLLM_RUNNER,
        Fingerprint,
    )

    original = Fingerprint.parse(recorded[0][1]) if recorded else None
    if original is None:
        return options
    compiled = original.runner == COMPILED_RUNNER
    exact = options.exact or (original.exactness != BATCHED and not compiled)
    device = options.device or ("cpu" if original.device == "cpu" else None)
    if original.runner == LLAMACPP_RUNNER:  # some types of weights are exact with their cache in the ordinary mode, too
        exact = options.exact or EXACT_CACHE in original.build
        return replace(options, device=device, exact=exact, engine=LLAMACPP)
    if original.runner == MLX_RUNNER:
        return replace(options, device=device, exact=exact, engine=MLX)
    if original.runner == VLLM_RUNNER:
        return replace(options, dtype=original.dtype, engine=VLLM, native_sampling=original.sampler == NATIVE_SAMPLER)
    recorded_dtype = original.dtype if original.device == "cpu" and not compiled else None
    dtype = options.dtype or recorded_dtype  # compiled steps compute in float32, whatever the type of the weights
    if original.runner in (DIFFUSION_RUNNER, APPROXIMATE_RUNNER):
        return replace(options, device=device, dtype=dtype, approximate_cache=original.runner == APPROXIMATE_RUNNER)
    return replace(
        options,
        device=device,
        dtype=dtype,
        exact=exact,
        compiled=options.compiled if options.compiled is not None or compiled else False,
    )


def _describe_engines(recorded: Fingerprints, fingerprint: str) -> Iterator[str]:
    if not recorded:
        yield strings.RECORDED_UNKNOWN
    for start, one in recorded:
        yield (strings.RECORDED_BY_FROM if start else strings.RECORDED_BY).format(engine=one, start=start)
    same = len(recorded) == 1 and recorded[0] == (0, fingerprint)
    yield strings.REPLAYED_BY.format(engine=strings.SAME_ENGINE if same else fingerprint)


def _reply_id(store: Store, id: str) -> str:
    from palaver.store import NotFound

    try:
        return store.messages.get(id).id
    except NotFound:
        head = store.conversations.get(id).head_id
        if head is None:
            raise
        return head


async def _replay(store: Store, reply_id: str, name: str | None, options: LoadOptions) -> tuple[ReplayResult, str]:
    """The comparison, and the fingerprint of the engine that ran it."""
    from palaver.chat.continuation import replay as replay_reply
    from palaver.chat.model_loader import ModelLoader
    from palaver.models.resolver import DEFAULT_MODEL

    model = await ModelLoader(options).load(name or DEFAULT_MODEL, lambda *_: None)
    try:
        return await replay_reply(store, model, reply_id), model.engine.info.fingerprint
    finally:
        await model.engine.close()
