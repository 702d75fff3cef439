"""The llama.cpp engine beside what all engines do (test_conformance.py): its cache, passes, files and options."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT, Fingerprint
from palaver.engines.core import gguf_metadata
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import ThreadCounts
from palaver.engines.llamacpp import engine as engine_module
from palaver.engines.llamacpp import metadata
from palaver.engines.llamacpp.context import Aborted, Context
from palaver.engines.llamacpp.engine import CachePlan, LlamaEngine, load
from palaver.engines.llamacpp.state_files import StateFiles, remove_states
from palaver.errors import BadParameter, BrokenModel, CacheFull, ContextOverflow
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
from palaver.generation import Ended, Finish, Prefilled, Prompt
from palaver.gguf import read_gguf
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.adapter_files import write_peft_adapter
from tests.engines import tiny
from tests.engines.generate import Run, continued, run
from tests.gguf_files import (
    CONTROL,
    NORMAL,
    convert_adapter,
    convert_qwen3,
    decoder_metadata,
    decoder_tensors,
    make_mamba,
    qwen3_metadata,
    qwen3_tensors,
    write_gguf,
)
from tests.tiny import byte_level

END = 2
GREEDY = Sampling(temperature=0, max_tokens=12, banned_ids=(END, 0))
SAMPLED = Sampling(
    temperature=0.9, top_k=40, top_p=0.95, seed=5, repetition_penalty=1.1, frequency_penalty=0.2, max_tokens=12,
    banned_ids=(END, 0), logprobs=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_qwen3(resolve_folder("sprout"), tmp_path_factory.mktemp("gguf") / "sprout.gguf")


@pytest.fixture(scope="module")
def vocabulary(sprout: Path) -> tuple[bytes, ...]:
    return tuple(load_gguf_tokenizer(read_gguf(sprout)).vocabulary)


Opens = Callable[..., LlamaEngine]


@pytest.fixture
async def opens(sprout: Path, vocabulary: tuple[bytes, ...]) -> AsyncIterator[Opens]:
    opened: list[LlamaEngine] = []

    def make(**options: object) -> LlamaEngine:
        chosen = EngineOptions(**{"threads": 1, "context": 512, "max_running": 4, **options})  # type: ignore[arg-type]
        opened.append(load(sprout, vocabulary=vocabulary, options=chosen))
        return opened[-1]

    yield make
    for engine in opened:
        await engine.close()


def prompt_of(text: str, **fields: str) -> Prompt:
    """One token for each character: any ids will do."""
    return Prompt(tuple(300 + ord(character) for character in text), **fields)  # type: ignore[arg-type]


def rename(prompts: list[Prompt], owner: str) -> list[Prompt]:
    """The same prompts of another owner, who has no part in the cache."""
    return [replace(prompt, owner=owner) for prompt in prompts]


def new_tokens(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.prompt_tokens - out.prefilled.cached_tokens


async def test_an_exact_reply_in_fixed_passes(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors where groups of rows aren't exact, each sequence is computed in passes of 16 rows."""
    monkeypatch.setattr(engine_module, "probe_groups", lambda context, group: False)
    engine, prompt = opens(exact=True), prompt_of("Tell me a story.")
    assert engine.info.exactness in (BY_TEXT, BY_CACHE)
    uncut = await run(engine, prompt, SAMPLED)
    for cut in (1, 5, 11):
        assert uncut.ids[:cut] + (await run(engine, continued(prompt, uncut.ids[:cut]), SAMPLED)).ids == uncut.ids


