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
from palaver.memory import total_bytes

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
_PROJECTOR = "mmproj"
"""What the names of projectors contain."""
_PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")
"""The types of projectors, the preferred ones first: quantised ones see worse, and F32 is only larger."""
_FILLERS = frozenset({"", "model", "mmproj", "projector", "vision", "audio"})
"""Words in the names of projectors that name no model."""


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
    """The models among files, by path and size. Parts count together; projectors are left out."""
    firsts = [name for name in sizes if name.endswith(".gguf") and not is_later_part(Path(name).name)]
    chats = [name for name in firsts if not is_projector(name)]
    return [GGUFChoice(name, sum(sizes[part] for part in parts_of(name, sizes))) for name in sorted(chats)]


def is_projector(name: str) -> bool:
    return name.endswith(".gguf") and _PROJECTOR in Path(name).name.lower()


def choose_projector(model: str, names: Iterable[str]) -> str | None:
    """The projector of a model among the files beside it, by their names; None if there is none.

    All words of its name must be in the model's. One whose name names no model is taken where there is one model."""
    names = [name for name in names if name.endswith(".gguf")]
    models = {tuple(_words(name)) for name in names if not is_projector(name)}
    words = {name: set(_words(name)) - _FILLERS for name in names if is_projector(name)}
    fitting = [name for name, used in words.items() if (used or len(models) == 1) and used <= set(_words(model))]
    ranks = {kind: rank for rank, kind in enumerate(_PROJECTOR_TYPES)}
    kinds = {name: GGUFChoice(name, 0).quantisation for name in fitting}
    return min(fitting, key=lambda name: (ranks.get(kinds[name], len(ranks)), name), default=None)


def _words(name: str) -> list[str]:
    """The words of a file's name without its quantisation."""
    stem = _COUNT.sub("", _PART.sub("", Path(name).name)).removesuffix(".gguf")
    return re.split(r"[-._ ]+", _QUANTISATION.sub("", stem).lower())


def find_projector(model: str, file: Path) -> Path | None:
    """The projector beside the file of a model. `model`: the name that was given."""
    if model.startswith(OLLAMA_PREFIX):
        digest = _read_manifest(model)[1].get("projector", "")
        return file.with_name(digest.replace(":", "-")) if _DIGEST.fullmatch(digest) else None
    if is_projector(file.name):
        return None
    found = choose_projector(file.name, sorted(path.name for path in file.parent.glob("*.gguf")))
    return None if found is None else file.with_name(found)


def parts_of(first: str, names: Iterable[str]) -> list[str]:
    """The paths of all parts of a model, given its first or only one."""
    stem = _PART.sub("", first)
    return sorted(name for name in names if name == first or (stem != first and _PART.sub("", name) == stem))


def choose(model: str, choices: Sequence[GGUFChoice], variant: str, memory: int | None) -> GGUFChoice:
    """The model with the wanted quantisation; if none is named, Q4_K_M or else the largest that fits the memory.

    The memory is that of the machine or container, not what is free now: the choice is the same after a restart.
    """
    if not choices:
        raise UnknownModel(model, "it holds no GGUF file.")
    known = ", ".join(dict.fromkeys(choice.quantisation or choice.name for choice in choices))
    if variant:
        named = [choice for choice in choices if _is_named(choice, variant)]
        if not named:
            raise UnknownModel(model, f"there is no {variant}; there are {known}.")
        return named[0]
    fitting = [choice for choice in choices if memory is None or choice.nbytes <= memory * MEMORY_SHARE]
    if not fitting:
        smallest = min(choices, key=lambda choice: choice.nbytes)
        size = f"{smallest.nbytes / 1e9:.1f} GB"
        use = f"To use one anyway, such as on a GPU, name it: {known}."
        raise UnknownModel(model, f"even the smallest file ({size}) doesn't fit the main memory. {use}")
    for preferred in (PREFERRED, LARGEST):
        for choice in fitting:
            if choice.quantisation == preferred:
                return choice
    small = [choice for choice in fitting if choice.quantisation.lower() not in _SIZE_ORDER]
    return max(small or fitting, key=lambda choice: choice.nbytes)


