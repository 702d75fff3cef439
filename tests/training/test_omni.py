"""Sprout Omni's training sees what transformers computes, and its generators claim only what is true."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from jinja2 import Environment
from PIL import Image
from transformers import Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from training.checks import Reply, read, right
from training.omni import (
    bars,
    evaluate,
    export,
    features,
    generation,
    pictures,
    pool,
    questions,
    scenes,
    shards,
    speech,
    tokens,
)
from training.omni import weights as saved_weights
from training.omni.features import Medium, Picture
from training.omni.network import DEVIATION, MEAN, TINY, OmniNetwork
from training.phrasings import Draw, Split
from training.rendering import render
from training.shards import TOKEN

SIZES = ((168, 168), (300, 200), (90, 140), (640, 480), (101, 101), (130, 100), (57, 400))


def draw(seed: int, split: Split = Split.TRAIN) -> Draw:
    return Draw(Random(seed), split)


def random_network(seed: int = 0) -> OmniNetwork:
    """Weights large enough that what is seen and heard decides the tokens."""
    torch.manual_seed(seed)
    network = OmniNetwork(TINY)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=2.0 / parameter[0].numel() ** 0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return network.eval()


def processed_image(image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
    settings = export.processors()["preprocessor_config.json"]
    processor = Qwen2VLImageProcessorPil(size=settings["size"])
    found = processor(images=[image], return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"]


@pytest.mark.parametrize("size", SIZES)
def test_pictures_are_what_the_library_makes_of_them(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise)
    values, grid = processed_image(image)
    mine = features.picture(image)
    assert grid.tolist() == [[1, mine.rows, mine.columns]]
    assert len(mine.patches) <= features.MAX_PATCHES
    levels = (mine.patches.reshape(-1, 3, 1, 196) / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(
        DEVIATION, (3, 1, 1)
    )
    both_frames = np.repeat(levels, 2, 2).reshape(len(mine.patches), -1)
    assert np.abs(both_frames - values.numpy()).max() < 1e-4


@pytest.mark.parametrize("count", [1600, 16_000, 16_079, 33_333, 60_001])
def test_sounds_are_what_the_library_makes_of_them(count: int) -> None:
    wave = np.random.default_rng(count).normal(0, 0.1, count).astype(np.float32)
    wave[count // 2 :] *= 0.01
    found = WhisperFeatureExtractor(feature_size=128)(
        wave, sampling_rate=16_000, return_attention_mask=True, return_tensors="np", padding="max_length"
    )
    frames = int(found["attention_mask"].sum())
    mine = features.log_mel(wave)
    assert len(mine) == frames
    assert np.abs(mine - found["input_features"][0, :, :frames].T).max() < 2e-3
    assert np.abs(features.as_bytes(mine) / 64 - 2 - mine).max() <= 1 / 128 + 1e-6


def _media_prompt(seed: int) -> tuple[str, tuple[Medium, ...]]:
    source = draw(seed, Split.HELD_OUT)
    media = (
        *questions.same_number(source).media,
        *questions.asked_aloud(source).media,
        *questions.placed(source).media,
    )
    picture, sound = tokens.PICTURE_PART, tokens.SOUND_PART
    user = f"Compare {picture}with {sound} and {sound}{picture}please."
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n", media


def library_inputs(prompt: generation.Prompt) -> dict[str, torch.Tensor]:
    """What the library's processors hand to the model, from the same bytes."""
    pictures = [medium for medium in prompt.media if isinstance(medium, Picture)]
    sounds = [medium for medium in prompt.media if isinstance(medium, features.Sound)]
    mean, deviation = np.reshape(MEAN, (3, 1, 1)), np.reshape(DEVIATION, (3, 1, 1))
    values = [
        np.repeat((one.patches.reshape(-1, 3, 1, 196) / 255 - mean) / deviation, 2, 2).reshape(len(one.patches), -1)
        for one in pictures
    ]
    longest = max(len(one.frames) for one in sounds)
    heard = np.zeros((len(sounds), features.MELS, longest), np.float32)
    mask = np.zeros((len(sounds), longest), np.int64)
    for at, one in enumerate(sounds):
        heard[at, :, : len(one.frames)] = (one.frames.astype(np.float32) / 64 - 2).T
        mask[at, : len(one.frames)] = 1
    return {
        "input_ids": torch.from_numpy(prompt.ids.astype(np.int64))[None],
        "attention_mask": torch.ones(1, len(prompt.ids), dtype=torch.long),
        "pixel_values": torch.from_numpy(np.concatenate(values)).float(),
        "image_grid_thw": torch.tensor([[1, one.rows, one.columns] for one in pictures]),
        "input_features": torch.from_numpy(heard),
        "feature_attention_mask": torch.from_numpy(mask),
    }


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_network_is_the_librarys(seed: int) -> None:
    """Positions, logits and greedy tokens, with two pictures and two sounds in one prompt."""
    network, tokenizer = random_network(seed), tokens.make()
    model = export.as_thinker(network)
    prompt = generation.prompt(tokenizer, *_media_prompt(seed), limit=12)
    given = library_inputs(prompt)
    places, _ = model.model.get_rope_index(
        given["input_ids"],
        given["image_grid_thw"],
        None,
        given["attention_mask"],
        False,
        given["feature_attention_mask"].sum(1),
    )
    assert places[:, 0].tolist() == prompt.positions.tolist()
    with torch.no_grad():
        wanted = model(**given).logits[0]
        x, positions, _ = generation._inputs(network, [prompt], len(prompt.ids), torch.device("cpu"))
        mine = network.logits(network(x, *network.rotations(positions), None))[0]
        tokens_wanted = model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=2)
    assert (mine - wanted).abs().max() < 1e-3 * wanted.abs().max()
    (written,) = generation.generate(network, [prompt])
    assert written == tokens_wanted[0, len(prompt.ids) :].tolist()


