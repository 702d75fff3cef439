import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from palaver.engines.torch import load
from palaver.engines.torch.loader import open_checkpoint
from palaver.errors import BadParameter, BrokenModel, NoWeights, UnknownModel, UnsafeCode, UnsafeWeights
from tests.engines.tiny import VOCABULARY


@pytest.fixture
def folder(tmp_path: Path, folder_of: Callable[[str], Path]) -> Path:
    """A copy to break."""
    for path in folder_of("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_whole_folder_opens_with_its_sizes(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    assert (embedding.dtype, embedding.shape, embedding.nbytes) == ("F32", (262, 64), 262 * 64 * 4)


def test_no_such_folder_or_file_names_it(tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "~/no/where/at/all"):
        with pytest.raises(UnknownModel, match="no such folder"):
            open_checkpoint(name)


def test_without_weights_or_with_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(NoWeights):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        open_checkpoint(folder)


def test_an_empty_folder_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(NoWeights):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "nobody_knows"}', "{}"])
def test_a_broken_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(BrokenModel):
        open_checkpoint(folder)


def test_a_model_with_code_of_its_own(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(UnsafeCode):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"short", struct.pack("<Q", 2**60), struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"],
    ids=["empty", "short", "huge header", "no json", "no object"],
)
def test_a_broken_safetensors_file(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(BrokenModel, match="isn't a complete safetensors file"):
        open_checkpoint(folder)


def test_a_cut_safetensors_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BrokenModel, match="length differs"):
        open_checkpoint(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match="model-00001-of-00002"):
        open_checkpoint(folder)


def test_missing_tensors_are_an_error_not_random_numbers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(BrokenModel, match="lack"):
        load(folder, vocabulary=VOCABULARY)
    assert capfd.readouterr() == ("", "")


def test_a_configuration_that_does_not_fit_the_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(BrokenModel):
        load(folder, vocabulary=VOCABULARY)


def test_an_unknown_device_or_dtype(folder: Path) -> None:
    with pytest.raises(BadParameter, match="device"):
        load(folder, vocabulary=VOCABULARY, device="abacus")
    with pytest.raises(BadParameter, match="dtype"):
        load(folder, vocabulary=VOCABULARY, dtype="int3")
