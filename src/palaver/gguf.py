"""Reads the header of GGUF files: metadata and the list of tensors. Nothing in a file is trusted.

A file with false counts, sizes or types raises BrokenModel with one sentence. The time and the memory that reading
takes are bounded by the size of the file.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from palaver.errors import BrokenModel

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 4
MAX_NAME = 1 << 12
MAX_TEXT = 1 << 28
MAX_ITEMS = 1 << 24
"""Elements of one array."""
DEFAULT_ALIGNMENT = 32
ARCHITECTURE = "general.architecture"
_LENGTH = struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of metadata values other than strings and arrays, as the module `struct` names them."""


class TokenKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TensorType:
    name: str
    block: int
    """Values that are stored together."""
    nbytes: int
    """Bytes of a block."""


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: TensorType
    path: Path
    offset: int
    """Of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        values = 1
        for size in self.shape:
            values *= size
        return values // self.type.block * self.type.nbytes


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata and the tensors of a model in one or more files."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Numbers, texts, lists of texts, and arrays of numbers."""
    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return self.files[0].name

    @property
    def architecture(self) -> str:
        return self.text(ARCHITECTURE) or ""

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def pieces(self) -> list[str]:
        """The vocabulary: the text of each token id. Raises BrokenModel without one."""
        pieces = self.texts("tokenizer.ggml.tokens")
        if not pieces:
            raise BrokenModel(f"{self.name} has no vocabulary.")
        return pieces

    @cached_property
    def token_kinds(self) -> list[int]:
        """The `TokenKind` of each token id."""
        kinds, count = self.numbers("tokenizer.ggml.token_type"), len(self.pieces)
        if kinds is None:
            return [TokenKind.NORMAL] * count
        if len(kinds) != count or kinds.typecode in "fd":
            raise BrokenModel(f"{self.name} has {count:,} tokens but {len(kinds):,} kinds of tokens.")
        found: list[int] = kinds.tolist()
        return found

    def text(self, key: str) -> str | None:
        return self._typed(key, str)

    def integer(self, key: str) -> int | None:
        return self._typed(key, int)

    def number(self, key: str) -> float | None:
        whole = isinstance(self.metadata.get(key), int)
        value = self._typed(key, int) if whole else self._typed(key, float)
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool)

    def texts(self, key: str) -> list[str] | None:
        return self._typed(key, list)

    def numbers(self, key: str) -> array[Any] | None:
        return self._typed(key, array)

    def model_integer(self, key: str) -> int | None:
        """A number of the model's architecture, such as `context_length`."""
        return self.integer(f"{self.architecture}.{key}")

    def _typed(self, key: str, kind: type[T]) -> T | None:
        """None if there is no such key. Raises BrokenModel for a value of another type."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            return value
        raise BrokenModel(f"{self.name}: {key} has the wrong type, so the file is damaged or of another format.")


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of a model that is split into several (name-00001-of-00003.gguf), else the file alone."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    prefix, _, count = match.groups()
    files = tuple(path.with_name(f"{prefix}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BrokenModel(f"{path.name} is one of {int(count)} parts, and {missing[0]} is missing beside it.")
    return files


def is_later_part(name: str) -> bool:
    """Whether a file name is that of a part other than the first."""
    match = _SPLIT_NAME.fullmatch(name)
    return match is not None and int(match[2]) != 1


def read_gguf(path: Path) -> GGUFHeader:
    """The header of a model, from all of its files. Raises BrokenModel."""
    files = split_files(path)
    headers = [_read_file(file) for file in files]
    metadata = headers[0][0]
    count = metadata.get("split.count", 1)
    if count not in (0, 1, len(files)):
        raise BrokenModel(f"{path.name} is one of {count} parts, but its name says that there are {len(files)}.")
    return GGUFHeader(files, metadata, tuple(tensor for _, tensors in headers for tensor in tensors))


def read_architecture(path: Path) -> str:
    """The name of the architecture; empty where there is none, or no GGUF file. Reads no more than it must."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _HeaderReader(path, data)
            try:
                return str(reader.read_until(ARCHITECTURE) or "")
            finally:
                reader.close()
    except (OSError, ValueError, BrokenModel):
        return ""


def _read_file(path: Path) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _HeaderReader(path, data)
            try:
                return reader.read()
            finally:
                reader.close()
    except OSError as error:
        raise BrokenModel(f"{path.name} can't be read: {error.strerror}.") from None
    except ValueError:  # an empty file can't be mapped
        raise BrokenModel(f"{path.name} is empty.") from None


