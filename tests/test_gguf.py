"""GGUF headers: right files are read, and damaged or hostile ones end in one sentence."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palaver.errors import BrokenModel
from palaver.gguf import TENSOR_TYPES, GGUFHeader, is_gguf, is_later_part, read_gguf, split_files
from tests.gguf_files import tokenizer_metadata, write_gguf
from tests.tiny import byte_level

METADATA: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 2,
    "qwen3.rope.freq_base": 1e6,
    "tokenizer.ggml.add_bos_token": False,
    "numbers": [1, 2, 3],
    "scores": [0.5, -1.0],
    "negative": -5,
}
TENSORS = {
    "token_embd.weight": ("f16", np.arange(128, dtype=np.float32).reshape(2, 64)),
    "blk.0.weight": ("q8_0", np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", {**METADATA, **tokenizer_metadata(byte_level())}, TENSORS)


def read_error(path: Path) -> str:
    with pytest.raises(BrokenModel) as error:
        read_gguf(path)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_header_is_read(file: Path) -> None:
    header = read_gguf(file)
    assert is_gguf(file)
    assert header.architecture == "qwen3"
    assert header.model_integer("block_count") == 2
    assert header.number("qwen3.rope.freq_base") == 1e6
    assert header.flag("tokenizer.ggml.add_bos_token") is False
    assert header.integer("negative") == -5
    numbers = header.numbers("numbers")
    assert numbers is not None
    assert numbers.tolist() == [1, 2, 3]
    tokens = header.texts("tokenizer.ggml.tokens")
    assert tokens is not None
    assert "<|im_start|>" in tokens
    assert [(tensor.name, tensor.shape, tensor.type.name, tensor.nbytes) for tensor in header.tensors] == [
        ("token_embd.weight", (64, 2), "F16", 256),
        ("blk.0.weight", (64, 2), "Q8_0", 136),
    ]
    assert header.weights_bytes == 392


def test_missing_keys_are_none_and_wrong_types_are_refused(file: Path) -> None:
    header = read_gguf(file)
    assert header.text("missing") is None
    for read in (header.text, header.integer, header.flag, header.number):
        with pytest.raises(BrokenModel, match="wrong type"):
            read("numbers")
    with pytest.raises(BrokenModel, match="wrong type"):
        header.integer("tokenizer.ggml.add_bos_token")


def split(tmp_path: Path, parts: int = 2, count: int | None = None) -> list[Path]:
    files = []
    for number, (name, tensor) in enumerate(TENSORS.items()):
        metadata = {"split.no": number, "split.count": parts if count is None else count}
        metadata |= METADATA if number == 0 else {}
        files.append(write_gguf(tmp_path / f"m-{number + 1:05}-of-{parts:05}.gguf", metadata, {name: tensor}))
    return files


def test_split_files_are_one_model(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    assert split_files(first) == split_files(second) == (first, second)
    header = read_gguf(first)
    assert [tensor.name for tensor in header.tensors] == list(TENSORS)
    assert is_later_part(second.name)
    assert not is_later_part(first.name)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    second.unlink()
    assert second.name in read_error(first)


def test_the_number_of_parts_is_that_of_the_name(tmp_path: Path) -> None:
    assert "one of 7 parts" in read_error(split(tmp_path, count=7)[0])


def header_bytes(*parts: bytes, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HUGE = (1 << 63) - 1
HOSTILE = {
    "empty": b"",
    "another format": b"PK\3\4" + bytes(64),
    "only a magic": b"GGUF",
    "version 1": header_bytes(version=1),
    "big-endian": header_bytes(version=3 << 24),
    "huge number of keys": header_bytes(keys=HUGE),
    "huge number of tensors": header_bytes(tensors=HUGE),
    "many keys, no data": header_bytes(keys=60_000),
    "huge name": header_bytes(struct.pack("<Q", HUGE), keys=1),
    "name is not UTF-8": header_bytes(key(b"\xff\xfe", 4, bytes(4)), keys=1),
    "unknown type": header_bytes(key(b"a", 77, bytes(8)), keys=1),
    "huge text": header_bytes(key(b"a", 8, struct.pack("<Q", HUGE)), keys=1),
    "long text, no data": header_bytes(key(b"a", 8, struct.pack("<Q", 1 << 20)), keys=1),
    "huge array": header_bytes(key(b"a", 9, struct.pack("<IQ", 4, HUGE)), keys=1),
    "array, no data": header_bytes(key(b"a", 9, struct.pack("<IQ", 12, 1 << 20)), keys=1),
    "texts, no data": header_bytes(key(b"a", 9, struct.pack("<IQ", 8, 1 << 20)), keys=1),
    "one huge text of many": header_bytes(key(b"a", 9, struct.pack("<IQQ", 8, 2, HUGE) + bytes(99)), keys=1),
    "nested arrays": header_bytes(key(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(99)), keys=1),
    "the same key twice": header_bytes(key(b"a", 4, bytes(4)), key(b"a", 4, bytes(4)), keys=2),
    "alignment 0": header_bytes(key(b"general.alignment", 4, bytes(4)), keys=1),
}


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", kind, offset)


HOSTILE |= {
    "tensor beyond the end": header_bytes(tensor(shape=(1 << 20,)), bytes(99), tensors=1),
    "tensor of huge size": header_bytes(tensor(shape=(1 << 32, 1 << 32, 1 << 32)), bytes(999), tensors=1),
    "tensor at a huge offset": header_bytes(tensor(offset=1 << 62), bytes(999), tensors=1),
    "tensor that is not aligned": header_bytes(tensor(offset=4), bytes(999), tensors=1),
    "tensor of an unknown type": header_bytes(tensor(kind=5), bytes(999), tensors=1),
    "tensor with part of a block": header_bytes(tensor(shape=(33,), kind=8), bytes(999), tensors=1),
    "tensor of nothing": header_bytes(tensor(shape=(0,)), bytes(999), tensors=1),
    "tensor with nine dimensions": header_bytes(tensor(shape=(1,) * 9), bytes(999), tensors=1),
    "tensor without dimensions": header_bytes(tensor(shape=()), bytes(999), tensors=1),
    "two tensors of one name": header_bytes(tensor(), tensor(), bytes(999), tensors=2),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_end_in_one_sentence(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    began = time.monotonic()
    assert "bad.gguf" in read_error(path)
    assert time.monotonic() - began < 10


def test_every_truncation_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 200, 7), *range(200, len(data) - 32, 997)]:
        path.write_bytes(data[:size])
        read_error(path)


def test_a_thousand_mutated_headers_are_read_or_refused(file: Path, tmp_path: Path) -> None:
    """Any bytes may change. A header that is read anyway is one whose counts and sizes fit the file."""
    data, rng, path = file.read_bytes(), random.Random(7), tmp_path / "mutated.gguf"
    sentences: list[str] = []
    for _ in range(1000):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 1, 4, 16))):
            place = rng.randrange(min(len(data), 1200) if rng.random() < 0.7 else len(data))
            mutated[place : place + rng.choice((1, 8))] = rng.choice((b"\0", b"\xff" * 8, rng.randbytes(1)))
        path.write_bytes(mutated)
        try:
            assert isinstance(read_gguf(path), GGUFHeader)
        except BrokenModel as error:
            sentences.append(str(error))
    assert 200 < len(sentences) < 1000
    assert not any("\n" in sentence for sentence in sentences)


def test_block_sizes_are_those_of_llama_cpp() -> None:
    import ctypes

    pytest.importorskip("xllamacpp")
    from palaver.engines.llamacpp.library import load_library

    library = load_library()
    library.ggml_type_size.restype, library.ggml_blck_size.restype = ctypes.c_size_t, ctypes.c_int64
    library.ggml_type_name.restype = ctypes.c_char_p
    for number, kind in TENSOR_TYPES.items():
        found = library.ggml_type_name(number).decode(), library.ggml_blck_size(number), library.ggml_type_size(number)
        assert (kind.name.lower(), kind.block, kind.nbytes) == (found[0].lower(), *found[1:])
