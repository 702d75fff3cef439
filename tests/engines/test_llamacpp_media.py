"""GGUF models that see and hear through a projector, compared with what llama.cpp's own mtmd computes.

The models are tiny and random: a projector of each kind that differs in how its tokens are computed, before a text
model with positions in one dimension or in three."""

from __future__ import annotations

import asyncio
import ctypes as c
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model import build_model, load_model_format
from palaver.engines.core.media import MediaCache, integer_keys
from palaver.engines.core.options import EngineOptions
from palaver.engines.llamacpp.context import MAX_BATCH, Context, ContextSettings, LoadedModel
from palaver.engines.llamacpp.engine import LlamaEngine, load
from palaver.engines.llamacpp.library import MediaText, load_library
from palaver.engines.llamacpp.media import LlamaMedia, Projector
from palaver.errors import BrokenModel, UnsupportedContent
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
from palaver.formats.tokenizer import Tokenizer
from palaver.generation import MediaSpan, Prompt
from palaver.gguf import read_gguf
from palaver.messages import Image, Message, Role, Text
from palaver.models.resolver import ResolvedModel
from palaver.sampling import Sampling
from tests.engines.generate import continued, run
from tests.engines.test_media import Content, picture, sound
from tests.media_files import picture as picture_file
from tests.mmproj_files import KINDS, WIDTH, make_projector, make_qwen2
from tests.tiny import TURNS, byte_level

GREEDY = Sampling(temperature=0, max_tokens=10, min_tokens=10)
SAMPLED = Sampling(temperature=1.2, max_tokens=12, min_tokens=12, seed=7)
MARKER = "<__media__>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SEEING = pytest.mark.parametrize("case", [kind for kind, media in KINDS.items() if media == "image"], indirect=True)
"""For what does not depend on the kind of media: a sound has 750 tokens here."""


@dataclass
class Case:
    """A model, its projector, and items that it takes."""

    kind: str
    model: Path
    mmproj: Path
    tokenizer: Tokenizer

    @property
    def media(self) -> str:
        return KINDS[self.kind]

    def item(self, number: int) -> Content:
        return picture(number, (40 + 8 * number, 64)) if self.media == "image" else sound(200.0 * number)

    def open(self, **options: Any) -> LlamaEngine:
        chosen = EngineOptions(**{"exact": True, "threads": 1, "context": 3000, "max_running": 4, **options})
        return load(self.model, vocabulary=self.tokenizer.vocabulary, options=chosen, mmproj=self.mmproj)

    @cached_property
    def engine(self) -> LlamaEngine:
        """In the exact mode: what is computed in a batch, in chunks or from the cache is the same to the bit."""
        return self.open()

    def prompt(self, engine: LlamaEngine, *parts: str | Content, **fields: Any) -> Prompt:
        ids: list[int] = []
        spans = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode([part])
                continue
            item = replace(part.item, placeholder=MARKER)
            expansion = engine.expand_media(item)
            length = len(expansion.token_ids) - expansion.lead - expansion.tail
            spans.append(MediaSpan(item, len(ids) + expansion.lead, length))
            ids += expansion.token_ids
        return Prompt(tuple(ids), media=tuple(spans), **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mmproj")
    make_qwen2(made / "model1.gguf", byte_level())
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|audio_bos|>", "<|audio_eos|>")
    make_qwen2(made / "model3.gguf", byte_level((*TURNS, *marks)), TEMPLATE, dimensions=3)
    return made


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, folder: Path) -> Iterator[Case]:
    kind = request.param
    model = folder / f"model{3 if kind.startswith('qwen') else 1}.gguf"
    mmproj = make_projector(folder / f"mmproj-{kind}.gguf", kind, WIDTH)
    found = Case(kind, model, mmproj, load_gguf_tokenizer(read_gguf(model)))
    yield found
    asyncio.run(found.engine.close())


def media_places(engine: LlamaEngine, prompt: Prompt) -> Iterator[int]:
    """The places of tokens that stand for media, once they are encoded."""
    assert engine._projector is not None
    for span in prompt.media:
        processed = engine._projector.cache.load(span.item)
        assert isinstance(processed, LlamaMedia)
        for start, piece in processed.places(span):
            yield from range(start, start + piece.tokens)