class _HeaderReader:
    """Reads one file from its start. Every length is compared with the rest of the file before it is used."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._name = path.name
        self._data = memoryview(data)
        self._at = 0

    def close(self) -> None:
        self._data.release()

    def read(self) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        tensor_count, key_count = self._counts()
        metadata: dict[str, Any] = {}
        for key, value in self._pairs(key_count):
            if key in metadata:
                raise self._broken(f"{key!r} is there twice")
            metadata[key] = value
        return metadata, self._tensors(tensor_count, metadata)

    def read_until(self, wanted: str) -> Any:
        """The value of this key; None if there is no such key."""
        _, key_count = self._counts()
        return next((value for key, value in self._pairs(key_count) if key == wanted), None)

    def _counts(self) -> tuple[int, int]:
        """How many tensors and keys there are."""
        if bytes(self._data[:4]) != MAGIC:
            raise BrokenModel(f"{self._name} is not a GGUF file.")
        self._at = 4
        version = self._unsigned(4)
        if version not in VERSIONS:
            raise BrokenModel(f"{self._name} has version {version} of the GGUF format; known are 2 and 3.")
        tensor_count, key_count = self._unsigned(8), self._unsigned(8)
        if key_count > MAX_KEYS or tensor_count > MAX_TENSORS:
            raise self._broken(f"it claims {key_count:,} keys and {tensor_count:,} tensors")
        return tensor_count, key_count

    def _pairs(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self._text(MAX_NAME)
            yield key, self._value(self._unsigned(4), key)

    def _broken(self, why: str) -> BrokenModel:
        return BrokenModel(f"{self._name} is damaged ({why}): download it again.")

    def _take(self, size: int) -> memoryview:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise self._broken("it ends too early")
        return self._data[start : self._at]

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, limit: int) -> str:
        size = self._unsigned(8)
        if size > limit:
            raise self._broken(f"a text claims {size:,} bytes")
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError:
            raise self._broken("a name or text is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text(MAX_TEXT)
        if kind == ARRAY:
            return self._array(key)
        code = self._code(kind, key)
        value: bool | int | float = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return value

    def _array(self, key: str) -> Any:
        kind, count = self._unsigned(4), self._unsigned(8)
        if count > MAX_ITEMS:
            raise self._broken(f"{key!r} claims {count:,} values")
        return self._texts(count) if kind == STRING else self._numbers(self._code(kind, key), count)

    def _code(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            raise self._broken(f"{key!r} has values of the unknown type {kind}")
        return SCALARS[kind]

    def _numbers(self, code: str, count: int) -> array[Any]:
        numbers: array[Any] = array(code.replace("?", "b"))
        numbers.frombytes(self._take(count * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _texts(self, count: int) -> list[str]:
        """As many calls of `_text`, but quicker: vocabularies have hundreds of thousands of texts."""
        data, at, out = self._data, self._at, []
        if count * 8 > len(data) - at:
            raise self._broken("it ends too early")
        try:
            for _ in range(count):
                start = at + 8
                at = start + _LENGTH.unpack_from(data, at)[0]
                if at > len(data):
                    raise self._broken("it ends too early")
                out.append(str(data[start:at], "utf-8", "replace"))
        except struct.error:
            raise self._broken("it ends too early") from None
        self._at = at
        return out

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> tuple[Tensor, ...]:
        tensors = tuple(self._tensor() for _ in range(count))
        if len({tensor.name for tensor in tensors}) != count:
            raise self._broken("two tensors have the same name")
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._broken(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for tensor in tensors:
            if tensor.offset % alignment or start + tensor.offset + tensor.nbytes > len(self._data):
                raise self._broken(f"the tensor {tensor.name!r} lies outside of the file")
        return tuple(replace(tensor, offset=start + tensor.offset) for tensor in tensors)

    def _tensor(self) -> Tensor:
        """Its offset is that in the data of all tensors."""
        name = self._text(MAX_NAME)
        dimensions = self._unsigned(4)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._unsigned(8) for _ in range(dimensions))
        kind, offset = self._unsigned(4), self._unsigned(8)
        if kind not in TENSOR_TYPES:
            raise BrokenModel(f"{self._name}: the tensor {name!r} has the unknown type {kind}.")
        found = TENSOR_TYPES[kind]
        if any(size == 0 for size in shape) or shape[0] % found.block:
            raise self._broken(f"the shape of the tensor {name!r} doesn't fit its type {found.name}")
        return Tensor(name, shape, found, self._path, offset)