def _is_named(choice: GGUFChoice, variant: str) -> bool:
    name = Path(choice.name).name
    return variant.upper() == choice.quantisation or variant in (name, name.removesuffix(".gguf"))


def find_in_folder(folder: Path, model: str, variant: str = "") -> Path:
    """The GGUF file of a folder. Raises UnknownModel."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.gguf")}
    return folder / choose(model, list_choices(sizes), variant, total_bytes()).name


def is_gguf_file(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".gguf" or is_gguf(path))


def find_ollama(name: str) -> Path:
    """The weights of a model that Ollama downloaded: ollama:llama3.2, ollama:llama3.2:1b, ollama:someone/model:tag."""
    root, layers = _read_manifest(name)
    if "adapter" in layers:
        raise UnknownModel(name, "it has an adapter, which is not supported.")
    return root / "blobs" / layers["model"].replace(":", "-")


def _read_manifest(name: str) -> tuple[Path, dict[str, str]]:
    """Ollama's folder, and the digest of each layer of a model by its kind. There is one of the kind "model"."""
    model, _, tag = name.removeprefix(OLLAMA_PREFIX).partition(":")
    parts = model.split("/")
    if not all(map(_OLLAMA_PART.fullmatch, (*parts, tag or "latest"))) or len(parts) > 3:
        raise UnknownModel(name, "names of Ollama look like llama3.2:1b.")
    registry = [["registry.ollama.ai", "library", *parts], ["registry.ollama.ai", *parts], parts][len(parts) - 1]
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()
    manifest = root.joinpath("manifests", *registry, tag or "latest")
    if not manifest.is_file():
        raise UnknownModel(name, f"Ollama has not downloaded it (there is no {manifest}).")
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        layers = {layer["mediaType"].removeprefix(_OLLAMA_LAYER): str(layer["digest"]) for layer in found}
    except (ValueError, KeyError, TypeError, AttributeError):
        layers = {}
    if not _DIGEST.fullmatch(layers.get("model", "")):
        raise UnknownModel(name, f"Ollama's manifest {manifest} names no weights.")
    return root, layers


def find_on_disk(name: str, variant: str) -> Path | None:
    """The GGUF file in a snapshot of the hub, if all of its parts are there. Any quantisation, if none is named."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.gguf"], local_files_only=True))
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.gguf")}
        chosen = choose(name, list_choices(sizes), variant, None)
    except Exception:  # nothing usable is on disk: the download reports the reason
        return None
    return folder / chosen.name if _is_complete(chosen, sizes) else None


def complete_choices(folder: Path) -> list[GGUFChoice]:
    """The models in a snapshot of the hub all of whose parts are there."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.gguf") if path.exists()}
    return [choice for choice in list_choices(sizes) if _is_complete(choice, sizes)]


def _is_complete(choice: GGUFChoice, sizes: Mapping[str, int]) -> bool:
    match = _COUNT.search(choice.name)
    return len(parts_of(choice.name, sizes)) == (int(match[1]) if match else 1)


def download(name: str, variant: str, sizes: Mapping[str, int], bar: Any = None) -> Path:
    """Downloads one model of a repository, with all of its parts and its projector, and nothing else.

    `sizes`: all of the repository's files. `bar`: a class of progress bars.
    """
    from huggingface_hub import snapshot_download

    files = files_to_download(name, variant, sizes)
    patterns = [glob.escape(file) for file in files]
    return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=bar)) / files[0]


def files_to_download(name: str, variant: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The files of one model of a repository: its parts, of which the first comes first, and its projector."""
    chosen = choose(name, list_choices(sizes), variant, total_bytes())
    beside = [other for other in sizes if Path(other).parent == Path(chosen.name).parent]
    projector = choose_projector(chosen.name, beside)
    return (*parts_of(chosen.name, sizes), *(() if projector is None else (projector,)))