def evaluate(case: Case, text: str, items: list[Content], count: int, banned: list[int]) -> tuple[list[int], list[int]]:
    """The prompt's ids, 0 for each token of media, and the greedy tokens that follow, all by llama.cpp itself."""
    library = load_library()
    model = LoadedModel([case.model], 0)
    projector = Projector(case.mmproj, model, read_gguf(case.model), 1, False, True)
    context = Context(model, ContextSettings(3000, 1, float32=True, flash_attention=False))
    evaluate_chunks: Any = library.mtmd_helper_eval_chunks
    pointer, number = c.c_void_p, c.c_int32
    evaluate_chunks.argtypes = (pointer, pointer, pointer, number, number, number, c.c_bool, c.POINTER(number))
    bitmaps = []
    for item in items:
        data = item.array.tobytes()
        if case.media == "image":
            bitmaps.append(library.mtmd_bitmap_init(item.array.shape[1], item.array.shape[0], data))
        else:
            bitmaps.append(library.mtmd_bitmap_init_from_audio(item.array.size, data))
    chunks = library.mtmd_input_chunks_init()
    given = MediaText(text.encode(), len(text.encode()), False, True)
    array = (c.c_void_p * len(bitmaps))(*bitmaps)
    assert not library.mtmd_tokenize(projector.pointer, chunks, c.byref(given), array, len(bitmaps))
    ids = [i for piece in projector._read_chunks(chunks) for i in piece.ids or [0] * piece.tokens]
    at, pointer = number(), context._open(0).pointer
    assert not evaluate_chunks(projector.pointer, pointer, chunks, 0, 0, 512, True, c.byref(at))
    logits = np.ctypeslib.as_array(library.llama_get_logits_ith(pointer, -1), (context.vocabulary_size,))
    found: list[int] = []
    while True:
        logits[banned] = -np.inf
        found.append(int(logits.argmax()))
        if len(found) == count:
            break
        logits = context.decode([(0, at.value + len(found) - 1, found[-1:])])[0]
    library.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        library.mtmd_bitmap_free(bitmap)
    projector.close()
    context.close()
    model.close()
    return ids, found


async def test_tokens_are_those_of_mtmd(case: Case) -> None:
    """Two items, expanded, placed and computed as llama.cpp's own tokenizer and evaluation do."""
    first, second = case.item(1), case.item(2)
    assert case.engine.info.media == (("image", "video") if case.media == "image" else ("audio",))
    assert case.engine.info.sample_rate == (16_000 if case.media == "audio" else 0)
    prompt = case.prompt(case.engine, "user: ", first, " and ", second, " What?")
    ends = sorted(case.engine.info.end_ids)
    free = Sampling(temperature=0, max_tokens=8, banned_ids=tuple(ends))
    out = await run(case.engine, prompt, free)
    ids, theirs = evaluate(case, f"user: {MARKER} and {MARKER} What?", [first, second], 8, ends)
    media = set(media_places(case.engine, prompt))
    assert [0 if place in media else i for place, i in enumerate(prompt.context_ids)] == ids
    assert out.ids == theirs
    other = await run(case.engine, case.prompt(case.engine, "user: ", second, " and ", first, " What?"), free)
    assert other.steps[0].logprob != out.steps[0].logprob, "the order of the items makes no difference"


async def test_another_turn_encodes_and_computes_nothing_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = Projector._encode

    def spy(self: Projector, piece: Any) -> Any:
        encoded.append(piece)
        return encode(self, piece)

    monkeypatch.setattr(Projector, "_encode", spy)
    seen = case.item(3)
    first = case.prompt(case.engine, "user: ", seen, " What is it?")
    reply = await run(case.engine, first, GREEDY)
    assert (len(encoded), seen.loads) == (1, 1)
    again = continued(first, [])
    turn = replace(again, context_ids=(*first.context_ids, *reply.ids, *case.tokenizer.encode([" And now?"])))
    second = await run(case.engine, turn, GREEDY)
    assert second.prefilled is not None
    assert second.prefilled.cached_tokens >= len(first) + len(reply.ids) - 1
    retried = await run(case.engine, first, replace(SAMPLED, seed=8))
    assert retried.prefilled is not None
    assert retried.prefilled.cached_tokens >= len(first) - 1
    assert (len(encoded), seen.loads) == (1, 1)
    fresh = await run(case.engine, replace(turn, owner="another"), GREEDY)
    assert fresh.ids == second.ids
    assert len(encoded) == 1, "embeddings are shared; computed tokens are not"