@pytest.mark.parametrize("kind", ["q8_0", "f32", "f16", "bf16"])
async def test_a_reply_is_the_same_beside_others(
    kind: str, tmp_path: Path, vocabulary: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is split into other chunks, and its tokens share their passes: the bits are those of a reply alone,
    also with more threads for long chunks."""
    path = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf", kind)
    monkeypatch.setattr(ThreadCounts, "choose", lambda *_: ThreadCounts(1, 2))
    engine = load(path, vocabulary=vocabulary, options=EngineOptions(context=512, max_running=4))
    if engine.info.exactness != BY_CACHE:
        pytest.skip(f"NOTHING IS SHOWN HERE: on this processor, bits {engine.info.exactness}")
    prompts = [prompt_of(f"{number} is the first of {number * 30} others " * 4, owner="a") for number in range(4)]
    alone = [await run(engine, prompt, SAMPLED) for prompt in prompts]
    fresh = rename(prompts, "b")
    together = await asyncio.gather(*(run(engine, prompt, SAMPLED) for prompt in fresh))
    cut = await asyncio.gather(
        *(run(engine, continued(p, out.ids[:5]), SAMPLED) for p, out in zip(fresh, alone, strict=True))
    )
    lost = await asyncio.gather(
        *(run(engine, continued(p, out.ids[:7]), SAMPLED) for p, out in zip(rename(prompts, "c"), alone, strict=True))
    )
    for one, other, rest, again in zip(alone, together, cut, lost, strict=True):
        assert [step.logprob for step in other.steps] == [step.logprob for step in one.steps]
        assert [step.logprob for step in rest.steps] == [step.logprob for step in one.steps[5:]]
        assert [step.logprob for step in again.steps] == [step.logprob for step in one.steps[7:]]
        assert again.prefilled is not None
        assert again.prefilled.cached_tokens == 0
    first, second = await asyncio.gather(*(run(engine, rename(prompts, "d")[0], SAMPLED, choice) for choice in (0, 1)))
    assert [step.logprob for step in first.steps] == [step.logprob for step in alone[0].steps]
    assert second.prefilled is not None
    assert second.prefilled.cached_tokens == len(prompts[0]), "it starts from a copy of the other's cache"
    assert second.ids != first.ids
    await engine.close()


async def test_a_lost_reply_is_computed_as_it_was_generated(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a pass, together with the next tokens of others; a very long one in chunks, like a prompt."""
    engine, prompt, sizes = opens(), prompt_of("Tell me a story."), list[list[int]]()
    uncut, decode = await run(engine, prompt, SAMPLED), Context.decode

    def record(self: Context, chunks: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append([len(ids) for _, _, ids in chunks])
        return decode(self, chunks, *arguments, **options)

    monkeypatch.setattr(Context, "decode", record)
    out = await run(engine, replace(continued(prompt, uncut.ids[:6]), owner="another"), SAMPLED)
    assert uncut.ids[:6] + out.ids == uncut.ids
    assert sizes == [[16], *[[1, 1]] * 11]  # with F32 weights a single token has a pair
    sizes.clear()
    monkeypatch.setattr(engine._runner, "max_replayed", 5)
    await run(engine, replace(continued(prompt, uncut.ids[:6]), owner="a third"), SAMPLED)
    assert sizes == [[21, 3], *[[1, 1]] * 6]


async def test_small_models_of_half_floats_have_a_pass_for_each_sequence(
    tmp_path: Path, vocabulary: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost reply is divided into passes as before: the last token of its prompt has one of its own."""
    path, prompt = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf", "f16"), prompt_of("Hi! " * 40)
    engine = load(path, vocabulary=vocabulary, options=EngineOptions(threads=1, context=512, max_running=2))
    passes, decode = list[tuple[int, int]](), Context.decode

    def record(self: Context, chunks: Any, *arguments: Any, **options: Any) -> Any:
        passes.extend((start, len(ids)) for _, start, ids in chunks)
        return decode(self, chunks, *arguments, **options)

    monkeypatch.setattr(Context, "decode", record)
    uncut = await run(engine, prompt, SAMPLED)
    expected = [(0, 128), (128, 31), *((position, 1) for position in range(159, 171))]
    assert passes == expected
    for kept in (1, 6):
        passes.clear()
        out = await run(engine, replace(continued(prompt, uncut.ids[:kept]), owner=f"lost {kept}"), SAMPLED)
        assert uncut.ids[:kept] + out.ids == uncut.ids
        assert passes == expected
    await engine.close()


async def test_contexts_of_sequences_are_opened_when_they_are_needed(
    tmp_path: Path, vocabulary: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start waits for one. The others are opened for requests at the same time, or while there are none."""
    path = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf", "f16")
    all_open, open_next = threading.Event(), Context.open_next
    allowed = threading.Event()

    def open_another(self: Context) -> bool:
        another = allowed.is_set() and open_next(self)
        if allowed.is_set() and not another:
            all_open.set()
        return another or not allowed.is_set()

    monkeypatch.setattr(Context, "open_next", open_another)
    engine = load(path, vocabulary=vocabulary, options=EngineOptions(threads=1, context=512, max_running=4))

    def count() -> int:
        return sum(place is not None for place in engine._loaded[0].context._places)

    assert count() == 1
    first = await run(engine, prompt_of("Hello."), GREEDY)
    assert count() == 1
    await asyncio.gather(*(run(engine, prompt_of(f"{number} is a number."), GREEDY) for number in range(2)))
    assert count() == 3
    allowed.set()
    assert await asyncio.to_thread(all_open.wait, 60)
    assert count() == 4
    assert (await run(engine, prompt_of("Hello."), GREEDY)).ids == first.ids
    await engine.close()


async def test_more_requests_than_slots_wait_and_keep_their_prefixes(opens: Opens) -> None:
    engine = opens(max_running=2)
    prompts = [prompt_of(f"{number} is the number of this prompt, which is its own.") for number in range(7)]
    outs = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in prompts))
    for prompt, out in zip(prompts, outs, strict=True):
        again = await run(engine, continued(prompt, out.ids[:6]), GREEDY)
        assert out.ids[:6] + again.ids == out.ids
        assert new_tokens(again) <= 1
    assert engine.statistics.cache.evictions > 0
    assert engine.statistics.cache.used_bytes <= engine.statistics.cache.limit_bytes


async def test_shared_cells_evict_and_refuse(opens: Opens, sprout: Path) -> None:
    size = metadata.token_bytes(read_gguf(sprout), float32=False)
    engine = opens(cache_bytes=int(700 * size / 0.75), context=600, max_running=4)
    for number in range(6):
        prompt = prompt_of(f"{number}" + "x" * 200)
        out = await run(engine, prompt, GREEDY)
        assert len(out.ids) == 12
    many = [prompt_of(f"{number}" + "y" * 300) for number in range(4)]
    outs = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in many))
    assert [len(out.ids) for out in outs] == [12] * 4
    with pytest.raises((CacheFull, ContextOverflow)):
        await run(engine, prompt_of("z" * 2000), GREEDY)