def test_replies_do_not_depend_on_their_neighbours() -> None:
    network, tokenizer = random_network(4), tokens.make()
    prompts = [generation.prompt(tokenizer, *_media_prompt(seed), limit=8) for seed in (1, 2)]
    prompts.append(generation.prompt(tokenizer, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", (), 8))
    together = generation.generate(network, prompts)
    assert together == [generation.generate(network, [one])[0] for one in prompts]


def test_packed_rows_give_the_logits_of_their_documents() -> None:
    """Media arrive in their places, also where a picture is used twice."""
    network, tokenizer = random_network(5), tokens.make()
    source = draw(6)
    shown = [one for _ in range(6) for one in questions.media_samples(source)]
    documents = [shards.document(tokenizer, one) for one in shown]
    rows = shards.packed(iter(documents * 4), 600, 3)
    arrays = shards.arrays(rows, 600)
    packed, positions, media = pool.media_batch(arrays, range(3), torch.device("cpu"))
    assert positions is not None
    with torch.no_grad():
        embedded = network.embed((packed & 0x3FFF).long(), media)
        for number, row in enumerate(rows):
            at = 0
            for found in row:
                alone = generation.Prompt(found.row & TOKEN, found.positions, found.media)
                x, places, _ = generation._inputs(network, [alone], len(found.row), torch.device("cpu"))
                assert torch.allclose(x[0], embedded[number, at : at + len(found.row)], atol=1e-4)
                assert torch.equal(places[:, 0], positions[:, number, at : at + len(found.row)].int())
                at += len(found.row)


def test_a_finished_model_is_loaded_again(tmp_path: Path) -> None:
    network = random_network(7)
    export.save(network, tmp_path / "model")
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model.config.vision_start_token_id == tokens.IDS[tokens.VISION_BEGIN]
    for load in (export.restore, lambda again, folder: saved_weights.load_model(folder, again)):
        again = OmniNetwork(TINY)
        load(again, tmp_path / "model")
        for name, value in network.state_dict().items():
            assert torch.equal(value.to(torch.bfloat16).float(), again.state_dict()[name]), name


def test_a_run_is_loaded_again(tmp_path: Path) -> None:
    network, again = random_network(8), OmniNetwork(TINY)
    saved_weights.save(tmp_path, network, {"step": 3, "tiny": True})
    assert saved_weights.load(tmp_path, again)["step"] == 3
    assert all(path.stat().st_size < 16 * 2**20 for path in tmp_path.iterdir())
    for name, value in network.state_dict().items():
        assert torch.equal(value.half().float(), again.state_dict()[name]), name
    assert evaluate.load(tmp_path).shape == TINY


def test_the_template_writes_what_training_reads() -> None:
    source = draw(9)
    written = Environment().from_string(export.template())
    for _ in range(60):
        for shown in questions.media_samples(source):
            messages = [
                {"role": one.role, "content": _parts(one.content), "reasoning_content": one.thinking}
                for one in shown.sample.messages[:-1]
            ]
            options = {} if shown.sample.thinks else {"enable_thinking": False}
            found = written.render(messages=messages, add_generation_prompt=True, **options)
            assert found == render(shown.sample)[0]


def _parts(content: str) -> list[dict[str, str]]:
    marked = content.replace(tokens.PICTURE_PART, "\0image\0").replace(tokens.SOUND_PART, "\0audio\0").split("\0")
    return [{"type": "text", "text": one} if at % 2 == 0 else {"type": one} for at, one in enumerate(marked)]


def test_the_text_of_samples_is_a_pure_function_of_the_seed() -> None:
    """Not their sounds: espeak-ng keeps a state from word to word."""
    first, again, other = ([_texts(source) for _ in range(30)] for source in (draw(5), draw(5), draw(6)))
    assert first == again != other


def _texts(source: Draw) -> list[tuple[str, str]]:
    return [render(one.sample) for one in questions.media_samples(source)]


@pytest.mark.parametrize("split", list(Split))
def test_wanted_replies_pass_their_own_checks(split: Split) -> None:
    source = draw(10, split)
    wrong = Reply("zzqx 7770777", (), True, True)
    for _ in range(250):
        for shown in questions.media_samples(source):
            expect = shown.sample.expect
            assert expect is not None
            assert right(read(render(shown.sample)[1], shown.sample.thinks), expect), (expect, render(shown.sample))
            assert not right(wrong, expect)


@pytest.mark.parametrize("bar", bars.BARS, ids=lambda bar: bar.name)
def test_cases_of_a_bar_are_fresh_and_can_be_judged(bar: bars.MediaBar) -> None:
    cases = bars.cases(bar, 6, 5)
    for case in cases:
        assert case.sample.expect is not None
        assert case.sample.thinks is bar.thinks
        assert right(read(render(case.sample)[1], case.sample.thinks), case.sample.expect)
        prompt = generation.prompt(tokens.make(), render(case.sample)[0], case.media, 8)
        assert len(prompt.ids) == prompt.positions.shape[1]
    assert [render(one.sample) for one in cases] == [render(one.sample) for one in bars.cases(bar, 6, 5)]


def test_things_of_a_scene_have_places_of_their_own_and_stand_out() -> None:
    source = draw(11)
    for _ in range(300):
        scene = scenes.scene(source, source.between(1, 6))
        cells = [thing.cell for thing in scene.things]
        assert cells == sorted(set(cells))
        assert all(scenes.contrast(thing.rgb, scene.background) >= 100 for thing in scene.things)


def test_the_colour_of_a_thing_is_in_the_picture() -> None:
    source = draw(12)
    for _ in range(20):
        scene = scenes.scene(source, 3)
        found = features.picture(pictures.draw_scene(source, scene)).patches.reshape(-1, 3, 196)
        pixels = found.transpose(0, 2, 1).reshape(-1, 3).astype(int)
        for thing in scene.things:
            near = np.abs(pixels - np.array(thing.rgb)).sum(1) < 60
            assert near.sum() > 20, thing


def test_unseen_voices_are_unseen() -> None:
    assert not set(speech.UNSEEN_VARIANTS) & set(speech.VARIANTS)
    waves = [speech.spoken(draw(seed, split), "forty-two") for seed in range(4) for split in Split]
    assert all(0.3 < len(wave) / features.RATE < 2.5 and np.abs(wave).max() > 0.05 for wave in waves)


def test_every_voice_speaks() -> None:
    voice = speech.voice()
    for accent in sorted(set(speech.ACCENTS)):
        assert len(voice.say("nine", accent)) > 2000
    for variant in (*speech.VARIANTS, *speech.UNSEEN_VARIANTS):
        assert len(voice.say("nine", f"gmw/en-US+{variant}" if variant else "gmw/en-US")) > 2000, variant


def test_the_pool_loads_whole_shards_once_and_then_repeats(tmp_path: Path) -> None:
    tokenizer = tokens.make()
    (tmp_path / "media-000001.part7").write_bytes(b"half")
    loaded = pool.Pool(tmp_path, "media-*.npz", lambda path: pool.media_batches(path, 2, torch.device("cpu")), 1e9)
    shards.write(tmp_path / "media-000000.npz", shards.shard(1, 0, 512, tokenizer, rows=2))
    first = loaded.next([])
    assert all(loaded.next([]) is first for _ in range(3))
    loaded.close()
    assert (loaded.fresh_count, loaded.repeated_count) == (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["media-000001.part7"]