async def test_continued_replies_are_the_same_to_the_bit(case: Case) -> None:
    prompt = case.prompt(case.engine, "user: ", case.item(4), " Tell me.")
    whole = await run(case.engine, prompt, SAMPLED)
    for cut in (1, 5, 11):
        for owner in ("", f"lost {cut}"):
            part = await run(case.engine, continued(replace(prompt, owner=owner), whole.ids[:cut]), SAMPLED)
            assert whole.ids[:cut] + part.ids == whole.ids
            assert [step.logprob for step in part.steps] == [step.logprob for step in whole.steps[cut:]]


@SEEING
async def test_branches_cut_the_cache_at_an_item(case: Case) -> None:
    """A branch that shares one of two items starts behind it, also where positions have several dimensions."""
    one, two, three = case.item(1), case.item(2), case.item(5)
    engine = case.engine
    both = case.prompt(engine, "branch: ", one, " and ", two, " what?", owner="branches")
    other = case.prompt(engine, "branch: ", one, " and ", three, " what?", owner="branches")
    await run(engine, both, GREEDY)
    branch = await run(engine, other, GREEDY)
    assert branch.prefilled is not None
    assert branch.prefilled.cached_tokens >= other.media[0].stop
    assert branch.ids == (await run(engine, replace(other, owner="fresh"), GREEDY)).ids
    first = await run(engine, both, GREEDY)
    assert first.ids == (await run(engine, replace(both, owner="fresh"), GREEDY)).ids


@SEEING
async def test_sequences_at_once_are_those_alone(case: Case) -> None:
    engine = case.engine
    items = [case.item(1 + number % 3) for number in range(4)]
    prompts = [case.prompt(engine, f"{n} user: ", item, f" What {n}?") for n, item in enumerate(items)]
    text = Prompt(tuple(case.tokenizer.encode(["Hello, how are you?"])))
    together = await asyncio.gather(*(run(engine, prompt, SAMPLED) for prompt in [*prompts, text]))
    for prompt, out in zip([*prompts, text], together, strict=True):
        alone = await run(engine, replace(prompt, owner="alone"), SAMPLED)
        assert (alone.ids, [step.logprob for step in alone.steps]) == (out.ids, [step.logprob for step in out.steps])


async def test_states_hold_media(case: Case, tmp_path: Path) -> None:
    """A conversation that lost its slot, and one whose server was started again, compute no item again."""
    engine = case.open(max_running=1, states=tmp_path)
    prompt = case.prompt(engine, "user: ", case.item(1), " What is it?" + " And more." * 20, conversation="kept")
    out = await run(engine, prompt, GREEDY)
    await run(engine, Prompt(tuple(case.tokenizer.encode(["Something else."])), conversation="other"), GREEDY)
    again = await run(engine, prompt, GREEDY)
    assert again.ids == out.ids
    assert again.prefilled is not None
    assert again.prefilled.cached_tokens >= len(prompt) - 1
    await engine.close()
    restarted = case.open(max_running=1, states=tmp_path)
    later = await run(restarted, prompt, GREEDY)
    await restarted.close()
    assert later.ids == out.ids
    assert later.prefilled is not None
    assert later.prefilled.cached_tokens >= len(prompt) - 1


@SEEING
async def test_evicted_items_come_back(case: Case) -> None:
    engine = case.engine
    engine._media = MediaCache(engine._projector, limit_bytes=1)  # type: ignore[arg-type]
    engine._projector.cache, kept = engine._media, engine._projector.cache  # type: ignore[union-attr]
    try:
        one, two = case.item(6), case.item(7)
        prompts = [case.prompt(engine, "evicted ", one, " or ", two, " ?"), case.prompt(engine, two, one, " x")]
        outs = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in prompts))
        assert one.loads > 1
    finally:
        engine._media = engine._projector.cache = kept  # type: ignore[union-attr]
    for prompt, out in zip(prompts, outs, strict=True):
        assert (await run(engine, replace(prompt, owner="kept"), GREEDY)).ids == out.ids


