"""Names of GGUF models: a file, a folder, a repository of the hub, and a model that Ollama downloaded."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaver.errors import UnknownModel
from palaver.gguf import is_gguf, is_later_part

OLLAMA_PREFIX = "ollama:"
MEMORY_SHARE = 0.8
"""The part of the machine's memory that the weights may take."""
PREFERRED = "Q4_K_M"
"""The quantisation that most people use: small, and hardly worse than the original."""
LARGEST = "Q8_0"
"""Larger ones than this are only slower."""
_QUANTISATION = re.compile(r"(?:^|[-._/])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*)(?=$|[-._/])", re.IGNORECASE)
_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")
_COUNT = re.compile(r"-of-(\d{5})\.gguf$")
_SIZE_ORDER = ("f32", "bf16", "f16")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
_OLLAMA_LAYER = "application/vnd.ollama.image."


@dataclass(frozen=True, slots=True)
class GGUFChoice:
    """One model of several, with the bytes of all of its parts."""

    name: str
    """The file's path in the folder or repository; of the first part."""
    nbytes: int

    @property
    def quantisation(self) -> str:
        """Such as "Q4_K_M"; empty if the name doesn't say it."""
        found = _QUANTISATION.findall(_COUNT.sub("", _PART.sub("", self.name)).removesuffix(".gguf"))
        return found[-1].upper() if found else ""


def list_choices(sizes: Mapping[str, int]) -> list[GGUFChoice]:
    """The models among files, by path and size. Parts count together; projectors of images are left out."""
    firsts = [name for name in sizes if name.endswith(".gguf") and not is_later_part(Path(name).name)]
    chats = [name for name in firsts if "mmproj" not in Path(name).name.lower()]
    return [GGUFChoice(name, sum(sizes[part] for part in parts_of(name, sizes))) for name in sorted(chats)]


def parts_of(first: str, names: Iterable[str]) -> list[str]:
    """The paths of all parts of a model, given its first or only one."""
    stem = _PART.sub("", first)
    return sorted(name for name in names if name == first or (stem != first and _PART.sub("", name) == stem))


def choose(model: str, choices: Sequence[GGUFChoice], wanted: str, memory: int | None) -> GGUFChoice:
    """The model with the wanted quantisation; if none is named, Q4_K_M or else the largest that fits the memory.

    The memory is that of the machine, not what is free now: the choice is the same after a restart.
    """
    if not choices:
        raise UnknownModel(model, "it holds no GGUF file.")
    known = ", ".join(dict.fromkeys(choice.quantisation or choice.name for choice in choices))
    if wanted:
        named = [choice for choice in choices if _is_named(choice, wanted)]
        if not named:
            raise UnknownModel(model, f"there is no {wanted}; there are {known}.")
        return named[0]
    fitting = [choice for choice in choices if memory is None or choice.nbytes <= memory * MEMORY_SHARE]
    if not fitting:
        smallest = min(choices, key=lambda choice: choice.nbytes)
        raise UnknownModel(model, f"even the smallest file ({smallest.nbytes / 1e9:.1f} GB) doesn't fit the memory.")
    for preferred in (PREFERRED, LARGEST):
        for choice in fitting:
            if choice.quantisation == preferred:
                return choice
    small = [choice for choice in fitting if choice.quantisation.lower() not in _SIZE_ORDER]
    return max(small or fitting, key=lambda choice: choice.nbytes)


def _is_named(choice: GGUFChoice, wanted: str) -> bool:
    name = Path(choice.name).name
    return wanted.upper() == choice.quantisation or wanted in (name, name.removesuffix(".gguf"))


def find_in_folder(folder: Path, model: str, wanted: str = "") -> Path:
    """The GGUF file of a folder. Raises UnknownModel."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.gguf")}
    return folder / choose(model, list_choices(sizes), wanted, total_memory()).name


def is_gguf_file(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".gguf" or is_gguf(path))


def find_ollama(name: str) -> Path:
    """The weights of a model that Ollama downloaded, by Ollama's own name: llama3.2, llama3.2:1b, someone/model:tag."""
    model, _, tag = name.partition(":")
    parts = model.split("/")
    if not all(map(_OLLAMA_PART.fullmatch, (*parts, tag or "latest"))) or len(parts) > 3:
        raise UnknownModel(OLLAMA_PREFIX + name, "names of Ollama look like llama3.2:1b.")
    registry = [["registry.ollama.ai", "library", *parts], ["registry.ollama.ai", *parts], parts][len(parts) - 1]
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()
    manifest = root.joinpath("manifests", *registry, tag or "latest")
    if not manifest.is_file():
        raise UnknownModel(OLLAMA_PREFIX + name, f"Ollama has not downloaded it (there is no {manifest}).")
    return root / "blobs" / _weights_blob(manifest, OLLAMA_PREFIX + name)


def _weights_blob(manifest: Path, name: str) -> str:
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        kinds = {layer["mediaType"].removeprefix(_OLLAMA_LAYER): layer["digest"] for layer in layers}
        match = _DIGEST.fullmatch(kinds["model"])
    except (ValueError, KeyError, TypeError, AttributeError):
        match = None
        kinds = {}
    if match is None:
        raise UnknownModel(name, f"Ollama's manifest {manifest} names no weights.")
    if "adapter" in kinds:
        raise UnknownModel(name, "it has an adapter, which is not supported.")
    return f"sha256-{match[1]}"


def find_on_disk(name: str, wanted: str) -> Path | None:
    """The GGUF file in a snapshot of the hub, if all of its parts are there. Any quantisation, if none is named."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.gguf"], local_files_only=True))
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.gguf")}
        chosen = choose(name, list_choices(sizes), wanted, None)
    except Exception:  # nothing usable is on disk: the download reports the reason
        return None
    match = _COUNT.search(chosen.name)
    complete = len(parts_of(chosen.name, sizes)) == (int(match[1]) if match else 1)
    return folder / chosen.name if complete else None


def download(name: str, wanted: str, sizes: Mapping[str, int], bar: Any = None) -> Path:
    """Downloads one model of a repository, with all of its parts and nothing else.

    `sizes`: all of the repository's files. `bar`: a class of progress bars.
    """
    from huggingface_hub import snapshot_download

    chosen = choose(name, list_choices(sizes), wanted, total_memory())
    patterns = [glob.escape(part) for part in parts_of(chosen.name, sizes)]
    return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=bar)) / chosen.name


def total_memory() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().total