@pytest.mark.parametrize("options", [{"max_running": 6}, {"cache_bytes": 600_000}], ids=["own cells", "shared cells"])
async def test_a_window_that_has_moved_is_not_cut(
    options: dict[str, Any], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp drops keys that layers with a window no longer see: from saved states, and where others need cells."""
    folder, tokens = folder_of("gemma3"), [*(chr(300 + number) for number in range(tiny.SIZE))]
    kinds = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [NORMAL] * len(tokens)}
    names = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": ["a b"]}
    path = write_gguf(tmp_path / "gemma.gguf", decoder_metadata(folder) | kinds | names, decoder_tensors(folder))
    chance, settings = random.Random(3), Sampling(temperature=0, max_tokens=1, logprobs=2, banned_ids=(tiny.END,))
    texts = [tuple(chance.randrange(256) for _ in range(length)) for length in (200, 200, 200, 200, 290)]
    cut = [(*text[:end], 7, 8) for end in (150, 50, 60) for text in texts]
    engine, alone = (
        load(path, vocabulary=tiny.VOCABULARY, options=EngineOptions(threads=1, context=512, **given))
        for given in (options, {"max_running": 1})
    )
    cached = 0
    for number, text in enumerate((*texts, *cut)):
        reply = await run(engine, Prompt(text), settings)
        fresh = await run(alone, Prompt(text, owner=str(number)), settings)
        assert reply.steps[0].logprob == pytest.approx(fresh.steps[0].logprob, abs=0.05)
        cached += len(text) - new_tokens(reply)
    assert cached > 600, "what can be cut is used"
    for one in (engine, alone):
        await one.close()


@pytest.mark.parametrize("exact", [False, True])
async def test_a_recurrent_state_is_reused_whole(exact: bool, tmp_path: Path) -> None:
    definition = byte_level(merges=())
    options = EngineOptions(threads=1, max_running=3, exact=exact)
    engine = load(make_mamba(tmp_path / "mamba.gguf", definition), vocabulary=(b"x",) * 261, options=options)
    assert engine.info.reuse == "snapshots"
    prompt, sampling = Prompt(tuple(b"A recurrent model")), Sampling(temperature=0.7, seed=2, max_tokens=10)
    uncut = await run(engine, prompt, sampling)
    assert new_tokens(await run(engine, prompt, sampling)) == 0
    for cut in range(1, 11):
        stopped = await run(engine, prompt, sampling, stop_after=cut)
        assert stopped.ids == uncut.ids[:cut]
        again = await run(engine, continued(prompt, stopped.ids), sampling)
        assert stopped.ids + again.ids == uncut.ids
    turn = Prompt((*prompt.context_ids, *uncut.ids, *b"More"))
    assert new_tokens(await run(engine, turn, sampling)) == len("More") + 1
    assert new_tokens(await run(engine, Prompt(tuple(b"A recurrent thing")), sampling)) == 17
    await engine.close()


@pytest.mark.parametrize("company", [False, True])
async def test_a_stop_ends_the_pass_of_a_long_prompt(
    company: bool, opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass ends if it is for this request alone: others must not lose what it computed for them."""
    engine, prompt = opens(), prompt_of("x" * 500)
    expected = await run(engine, prompt, GREEDY)
    interrupted, decode = 0, Context.decode

    def decode_and_stop(self: Context, *arguments: Any, **options: Any) -> Any:
        nonlocal interrupted
        if len(arguments[0][0][2]) > 100 and bound.wait(60):
            generation.stop()
        try:
            return decode(self, *arguments, **options)
        except Aborted:
            interrupted += 1
            raise

    bound = threading.Event()
    monkeypatch.setattr(Context, "decode", decode_and_stop)
    async with engine.generate(replace(prompt, owner="another"), GREEDY) as generation:
        bound.set()
        others = [run(engine, prompt_of("y" * 400, owner="a third"), GREEDY)] if company else []
        finished = await asyncio.gather(*others)
        outputs = [output async for output in generation]
    monkeypatch.setattr(Context, "decode", decode)
    assert isinstance(outputs[-1], Ended)
    assert outputs[-1].finish is Finish.STOPPED
    assert [len(out.ids) for out in finished] == [12] * len(others)
    assert company or interrupted == 1
    again = await run(engine, replace(prompt, owner="another"), GREEDY)
    assert again.ids == expected.ids


async def restart(engine: LlamaEngine, opens: Opens, states: Path) -> LlamaEngine:
    await engine.close()
    return opens(states=states)


async def test_a_conversation_goes_on_after_a_restart_from_its_state(opens: Opens, tmp_path: Path) -> None:
    states = tmp_path / "states"
    engine, prompt = opens(states=states), prompt_of("once upon a time " * 6, owner="ann", conversation="tale")
    uncut = await run(engine, prompt, SAMPLED)
    turn = replace(prompt, context_ids=(*prompt.context_ids, *uncut.ids, *range(700, 720)))
    expected = await run(engine, turn, SAMPLED)
    await run(engine, replace(prompt, conversation=""), SAMPLED)
    engine = await restart(engine, opens, states)
    (file,) = states.iterdir()  # unnamed requests leave none
    assert file.stat().st_mode & 0o077 == states.stat().st_mode & 0o077 == 0
    assert (await run(engine, replace(turn, owner="bob"), SAMPLED, stop_after=1)).prefilled == Prefilled(len(turn), 0)
    again = await run(engine, turn, SAMPLED)
    assert new_tokens(again) == 1
    assert again.steps == expected.steps
    assert new_tokens(await run(engine, continued(turn, again.ids[:4]), SAMPLED)) <= 1
    await engine.forget("tale")
    assert not list(states.iterdir())
    engine = await restart(engine, opens, states)
    assert not list(states.iterdir())
    assert new_tokens(await run(engine, turn, SAMPLED)) == len(turn)


async def test_a_state_is_stored_before_the_engine_is_closed(opens: Opens, tmp_path: Path) -> None:
    """So that a process that is killed leaves it."""
    engine, prompt = opens(states=tmp_path / "states"), prompt_of("x" * 80, conversation="a")
    await run(engine, prompt, GREEDY)
    async with asyncio.timeout(60):
        while not list(tmp_path.glob("states/*.state")):
            await asyncio.sleep(0.01)
    other = opens(states=tmp_path / "states")
    assert new_tokens(await run(other, prompt, GREEDY)) == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "tokens", "emptied", "foreign"])