@SEEING
async def test_a_cancelled_prompt_leaves_the_slot_usable(case: Case) -> None:
    engine = case.engine
    prompt = case.prompt(engine, "long " * 100, case.item(1), " and so on " * 50, case.item(2), " ?")
    for delay in (0.0, 0.005, 0.02, 0.05):
        task = asyncio.create_task(run(engine, replace(prompt, owner=f"cancelled {delay}"), GREEDY))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    whole = [await run(engine, replace(prompt, owner=owner), GREEDY) for owner in ("cancelled 0.02", "never")]
    assert whole[0].ids == whole[1].ids


@SEEING
async def test_a_prompt_must_not_end_with_media(case: Case) -> None:
    prompt = case.prompt(case.engine, "Look: ", case.item(1), " ?")
    await run(case.engine, prompt, GREEDY)
    end = max(media_places(case.engine, prompt)) + 1
    span = prompt.media[0]
    if end < span.stop:  # the projector writes control tokens behind its items
        return
    with pytest.raises(UnsupportedContent, match="end of a prompt"):
        await run(case.engine, replace(prompt, context_ids=prompt.context_ids[:end]), GREEDY)


async def test_a_template_writes_the_placeholder(folder: Path) -> None:
    """The prompt is what mtmd makes of the text with its marker in the place of the template's placeholder."""
    model = folder / "model3.gguf"
    mmproj = make_projector(folder / "mmproj-template.gguf", "qwen2vl_merger", WIDTH)
    tokenizer, format = load_model_format(ResolvedModel(folder, gguf=model), LoadOptions())
    case = Case("qwen2vl_merger", model, mmproj, tokenizer)
    sees = build_model("sees", case.engine, format, tokenizer)
    data = picture_file(size=(60, 90))
    prompt = await asyncio.to_thread(sees.render, [Message(Role.USER, (Image("image/png", data), Text("What?")))])
    pixels = Content(sees.media.decoder.picture(data))
    text = f"<|im_start|>user\n{MARKER}What?<|im_end|>\n<|im_start|>assistant\n"
    ids, theirs = evaluate(case, text, [pixels], 4, [])
    (span,) = prompt.media
    control = {text: token_id for text, token_id in tokenizer.control.items() if "vision" in text or "image" in text}
    assert prompt.context_ids[span.start] == control["<|vision_start|>"]
    assert prompt.context_ids[span.start + 1] == control["<|image_pad|>"]
    assert prompt.context_ids[span.stop - 1] == control["<|vision_end|>"]
    assert [0 if token_id == control["<|image_pad|>"] else token_id for token_id in prompt.context_ids] == ids
    assert (await run(case.engine, prompt, replace(GREEDY, max_tokens=4, min_tokens=4))).ids == theirs
    await case.engine.close()
    sees.media.decoder.close()


def test_projectors_of_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    model, vocabulary = folder / "model1.gguf", load_gguf_tokenizer(read_gguf(folder / "model1.gguf")).vocabulary
    narrow = make_projector(tmp_path / "narrow.gguf", "mlp", 32)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(narrow.read_bytes()[:-4000])
    for mmproj, why in ((narrow, "can't use narrow.gguf"), (model, "is not a projector"), (cut, "cut.gguf")):
        with pytest.raises(BrokenModel, match=why):
            load(model, vocabulary=vocabulary, options=EngineOptions(threads=1, context=512), mmproj=mmproj)


async def test_tokens_that_see_each_other_must_fit_one_pass(folder: Path, tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    model = folder / "model1.gguf"
    mmproj = make_projector(tmp_path / "mmproj-large.gguf", "gemma3", WIDTH, size=768)
    engine = load(
        model, vocabulary=load_gguf_tokenizer(read_gguf(model)).vocabulary, mmproj=mmproj,
        options=EngineOptions(threads=1, context=1024),
    )  # fmt: skip
    with pytest.raises(UnsupportedContent, match=f"576 tokens that see each other; at most {MAX_BATCH}"):
        engine.expand_media(picture(1).item)
    await engine.close()


def test_keys_of_media_are_negative_and_differ_by_item_and_place() -> None:
    keys = integer_keys([5, ("a" * 64, 0), ("a" * 64, 1), ("b" * 64, 0), 7])
    assert (keys[0], keys[-1]) == (5, 7)
    assert max(keys[1:4]) < 0
    assert len({*keys}) == 5
    assert keys == integer_keys([5, ("a" * 64, 0), ("a" * 64, 1), ("b" * 64, 0), 7])
