"""Forgetting a conversation frees the cache entries that only it used."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.core.prefix_cache import MAX_CONVERSATIONS, PAGE_SIZE, ConversationRefs, PageTree
from palaver.engines.torch import TorchEngine, load
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import Run, continued, run
from tests.engines.test_prefix_cache import branches, common_length, insert

GREEDY = Sampling(temperature=0, max_tokens=8, banned_ids=(tiny.END,))
SYSTEM = tuple(b"You are a helpful assistant who answers every question as briefly as it can be done. ")


def cached(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.cached_tokens


async def talk(engine: TorchEngine, name: str, turns: int = 3) -> Prompt:
    """A few turns of a conversation; its last prompt."""
    history = SYSTEM
    for turn in range(turns):
        history += tuple(f"{name} asks question number {turn}, which is a longer one.".encode())
        prompt = Prompt(history, conversation=name)
        history += tuple((await run(engine, prompt, GREEDY)).ids)
    return prompt


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next", "mamba"])
async def test_what_one_conversation_alone_used_is_freed(family: str, folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY)
    before = engine.statistics.cache
    await talk(engine, "Ann")
    assert engine.statistics.cache.kept_bytes > 0
    await engine.forget("Ann")
    after = engine.statistics.cache
    assert (after.kept_bytes, after.used_bytes) == (0, before.used_bytes)
    assert after.evictions == 0, "nothing was pushed out: it was not needed any more"
    again = await talk(engine, "Ann", turns=1)
    assert cached(await run(engine, again, GREEDY)) == len(again)
    await engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
async def test_what_another_conversation_shares_stays(family: str, folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY)
    ann, bob = await talk(engine, "Ann"), await talk(engine, "Bob")
    await engine.forget("nobody")  # by then all that ended is cached
    before = engine.statistics.cache.kept_bytes
    await engine.forget("Ann")
    assert 0 < engine.statistics.cache.kept_bytes < before
    assert cached(await run(engine, bob, GREEDY)) == len(bob)
    only_system = len(SYSTEM) if family == "qwen3" else 0  # a snapshot is after a whole prompt, never within one
    assert cached(await run(engine, ann, GREEDY)) == only_system
    await engine.forget("Ann")
    await engine.forget("Bob")
    assert engine.statistics.cache.kept_bytes == 0
    await engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
async def test_the_same_words_in_two_conversations_are_freed_with_the_second(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY)
    prompts = [Prompt(SYSTEM, conversation=name) for name in ("Ann", "Bob")]
    for prompt in prompts:
        await run(engine, prompt, GREEDY)
    await engine.forget("nobody")  # by then all that ended is cached
    before = engine.statistics.cache.kept_bytes
    await engine.forget("Ann")
    assert engine.statistics.cache.kept_bytes == before
    await engine.forget("Bob")
    assert engine.statistics.cache.kept_bytes == 0
    await engine.close()


async def test_what_has_no_name_is_never_forgotten(engine: TorchEngine) -> None:
    await run(engine, Prompt(SYSTEM), GREEDY)
    await talk(engine, "Ann")
    await engine.forget("Ann")
    assert cached(await run(engine, Prompt(SYSTEM, conversation="Bob"), GREEDY)) == len(SYSTEM)


async def test_a_reply_that_runs_goes_on_and_is_the_same(engine: TorchEngine) -> None:
    prompt = Prompt(SYSTEM, conversation="Ann")
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=60, banned_ids=(tiny.END,))
    alone = await run(engine, prompt, sampling)
    running = asyncio.create_task(run(engine, prompt, sampling))
    while not running.done():
        await engine.forget("Ann")
    assert running.result().ids == alone.ids
    assert (await run(engine, continued(prompt, alone.ids[:20]), sampling)).ids == alone.ids[20:]


async def test_a_closed_engine_has_nothing_to_forget(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    await engine.close()
    await engine.forget("Ann")


def test_an_entry_of_very_many_conversations_is_shared_by_all() -> None:
    refs = ConversationRefs("0")
    for name in range(MAX_CONVERSATIONS + 1):
        refs.add(str(name))
    assert not any(refs.release(str(name)) for name in range(MAX_CONVERSATIONS + 1))
    two = ConversationRefs("0")
    two.add("1")
    assert [two.release(name) for name in ("2", "0", "0", "1")] == [False, False, False, True]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("abc"), branches), min_size=1, max_size=8))
def test_the_tree_keeps_exactly_what_the_others_inserted(inserted: list[tuple[str, list[int]]]) -> None:
    pages: PageTree[Any] = PageTree()
    for conversation, keys in inserted:
        insert(pages, "", keys, conversation)
    pages.forget("a")
    others = [keys for conversation, keys in inserted if conversation != "a"]
    for conversation, keys in inserted:
        found = pages.match("", keys).tokens
        shared = max((common_length(keys, other) for other in others), default=0)
        assert found == len(keys) if conversation != "a" else shared <= found < shared + PAGE_SIZE
    for conversation in "bc":
        pages.forget(conversation)
    assert (len(pages), pages.nbytes) == (0, 0)