async def test_a_damaged_state_is_ignored(damage: str, opens: Opens, tmp_path: Path) -> None:
    states = tmp_path / "states"
    engine, prompt = opens(states=states), prompt_of("y" * 80, conversation="a")
    expected = await run(engine, prompt, GREEDY)
    await engine.close()
    (file,) = states.iterdir()
    data = bytearray(file.read_bytes())
    match damage:
        case "cut":
            del data[-100:]
        case "changed":
            data[len(data) // 2] ^= 1
        case "tokens":
            data = data.replace(b'"tokens": 91', b'"tokens": 85')
        case "emptied":
            data.clear()
        case _:
            data[:] = b"GGUF" * 1000
    file.write_bytes(data)
    engine = opens(states=states)
    out = await run(engine, prompt, GREEDY)
    assert new_tokens(out) == len(prompt)
    assert out.ids == expected.ids


def test_states_that_were_not_used_for_long_make_room(tmp_path: Path) -> None:
    files, state = StateFiles(tmp_path, "model", limit_bytes=12_000), np.ones(2_000, np.uint8)
    for number in range(9):
        assert files.write(("ann", ""), f"talk {number}", range(100), state)
        while f"talk {number}" not in {entry.conversation for entry in files.entries()}:
            time.sleep(0.001)
        first = next(entry for entry in files.entries() if entry.conversation == "talk 0")
        assert files.read(first) is not None
    assert not files.write(("ann", ""), "big", range(100), np.ones(11_000, np.uint8))
    files.close()
    kept = [entry.conversation for entry in StateFiles(tmp_path, "model").entries()]
    assert sorted(kept) == ["talk 0", "talk 6", "talk 7", "talk 8"]
    assert not StateFiles(tmp_path, "another model").entries()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 12_000
    remove_states(tmp_path, "talk 7")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_state_leaves_memory_once_it_is_written(tmp_path: Path) -> None:
    files, freed = StateFiles(tmp_path, "model"), threading.Event()
    state = np.ones(2_000, np.uint8)
    weakref.finalize(state, freed.set)
    assert files.write(("ann", ""), "talk", range(100), state)
    del state
    assert freed.wait(60)
    assert [entry.conversation for entry in files.entries()] == ["talk"]
    files.close()


def test_a_file_that_another_process_renames_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "gone.part").symlink_to(tmp_path / "renamed")
    assert not StateFiles(tmp_path, "model").entries()


