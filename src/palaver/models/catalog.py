"""From the name a person gives to the folder with the model's files."""

from __future__ import annotations

import re
from pathlib import Path

from palaver.errors import UnknownModel

DEFAULT = "sprout"
_EMBEDDED = Path(__file__).parent
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]


def embedded() -> list[str]:
    return sorted(path.parent.name for path in _EMBEDDED.glob("*/config.json"))


def resolve(name: str) -> Path:
    """The folder of the model. Only an id of the hub that is not on disk yet is fetched from the network."""
    if name in embedded():
        return _EMBEDDED / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder, name)
    if _HUB_ID.fullmatch(name) and ".." not in name:
        return _from_hub(name)
    raise UnknownModel(name, f"it is no folder, no hub id (owner/name), and none of ours ({', '.join(embedded())}).")


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UnknownModel(name, "the folder has no config.json, so it holds no model.")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # the hub's client raises many kinds, all meaning that it can't be had
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnknownModel(name, f"it is not on disk and could not be fetched from the hub ({why}).") from None
