"""llama.cpp in its engine process: hostile files, and which files it runs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.chat.engine_choice import LoadOptions, make_spec, pick_engine
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.process import ChildProcess
from palaver.engines.host.supervisor import HostedEngine
from palaver.errors import BadParameter, BrokenModel, EngineError, ModelError, PalaverError
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
from palaver.generation import Prompt
from palaver.gguf import read_gguf
from palaver.models.resolver import ResolvedModel, resolve_folder, resolve_model
from palaver.sampling import Sampling
from tests.engines.generate import run
from tests.gguf_files import convert_qwen3, qwen3_metadata, qwen3_tensors, write_gguf

PROMPT = Prompt((400, 500, 600, 700))


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_qwen3(resolve_folder("sprout"), tmp_path_factory.mktemp("gguf") / "sprout.gguf")


@pytest.fixture(scope="module")
def vocabulary(sprout: Path) -> tuple[bytes, ...]:
    return tuple(load_gguf_tokenizer(read_gguf(sprout)).vocabulary)


async def start_error(path: Path, child: ChildProcess | None = None) -> str:
    with pytest.raises(ModelError) as error:
        await HostedEngine(EngineSpec("llamacpp", path, (), context=64, max_running=1), child=child).start()
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_files_that_llama_cpp_refuses_end_in_one_sentence(tmp_path: Path, sprout: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sprout.read_bytes()[:-100_000])
    assert "cut.gguf is damaged" in await start_error(cut)
    metadata, tensors = qwen3_metadata(resolve_folder("sprout")), qwen3_tensors(resolve_folder("sprout"))
    tensors["blk.0.attn_q.weight"] = ("f32", tensors["blk.0.attn_q.weight"][1][:64])
    wrong = write_gguf(tmp_path / "wrong.gguf", metadata, tensors)
    assert "llama.cpp can't load wrong.gguf" in await start_error(wrong)


async def test_a_process_loads_the_weights_ahead(tmp_path: Path, sprout: Path, vocabulary: tuple[bytes, ...]) -> None:
    """The replies are the same, and so is the error of a damaged file."""
    spec = EngineSpec("llamacpp", sprout, vocabulary, context=64, max_running=1)
    async with HostedEngine(spec) as engine:
        expected = await run(engine, PROMPT, Sampling(temperature=0, max_tokens=4))
    with ChildProcess(sprout) as child:
        async with HostedEngine(spec, child=child) as engine:
            assert (await run(engine, PROMPT, Sampling(temperature=0, max_tokens=4))).ids == expected.ids
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sprout.read_bytes()[:-100_000])
    with ChildProcess(cut) as child:
        assert "cut.gguf is damaged" in await start_error(cut, child)


async def test_where_llama_cpp_aborts_the_error_is_what_it_printed(tmp_path: Path) -> None:
    metadata, tensors = qwen3_metadata(resolve_folder("sprout")), qwen3_tensors(resolve_folder("sprout"))
    path = write_gguf(tmp_path / "wrong.gguf", metadata | {"qwen3.rope.dimension_count": 64}, tensors)
    with pytest.raises(EngineError, match=r"SIGABRT while it loaded the model: [\w.]+:\d+: GGML_ASSERT\(.+\) failed$"):
        await HostedEngine(EngineSpec("llamacpp", path, (), context=64, max_running=1)).start()


@pytest.mark.slow
async def test_mutated_files_end_in_an_error_or_run(tmp_path: Path, vocabulary: tuple[bytes, ...]) -> None:
    """Those that the reader takes: llama.cpp loads, refuses or aborts, and the supervisor lives on."""
    folder = resolve_folder("sprout")
    data = convert_qwen3(folder, tmp_path / "whole.gguf").read_bytes()
    rng, path, tried = random.Random(11), tmp_path / "mutated.gguf", 0
    for _ in range(400):
        mutated = bytearray(data)
        place = rng.randrange(24, 1500)
        mutated[place] = rng.randrange(256)
        path.write_bytes(mutated)
        try:
            read_gguf(path)
        except BrokenModel:
            continue
        tried += 1
        engine = HostedEngine(EngineSpec("llamacpp", path, tuple(vocabulary), context=128, max_running=1))
        try:
            async with asyncio.timeout(120):
                await engine.start()
                await run(engine, PROMPT, Sampling(max_tokens=2))
        except PalaverError as error:
            print(error)
        finally:
            await engine.close()
        if tried == 6:  # benchmarks/gguf_fuzz.py tries many
            return
    raise AssertionError("hardly any mutated header was read")


def test_the_engine_follows_from_the_files(sprout: Path) -> None:
    gguf, folder = resolve_model(str(sprout)), ResolvedModel(resolve_folder("sprout"))
    for llamacpp in (LoadOptions(engine="llamacpp"), LoadOptions(compiled=False), LoadOptions(gpu_layers=3)):
        assert pick_engine(gguf, llamacpp) == "llamacpp"
    assert pick_engine(folder) == pick_engine(folder, LoadOptions(engine="torch")) == "torch"
    with pytest.raises(BadParameter, match="a GGUF file is run by llamacpp"):
        pick_engine(gguf, LoadOptions(engine="torch"))
    with pytest.raises(BadParameter, match="is run by torch"):
        pick_engine(folder, LoadOptions(engine="llamacpp"))
    with pytest.raises(BadParameter, match="is for a folder"):
        make_spec(gguf, (), LoadOptions(dtype="float32"))
    with pytest.raises(BadParameter, match="is for a GGUF file"):
        make_spec(folder, (), LoadOptions(gpu_layers=3))
    assert make_spec(gguf, (), LoadOptions(gpu_layers=3)).gpu_layers == 3
    for model in (gguf, folder):
        assert make_spec(model, (), LoadOptions(threads=3)).threads == 3
    with pytest.raises(BadParameter, match="--threads must be at least 1"):
        LoadOptions(threads=0)