def test_the_file_says_how_it_is_run(sprout: Path) -> None:
    header = read_gguf(sprout)
    assert gguf_metadata.context_length(header) == 8192
    assert gguf_metadata.end_ids(header) == {0, END}
    assert gguf_metadata.weights_type(header) == "F32"
    assert metadata.token_bytes(header, float32=True) == 2 * 8 * 4 * 32 * 4
    defaults = gguf_metadata.sampling_defaults(header)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)


def test_files_without_defaults_have_those_of_llama_cpp(tmp_path: Path) -> None:
    header = read_gguf(write_gguf(tmp_path / "d.gguf", {"general.architecture": "qwen3"}))
    assert gguf_metadata.sampling_defaults(header) == Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    wrong = {"general.sampling.temp": -3.0, "general.sampling.top_k": 7}
    header = read_gguf(write_gguf(tmp_path / "w.gguf", wrong))
    assert gguf_metadata.sampling_defaults(header) == Sampling(top_k=7)


def test_channels_end_turns_otherwise(tmp_path: Path) -> None:
    pieces, kinds = ["a", "<|end|>", "<|return|>", "<|channel|>"], [NORMAL, CONTROL, CONTROL, CONTROL]
    file = {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": kinds}
    assert gguf_metadata.end_ids(read_gguf(write_gguf(tmp_path / "c.gguf", file))) == {2}
    file = {"tokenizer.ggml.tokens": pieces[:3], "tokenizer.ggml.token_type": kinds[:3]}
    assert gguf_metadata.end_ids(read_gguf(write_gguf(tmp_path / "d.gguf", file))) == {1, 2}


async def test_the_engine_describes_itself(opens: Opens) -> None:
    engine, exact = opens(), opens(exact=True)
    assert engine.info.context_length == 512
    assert engine.info.vocabulary_size == 4096
    assert engine.info.reuse == "to the token"
    assert engine.info.exactness in (BY_CACHE, BY_BATCH)
    assert exact.info.exactness in (BY_TEXT, BY_CACHE)
    fingerprint = Fingerprint.parse(engine.info.fingerprint)
    assert fingerprint is not None
    assert fingerprint.runner == "llama.cpp"
    assert fingerprint.build.startswith("b10566")
    assert fingerprint.build.endswith("kv-f16-flash-off")
    assert engine.info.fingerprint != exact.info.fingerprint


def test_flash_attention_follows_from_the_types_of_the_weights(sprout: Path, tmp_path: Path) -> None:
    """Off only where that makes replies independent of others. A type that rows are only looked up in doesn't count."""
    options = EngineOptions(context=512, max_running=4)

    def flash(path: Path) -> bool | None:
        header = read_gguf(path)
        return CachePlan.make(header, options).settings(header, options).flash_attention

    folder = resolve_folder("sprout")
    tensors = qwen3_tensors(folder, "q8_0")
    assert flash(sprout) is False
    assert flash(convert_qwen3(folder, tmp_path / "half.gguf", "f16")) is None
    assert flash(write_gguf(tmp_path / "q8.gguf", qwen3_metadata(folder), tensors)) is False
    embedding = {"token_embd.weight": ("f16", tensors["token_embd.weight"][1])}
    tied = write_gguf(tmp_path / "tied.gguf", qwen3_metadata(folder), tensors | embedding)
    assert flash(tied) is None
    head = {"output.weight": tensors["token_embd.weight"]}
    assert flash(write_gguf(tmp_path / "head.gguf", qwen3_metadata(folder), tensors | embedding | head)) is False


def test_the_cache_is_divided_by_its_size(sprout: Path) -> None:
    header = read_gguf(sprout)
    size = metadata.token_bytes(header, float32=False)
    plan = CachePlan.make(header, EngineOptions(cache_bytes=1 << 30, context=1000, max_running=8))
    assert (plan.unified, plan.slots, plan.slot_tokens, plan.cells) == (False, 8, 1000, 8000)
    plan = CachePlan.make(header, EngineOptions(cache_bytes=4000 * size, context=1000, max_running=8))
    assert (plan.unified, plan.slots, plan.cells) == (True, 8, 3000)
    assert plan.host_bytes == 1000 * size
    plan = CachePlan.make(header, EngineOptions(cache_bytes=8000 * size, context=1000, max_running=8, exact=True))
    assert (plan.unified, plan.slots) == (False, 2)


@pytest.mark.parametrize(
    ("changes", "named"), [({"device": "cuda"}, "--device"), ({"device": "gpu"}, "--device"), ({}, "--gpu-layers")]
)
def test_options_that_can_not_be_met_are_refused(
    changes: dict[str, str], named: str, sprout: Path, vocabulary: tuple[bytes, ...]
) -> None:
    from palaver.engines.llamacpp.engine import _gpu_name
    from palaver.engines.llamacpp.library import load_library

    if _gpu_name(load_library()) is not None:
        pytest.skip("NOTHING IS SHOWN HERE: there is a GPU")
    with pytest.raises(BadParameter, match=named):
        load(sprout, vocabulary=vocabulary, options=EngineOptions(gpu_layers=4), **changes)  # type: ignore[arg-type]


def test_a_foreign_architecture_ends_in_one_sentence(tmp_path: Path) -> None:
    file = qwen3_metadata(resolve_folder("sprout")) | {"general.architecture": "from-the-future"}
    renamed = {key.replace("qwen3.", "from-the-future."): value for key, value in file.items()}
    path = write_gguf(tmp_path / "f.gguf", renamed, qwen3_tensors(resolve_folder("sprout")))
    with pytest.raises(BrokenModel, match=r"llama\.cpp can't load f\.gguf"):
        load(path, vocabulary=())


# adapters


@pytest.mark.parametrize("exact", [False, True])
async def test_replies_with_an_adapter_are_those_of_the_merged_weights(
    exact: bool, sprout: Path, vocabulary: tuple[bytes, ...], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="NOTHING IS SHOWN HERE: peft is not installed")
    from palaver.engines.torch import load as load_torch

    folder = write_peft_adapter(resolve_folder("sprout"), tmp_path / "adapter")
    options = EngineOptions(threads=1, context=512, exact=exact)
    engine = load(
        sprout, vocabulary=vocabulary, options=options, adapter=convert_adapter(folder, tmp_path / "adapter.gguf")
    )
    plain = load(sprout, vocabulary=vocabulary, options=options)
    merged = load_torch(
        resolve_folder("sprout"), vocabulary=vocabulary, options=EngineOptions(compiled=False), adapter=folder
    )
    prompt = prompt_of("Tell me a story.")
    for sampling in (replace(GREEDY, logprobs=3), SAMPLED):
        out, expected, other = [await run(one, prompt, sampling) for one in (engine, merged, plain)]
        assert out.ids == expected.ids != other.ids
        likeliest, torch_likeliest = (
            [alternative.logprob for step in one.steps for alternative in step.alternatives] for one in (out, expected)
        )
        assert likeliest == pytest.approx(torch_likeliest, abs=1e-3 if exact else 0.02), "by default f16 caches"
        rest = await run(engine, continued(prompt, out.ids[:5]), sampling)
        assert out.ids[:5] + rest.ids == out.ids
    for one in (engine, plain, merged):
        await one.close()


def test_what_is_no_adapter_in_a_gguf_file_is_refused(
    sprout: Path, vocabulary: tuple[bytes, ...], tmp_path: Path
) -> None:
    for adapter, reason in ((tmp_path, "is a folder: convert it with convert_lora_to_gguf.py"), (sprout, "'adapter'")):
        with pytest.raises(BrokenModel, match=reason):
            load(sprout, vocabulary=vocabulary, adapter=adapter)
