"""MLX models that see and hear through mlx-vlm: they say what its own `generate` says, and compute nothing twice.

The models are tiny and random. Media go the whole way: as files through the decoder, the chat template and the
engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from palaver.chat.attachments import check_messages
from palaver.chat.media_expander import MediaExpander
from palaver.chat.model import Model
from palaver.engines.base import BY_TEXT, Capability
from palaver.engines.core.media import MediaCache
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.engines.mlx.loader import INSTALL_VISION, is_installed, vision_config
from palaver.errors import BrokenModel, UnsupportedContent
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt
from palaver.media import MediaDecoder
from palaver.sampling import Sampling
from tests.engines.generate import Run, continued, run
from tests.engines.media_models import FAMILIES as MEDIA
from tests.engines.media_models import build
from tests.engines.media_reference import Reply
from tests.engines.test_media_families import COUNT, Conversation, conversations, media, messages, turn, words

if not is_installed():
    pytest.skip("NOTHING IS SHOWN HERE: mlx and mlx-lm are not installed", allow_module_level=True)

from palaver.engines.mlx.engine import load

try:
    import mlx_vlm
except ImportError:
    mlx_vlm = None
needs_vision = pytest.mark.skipif(mlx_vlm is None, reason="NOTHING IS SHOWN HERE: mlx-vlm is not installed")

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "mistral3", "llava_onevision", "qwen3_omni")
SAMPLED = Sampling(temperature=1.2, max_tokens=13, min_tokens=13, seed=7)


def build_for_mlx(family: str, folder: Path) -> Path:
    """A tiny model of the family. Gemma's is named and shaped as in the folders that are published."""
    build(family, folder)
    if family == "gemma3":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] |= {"_sliding_window_pattern": 3, "mm_tokens_per_image": 16}
        config["hidden_size"] = config["text_config"]["hidden_size"]
        (folder / "config.json").write_text(json.dumps(config))
        weights = load_file(folder / "model.safetensors")
        named = {
            name.replace("vision_tower.", "vision_tower.vision_model."): value
            for name, value in weights.items()
            if "vision_tower.head" not in name
        }
        named["language_model.model.embed_tokens.weight"] *= 0.1  # also the last layer, for mlx-vlm
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass(frozen=True)
class Library:
    """A model in mlx-vlm alone, with its processor."""

    folder: Path

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Its configuration is read as Palaver reads it: mlx-vlm doesn't know the names of transformers 5."""
        from mlx_vlm import utils

        original = utils.load_config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils, "load_config", lambda *args, **options: vision_config(original(*args, **options)))
            return utils.load_model(self.folder), utils.load_processor(self.folder)

    @cached_property
    def control_ids(self) -> tuple[int, ...]:
        return tuple(self.parts[1].tokenizer.added_tokens_decoder)

    def generate(self, conversation: Conversation, count: int) -> Reply:
        """Greedily, by mlx-vlm's own preparation of prompts and its own loop. Control tokens are never chosen."""
        import mlx.core as mx
        from mlx_vlm.generate import generate_step
        from mlx_vlm.utils import prepare_inputs, process_inputs

        model, processor = self.parts
        tokenizer = processor.tokenizer
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        parts = [part for said in conversation for part in said["content"]]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        sounds = [part["audio"] for part in parts if part["type"] == "audio"]
        if sounds:  # mlx-vlm's preparation takes one of several sounds
            inputs = dict(process_inputs(processor, prompts=[text], images=pictures or None, audio=sounds))
        else:
            inputs = prepare_inputs(processor, images=pictures, prompts=text)
        ids, pixels, mask = (inputs.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask"))
        banned = mx.array(self.control_ids)

        def ban(_: mx.array, logits: mx.array) -> mx.array:
            logits[:, banned] = -mx.inf
            return logits

        for name in ("_position_ids", "_rope_deltas"):  # of the prompt before
            if hasattr(model.language_model, name):
                setattr(model.language_model, name, None)
        said, margins = [], []
        steps = generate_step(
            ids, model, pixels, mask, max_tokens=count, temperature=0.0, logits_processors=[ban], **inputs
        )
        for token_id, logprobs in steps:
            best = np.sort(np.array(logprobs).reshape(-1))[-2:]
            said.append(int(token_id))
            margins.append(float(best[1] - best[0]))
        return Reply(tuple(ids[0].tolist()), tuple(said[:count]), tuple(margins))


@pytest.fixture(scope="module")
def folder_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = build_for_mlx(family, tmp_path_factory.mktemp("mlx-media") / family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def expander() -> Iterator[MediaExpander]:
    decoder = MediaDecoder()
    yield MediaExpander(decoder)
    decoder.close()


@asynccontextmanager
async def open_model(folder: Path, expander: MediaExpander, **options: Any) -> AsyncIterator[Model]:
    tokenizer = load_tokenizer(folder)
    chosen = EngineOptions(**{"limits": SchedulerLimits(chunk_tokens=24), **options})
    engine = load(folder, vocabulary=tokenizer.vocabulary, device="cpu", options=chosen)
    try:
        yield Model(engine, load_format(folder, tokenizer), folder.name, media=expander)
    finally:
        await engine.close()


async def render(model: Model, spoken: Conversation, **fields: Any) -> Prompt:
    return replace(await asyncio.to_thread(model.render, messages(spoken)), **fields)


def cached(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.cached_tokens


@needs_vision
@pytest.mark.parametrize("family", FAMILIES)
async def test_says_what_mlx_vlm_says(family: str, folder_for: Callable[[str], Path], expander: MediaExpander) -> None:
    """An item, another one in its place, several over several turns; all at once, and cut and continued."""
    library = Library(folder_for(family))
    spoken = list(conversations(family))
    expected = [library.generate(conversation, COUNT) for conversation in spoken]
    for place in range(0, 3 * len(MEDIA[family].takes), 3):
        assert expected[place].ids != expected[place + 1].ids, "the model's tokens don't depend on the item"
    greedy = Sampling(temperature=0, max_tokens=COUNT, banned_ids=library.control_ids)
    async with open_model(library.folder, expander) as model:
        info = model.engine.info
        assert (info.media, info.steps) == ((*MEDIA[family].takes, "video"), f"mlx-vlm {mlx_vlm.__version__}")
        prompts = [await render(model, conversation) for conversation in spoken]
        assert [prompt.context_ids for prompt in prompts] == [reply.prompt_ids for reply in expected]
        together = await asyncio.gather(*(run(model.engine, prompt, greedy) for prompt in prompts))
        for reply, out in zip(expected, together, strict=True):
            assert reply.agrees(out.ids), (reply.ids, out.ids)
        for place in range(0, COUNT, 3):
            cut = continued(prompts[-1], together[-1].ids[:place])
            assert (await run(model.engine, cut, greedy)).ids == together[-1].ids[place:]


@needs_vision
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
async def test_another_turn_encodes_and_computes_nothing_again(
    family: str, folder_for: Callable[[str], Path], expander: MediaExpander, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions have three dimensions in one, and states can't be cut in the other."""
    from palaver.engines.mlx.media import MlxMediaEncoder, VisionDecoder

    encoded, processed = spy(monkeypatch, VisionDecoder, "features"), spy(monkeypatch, MlxMediaEncoder, "process")
    async with open_model(folder_for(family), expander) as model:
        at_start = len(encoded), len(processed)
        said = [turn("user", words("See "), media(family, "image", 1), media(family, "image", 2), words("?"))]
        first = await render(model, said, conversation="one")
        reply = await run(model.engine, first, SAMPLED)
        assert (len(encoded), len(processed)) == (at_start[0] + 2, at_start[1] + 2)
        more = model.format.tokenizer.encode([" More?"])
        second = replace(first, context_ids=(*first.context_ids, *reply.ids, *more))
        out = await run(model.engine, second, SAMPLED)
        assert cached(out) >= len(first) + len(reply.ids) - 1
        retried = await run(model.engine, first, replace(SAMPLED, seed=8))
        assert cached(retried) >= len(first) - 1
        assert (await run(model.engine, first, SAMPLED)).ids == reply.ids
        assert (len(encoded), len(processed)) == (at_start[0] + 2, at_start[1] + 2)
        fresh = await run(model.engine, replace(second, owner="another"), SAMPLED)
        assert cached(fresh) == 0
        assert fresh.ids == out.ids
        assert len(encoded) == at_start[0] + 2, "embeddings are shared; computed tokens are not"


@needs_vision
async def test_quantised_folders(folder_for: Callable[[str], Path], tmp_path: Path, expander: MediaExpander) -> None:
    """As mlx-vlm converts them: most MLX models are published so."""
    library = Library(quantise(folder_for("qwen2_5_vl"), tmp_path / "quantised"))
    spoken = [turn("user", words("See "), media("qwen2_5_vl", "image", 1), words("?"))]
    expected = library.generate(spoken, COUNT)
    async with open_model(library.folder, expander) as model:
        assert model.engine.info.media == ("image", "video")
        assert model.engine.info.dtype == "float32, 8-bit"
        greedy = Sampling(temperature=0, max_tokens=COUNT, banned_ids=library.control_ids)
        out = await run(model.engine, await render(model, spoken), greedy)
        assert expected.agrees(out.ids), (expected.ids, out.ids)


def quantise(folder: Path, path: Path) -> Path:
    """The model with 8 bits for each weight of the decoder whose size allows it."""
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten

    group = {"group_size": 32, "bits": 8}
    model = Library(folder).parts[0]
    nn.quantize(
        model.language_model, **group,
        class_predicate=lambda _, layer: hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0,
    )  # fmt: skip
    path.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization": group}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_configuration_of_transformers_5_is_translated() -> None:
    """Settings at the outermost level, as older folders have them, stay as they are."""
    flat = {"hidden_size": 48, "rope_theta": 7.0, "vision_config": {"model_type": "qwen2_5_vl"}}
    assert vision_config(flat) == flat
    rotary = {"rope_type": "default", "rope_theta": 7.0, "mrope_section": [2, 2, 2]}
    text = {"hidden_size": 48, "rope_parameters": rotary}
    found = vision_config({"text_config": text, "vision_config": {"model_type": "qwen2_5_vl_vision"}})
    assert (found["hidden_size"], found["rope_theta"], found["text_config"]["rope_theta"]) == (48, 7.0, 7.0)
    assert found["text_config"]["rope_scaling"] == {"type": "default", **rotary}
    assert found["vision_config"]["model_type"] == "qwen2_5_vl"
    layers = {"full_attention": {"rope_theta": 9.0, "rope_type": "linear", "factor": 8.0}}
    layers |= {"sliding_attention": {"rope_theta": 5.0, "rope_type": "default"}}
    gemma = vision_config({"text_config": {"rope_parameters": layers}, "vision_config": {}})["text_config"]
    assert (gemma["rope_global_base_freq"], gemma["rope_local_base_freq"]) == (9.0, 5.0)
    assert gemma["rope_scaling"]["factor"] == 8.0


def spy(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """Records the calls of a method."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def record(self: Any, *args: Any) -> Any:
        calls.append(args)
        return original(self, *args)

    monkeypatch.setattr(owner, name, record)
    return calls


@needs_vision
@pytest.mark.parametrize("family", ["qwen2_5_vl", "mistral3"])
async def test_continued_replies_are_the_same_to_the_bit(
    family: str, folder_for: Callable[[str], Path], expander: MediaExpander
) -> None:
    """In the exact mode, cut at every third token, from the cache and without it."""
    async with open_model(folder_for(family), expander, exact=True) as model:
        prompt = await render(model, [turn("user", media(family, "image", 1), words("Tell me."))])
        assert model.engine.info.exactness == BY_TEXT
        whole = await run(model.engine, prompt, SAMPLED)
        for cut in range(1, len(whole.ids), 3):
            for owner in ("", f"lost {cut}"):
                part = await run(model.engine, continued(replace(prompt, owner=owner), whole.ids[:cut]), SAMPLED)
                assert whole.ids[:cut] + part.ids == whole.ids
                assert [step.logprob for step in part.steps] == [step.logprob for step in whole.steps[cut:]]


@needs_vision
async def test_pictures_in_company_are_those_alone(folder_for: Callable[[str], Path], expander: MediaExpander) -> None:
    """Merged sequences with pictures of different sizes before them, and one without."""
    async with open_model(folder_for("qwen3_vl"), expander) as model:
        spoken: list[Conversation] = [[turn("user", words("Hello, how are you?"))]]
        spoken += [[turn("user", media("qwen3_vl", "image", n), words("What?" * n))] for n in range(3)]
        prompts = [await render(model, conversation) for conversation in spoken]
        together = await asyncio.gather(*(run(model.engine, prompt, SAMPLED) for prompt in prompts))
        for prompt, out in zip(prompts, together, strict=True):
            alone = await run(model.engine, replace(prompt, owner="alone"), SAMPLED)
            assert alone.ids == out.ids
            close = [
                one.logprob == pytest.approx(two.logprob, abs=1e-3)
                for one, two in zip(alone.steps, out.steps, strict=True)
            ]
            assert all(close)


@needs_vision
async def test_a_branch_shares_the_picture_before_it(
    folder_for: Callable[[str], Path], expander: MediaExpander
) -> None:
    """Pictures of the same size have the same token ids: their content decides what is shared."""
    async with open_model(folder_for("qwen2_5_vl"), expander) as model:
        one, two, three = (media("qwen2_5_vl", "image", seed) for seed in (0, 1, 4))
        both = await render(model, [turn("user", one, words(" and "), two, words("?"))])
        other = await render(model, [turn("user", one, words(" and "), three, words("?"))])
        assert both.context_ids == other.context_ids
        await run(model.engine, both, SAMPLED)
        branch = await run(model.engine, other, SAMPLED)
        assert other.media[0].stop <= cached(branch) <= other.media[1].start
        assert branch.ids == (await run(model.engine, replace(other, owner="fresh"), SAMPLED)).ids


@needs_vision
async def test_pictures_reach_the_engine_process(folder_for: Callable[[str], Path], expander: MediaExpander) -> None:
    folder = folder_for("mistral3")
    tokenizer = load_tokenizer(folder)
    async with open_model(folder, expander) as model:
        said = [turn("user", media("mistral3", "image", 1), words("What?"))]
        expected = await run(model.engine, await render(model, said), SAMPLED)
    async with HostedEngine(EngineSpec("mlx", folder, tuple(tokenizer.vocabulary), device="cpu")) as engine:
        hosted = Model(engine, load_format(folder, tokenizer), folder.name, media=expander)
        out = await run(engine, await render(hosted, said), SAMPLED)
    assert out.ids == expected.ids


@needs_vision
async def test_evicted_pictures_come_back(folder_for: Callable[[str], Path], expander: MediaExpander) -> None:
    async with open_model(folder_for("qwen3_vl"), expander) as model:
        engine: Any = model.engine
        encoder = engine._runner._encoder
        engine._media = encoder.cache = MediaCache(encoder, limit_bytes=1)
        pictures = [media("qwen3_vl", "image", seed) for seed in (0, 1)]
        prompts = [await render(model, [turn("user", *shown, words("?"))]) for shown in (pictures, pictures[::-1])]
        outs = await asyncio.gather(*(run(engine, prompt, SAMPLED) for prompt in prompts))
        for prompt, out in zip(prompts, outs, strict=True):
            assert (await run(engine, replace(prompt, owner="again"), SAMPLED)).ids == out.ids


@needs_vision
async def test_a_picture_survives_a_failed_pass(
    folder_for: Callable[[str], Path], expander: MediaExpander, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of other sequences of a pass that failed are computed again from the start, with their pictures."""
    from palaver.engines.mlx.media import VisionDecoder

    async with open_model(folder_for("qwen3_vl"), expander) as model:
        prompt = await render(model, [turn("user", media("qwen3_vl", "image", 1), words("What?"))])
        expected = await run(model.engine, prompt, SAMPLED)
        call, merged = VisionDecoder.__call__, []

        def failing(self: Any, ids: Any, layers: Any, places: Sequence[Any]) -> Any:
            merged.extend([places] if len(places) > 1 else [])
            if len(places) > 1 and len(merged) == 3:
                raise RuntimeError("out of memory")
            return call(self, ids, layers, places)

        monkeypatch.setattr(VisionDecoder, "__call__", failing)
        pair = (run(model.engine, replace(prompt, owner=owner), SAMPLED) for owner in ("a", "b"))
        for out in await asyncio.gather(*pair, return_exceptions=True):
            assert isinstance(out, Run)
            assert out.ids == expected.ids
        assert len(merged) >= 3
        assert (await run(model.engine, replace(prompt, owner="c"), SAMPLED)).ids == expected.ids


async def test_without_mlx_vlm_the_refusal_says_what_to_install(
    folder_for: Callable[[str], Path], expander: MediaExpander, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runs, with mlx-lm; only a picture is refused, before anything is decoded."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    async with open_model(folder_for("mistral3"), expander) as model:
        info = model.engine.info
        assert info.media == ()
        assert info.steps.startswith("mlx-lm")
        assert info.lacks[Capability.MEDIA] == f"mlx-vlm isn't installed: {INSTALL_VISION}"
        conversation = [turn("user", media("mistral3", "image", 1), words("What?"))]
        with pytest.raises(UnsupportedContent) as refused:
            await render(model, conversation)
        sentence = f"The model 'mistral3' does not accept pictures: mlx-vlm isn't installed: {INSTALL_VISION}."
        assert str(refused.value) == sentence
        with pytest.raises(UnsupportedContent, match="a vision model is needed"):
            check_messages(messages(conversation), "other", ())
        out = await run(model.engine, await render(model, [turn("user", words("Hello"))]), SAMPLED)
        assert len(out.ids) == SAMPLED.max_tokens


@needs_vision
def test_code_in_a_folder_is_never_run(folder_for: Callable[[str], Path], tmp_path: Path) -> None:
    """mlx-vlm would run the file that a configuration names."""
    folder = tmp_path / "hostile"
    build("mistral3", folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_file": "evil.py"}
    (folder / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(BrokenModel, match=r"evil\.py"):
        load(folder, vocabulary=load_tokenizer(folder).vocabulary, device="cpu")
    assert not ran.exists()
