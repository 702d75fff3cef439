"""llama.cpp's library: known layouts, refused builds and platforms, and passes against torch."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.engines.llamacpp import library as module
from palaver.engines.llamacpp.context import MAX_BATCH, Aborted, Context, ContextSettings, LoadedModel, NoRoom
from palaver.engines.llamacpp.library import (
    LAYOUTS,
    Batch,
    CantUseLlamaCpp,
    check_platform,
    find_layout,
    load_library,
)
from palaver.errors import BrokenModel, EngineError
from palaver.models.resolver import resolve_folder
from tests.gguf_files import convert_qwen3, qwen3_metadata, qwen3_tensors, write_gguf

IDS = [7 + place * 13 % 4000 for place in range(60)]


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_qwen3(resolve_folder("sprout"), tmp_path_factory.mktemp("gguf") / "sprout.gguf")


@pytest.fixture(scope="module")
def model(sprout: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel([sprout])
    yield loaded
    loaded.close()


@pytest.fixture
def context(model: LoadedModel) -> Iterator[Context]:
    opened = Context(model, ContextSettings(1024, 4, float32=True, flash_attention=False))
    yield opened
    opened.close()


def test_the_structs_have_the_measured_sizes() -> None:
    layout = LAYOUTS[10566]
    assert ctypes.sizeof(layout.model_params) == 72
    assert ctypes.sizeof(layout.context_params) == 160
    assert ctypes.sizeof(Batch) == 56


def test_unknown_builds_are_refused() -> None:
    with pytest.raises(CantUseLlamaCpp, match=r"build 11549 of llama\.cpp is not known"):
        find_layout(11549)


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field more or less moves the defaults after it."""
    path = Path(str(load_library()._library._name))

    class Shifted(ctypes.Structure):
        _fields_ = LAYOUTS[10566].context_params._fields_[1:]

    layout = dataclasses.replace(LAYOUTS[10566], context_params=Shifted)
    monkeypatch.setitem(module.LAYOUTS, 10566, layout)
    with pytest.raises(CantUseLlamaCpp, match="another layout"):
        module.LlamaLibrary(path, 10566)


@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [("win32", "AMD64", "Windows"), ("linux", "aarch64", "Linux on aarch64"), ("freebsd14", "amd64", "freebsd14")],
)
def test_other_platforms_are_refused(system: str, machine: str, named: str) -> None:
    with pytest.raises(CantUseLlamaCpp, match=named):
        check_platform(system, machine)


@pytest.mark.parametrize(("system", "machine"), [("linux", "x86_64"), ("darwin", "arm64"), ("darwin", "x86_64")])
def test_supported_platforms(system: str, machine: str) -> None:
    check_platform(system, machine)


def test_logits_are_those_of_torch(context: Context) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(resolve_folder("sprout"), dtype=torch.float32)
    with torch.inference_mode():
        expected = own(torch.tensor([IDS])).logits[0].numpy()
    found = context.decode([(0, 0, IDS)])[0]
    assert np.abs(found - expected[-1]).max() <= 1e-4
    for position, token_id in enumerate(IDS):
        found = context.decode([(1, position, [token_id])])[0]
        assert np.abs(found - expected[position]).max() <= 1e-4


def test_a_batch_of_prefill_and_decode(context: Context) -> None:
    alone = context.decode([(0, 0, IDS)])[0]
    context.decode([(1, 0, IDS[:-1]), (2, 0, IDS[:9])], need_logits=False)
    rows = context.decode([(1, len(IDS) - 1, IDS[-1:]), (2, 9, IDS[9:]), (3, 0, IDS)])
    assert rows.shape == (3, 4096)
    assert np.abs(rows - alone).max() < 1e-4


def test_sequences_are_cut_copied_saved_and_restored(context: Context) -> None:
    alone = context.decode([(0, 0, IDS)])[0]
    assert context.length(0) == len(IDS)
    context.copy(0, 1)
    assert context.truncate(1, 30)
    assert context.length(1) == 30
    assert np.abs(context.decode([(1, 30, IDS[30:])])[0] - alone).max() < 1e-4
    state = context.save(0)
    assert context.restore(2, state)
    assert context.truncate(2, len(IDS) - 1)
    assert np.abs(context.decode([(2, len(IDS) - 1, IDS[-1:])])[0] - alone).max() < 1e-4
    assert context.truncate(2, 0)
    assert context.length(2) == 0


def test_a_full_cache_raises(context: Context) -> None:
    context.decode([(0, 0, [5] * 256)], need_logits=False)
    with pytest.raises(NoRoom):
        context.decode([(0, 256, [5])])
    assert context.length(0) == 256


def test_wrong_positions_and_sequences_do_not_end_the_process(context: Context) -> None:
    context.decode([(0, 0, IDS)])
    with pytest.raises(EngineError):
        context.decode([(0, 200, IDS)])
    with pytest.raises(AssertionError):
        context.decode([(4, 0, IDS)])
    with pytest.raises(AssertionError):
        context.decode([(0, 0, [5] * (MAX_BATCH + 1))])
    with pytest.raises(AssertionError):
        context.truncate(4, 0)


def test_abort_ends_passes(context: Context) -> None:
    context.abort()
    with pytest.raises(Aborted):
        context.decode([(0, 0, IDS)])


def test_llama_cpp_refuses_a_file_without_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "nothing.gguf", {"general.architecture": "qwen3"})
    with pytest.raises(BrokenModel, match=r"llama.cpp can't load nothing.gguf \(.+\)"):
        LoadedModel([path])


def test_an_adapter_changes_the_logits_as_its_matrices_say(model: LoadedModel, tmp_path: Path) -> None:
    rng, name = np.random.default_rng(2), "blk.3.attn_q.weight"
    folder = resolve_folder("sprout")
    tensors = qwen3_tensors(folder)
    a, b = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((4, 256), (256, 4)))
    metadata = {"general.type": "adapter", "general.architecture": "qwen3"}
    metadata |= {"adapter.type": "lora", "adapter.lora.alpha": 8.0}  # type: ignore[dict-item]
    pair = {f"{name}.lora_a": ("f32", a), f"{name}.lora_b": ("f32", b)}
    adapter = write_gguf(tmp_path / "adapter.gguf", metadata, pair)
    tensors[name] = ("f32", tensors[name][1] + 8 / 4 * (b @ a))
    merged = LoadedModel([write_gguf(tmp_path / "merged.gguf", qwen3_metadata(folder), tensors)])
    settings = ContextSettings(256, 1, float32=True, flash_attention=False)
    contexts = [Context(model, settings), Context(model, settings, adapter), Context(merged, settings)]
    plain, adapted, expected = [context.decode([(0, 0, IDS)]) for context in contexts]
    assert np.abs(adapted - expected).max() < 1e-3
    assert np.abs(adapted - plain).max() > 0.1
    with pytest.raises(BrokenModel, match="can't load the adapter merged"):
        Context(model, settings, tmp_path / "merged.gguf")
    for context in contexts:
        context.close()
    merged.close()
