"""Names of GGUF models: files, folders, repositories of the hub, and Ollama's."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from palaver.errors import UnknownModel
from palaver.gguf import MAGIC
from palaver.models import gguf
from palaver.models.gguf import GGUFChoice, choose, choose_projector, list_choices, parts_of
from palaver.models.resolver import ResolvedModel, resolve_model

GB = 10**9
REPOSITORY = {
    "README.md": 1,
    "model-F16.gguf": 16 * GB,
    "model-Q8_0-00001-of-00002.gguf": 4 * GB,
    "model-Q8_0-00002-of-00002.gguf": 4 * GB,
    "model-Q4_K_M.gguf": 4 * GB,
    "model-IQ2_XXS.gguf": 2 * GB,
    "mmproj-model-F16.gguf": 1 * GB,
}


def make_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MAGIC)
    return path


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    file = make_file(tmp_path / "m" / "a-Q8_0.gguf")
    assert resolve_model(str(file)) == ResolvedModel(tmp_path / "m", gguf=file)
    assert resolve_model(str(tmp_path / "m")).gguf == file
    unnamed = make_file(tmp_path / "blobs" / "sha256-1")
    assert resolve_model(str(unnamed)).gguf == unnamed
    other = make_file(tmp_path / "m" / "a-Q4_K_M.gguf")
    assert resolve_model(str(tmp_path / "m")).gguf == other
    assert resolve_model(f"{tmp_path / 'm'}:q8_0").gguf == file
    with pytest.raises(UnknownModel, match="there is no Q2_K; there are Q4_K_M, Q8_0"):
        resolve_model(f"{tmp_path / 'm'}:Q2_K")


@pytest.mark.parametrize(
    ("model", "beside", "chosen"),
    [
        ("a-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        ("a-Q4_K_M.gguf", ["a-Q8_0.gguf", "mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("a-Q4_K_M.gguf", ["b-Q8_0.gguf", "mmproj-model-f16.gguf"], None),
        ("Qwen2-VL-2B-Q8_0.gguf", ["b-Q8_0.gguf", "mmproj-Qwen2-VL-2B-f32.gguf"], "mmproj-Qwen2-VL-2B-f32.gguf"),
        ("Qwen2-VL-2B-Q8_0.gguf", ["mmproj-Qwen2-VL-7B-f16.gguf"], None),
        ("gemma-3-4b-it-Q8_0-00001-of-00002.gguf", ["gemma-3-4b-it-mmproj.gguf"], "gemma-3-4b-it-mmproj.gguf"),
        ("a.gguf", ["b.gguf"], None),
    ],
)
def test_a_projector_is_found_by_its_name(model: str, beside: list[str], chosen: str | None) -> None:
    assert choose_projector(model, [model, *beside]) == chosen


def test_a_projector_beside_a_file(tmp_path: Path) -> None:
    file, projector = make_file(tmp_path / "a-Q8_0.gguf"), make_file(tmp_path / "mmproj-a.gguf")
    assert resolve_model(str(file)).mmproj == resolve_model(str(tmp_path)).mmproj == projector
    assert resolve_model(str(projector)).mmproj is None


def test_a_folder_with_a_configuration_is_no_gguf_model(tmp_path: Path) -> None:
    make_file(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).gguf is None


def test_choices_are_whole_models() -> None:
    choices = {choice.quantisation: choice.nbytes for choice in list_choices(REPOSITORY)}
    assert choices == {"F16": 16 * GB, "Q8_0": 8 * GB, "Q4_K_M": 4 * GB, "IQ2_XXS": 2 * GB}
    assert parts_of("model-Q8_0-00001-of-00002.gguf", REPOSITORY) == [
        "model-Q8_0-00001-of-00002.gguf",
        "model-Q8_0-00002-of-00002.gguf",
    ]
    assert parts_of("model-F16.gguf", REPOSITORY) == ["model-F16.gguf"]


@pytest.mark.parametrize(
    ("wanted", "memory", "chosen"),
    [("", 64, "Q4_K_M"), ("", 4, "IQ2_XXS"), ("f16", 1, "F16"), ("Q8_0", 1, "Q8_0"), ("model-IQ2_XXS", 64, "IQ2_XXS")],
)
def test_the_quantisation_fits_the_memory(wanted: str, memory: int, chosen: str) -> None:
    assert choose("m", list_choices(REPOSITORY), wanted, memory * GB).quantisation == chosen


def test_without_the_usual_ones_the_largest_that_fits_is_chosen() -> None:
    choices = [
        GGUFChoice("a-Q6_K.gguf", 6 * GB),
        GGUFChoice("a-Q3_K_S.gguf", 3 * GB),
        GGUFChoice("a-BF16.gguf", 7 * GB),
    ]
    assert choose("a", choices, "", 64 * GB).quantisation == "Q6_K"
    assert choose("a", choices, "", 5 * GB).quantisation == "Q3_K_S"
    with pytest.raises(UnknownModel, match=r"smallest file \(3\.0 GB\) doesn't fit the main memory\. .* name it: "):
        choose("a", choices, "", GB)


class Hub:
    """A hub in memory, with nothing on disk at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, int]) -> None:
        self.folder, self.files = folder, files
        self.downloads: list[str] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: self._info())
        monkeypatch.setattr(gguf, "total_bytes", lambda: 64 * GB)

    def _info(self) -> Any:
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in self.files.items()]
        return SimpleNamespace(siblings=files)

    def _download(self, name: str, allow_patterns: list[str], local_files_only: bool = False, **_: Any) -> str:
        assert name == "someone/repo"
        if not local_files_only:
            for file in self.files:
                if any(fnmatch(file, pattern) for pattern in allow_patterns):
                    self.downloads.append(file)
                    make_file(self.folder / file)
        if not self.folder.is_dir():
            raise FileNotFoundError(name)
        return str(self.folder)


def test_only_the_chosen_file_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, tmp_path / "snapshot", REPOSITORY)
    file = resolve_model("someone/repo:Q8_0").gguf
    assert file == tmp_path / "snapshot" / "model-Q8_0-00001-of-00002.gguf"
    parts = ["model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf"]
    assert hub.downloads == [*parts, "mmproj-model-F16.gguf"]
    assert resolve_model("someone/repo:Q8_0").mmproj == tmp_path / "snapshot" / "mmproj-model-F16.gguf"
    hub.downloads.clear()
    assert resolve_model("someone/repo:Q8_0").gguf == resolve_model("someone/repo").gguf == file
    assert hub.downloads == []
    file.unlink()
    assert resolve_model("someone/repo:Q8_0").gguf == file


def test_a_repository_of_gguf_files_needs_no_quantisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, tmp_path / "snapshot", REPOSITORY)
    assert resolve_model("someone/repo").gguf == tmp_path / "snapshot" / "model-Q4_K_M.gguf"
    assert hub.downloads == ["model-Q4_K_M.gguf", "mmproj-model-F16.gguf"]


def test_an_unknown_quantisation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, tmp_path / "snapshot", REPOSITORY)
    with pytest.raises(UnknownModel, match="there is no Q3_K; there are F16, IQ2_XXS, Q4_K_M, Q8_0"):
        resolve_model("someone/repo:Q3_K")


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    return tmp_path


def add_manifest(root: Path, path: str, digest: str, projector: str = "") -> Path:
    digests = {"model": digest, **({"projector": projector} if projector else {})}
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest} for kind, digest in digests.items()
    ]
    manifest = root / "manifests" / path
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return make_file(root / "blobs" / digest.replace(":", "-"))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("someone/model:q4", "registry.ollama.ai/someone/model/q4"),
        ("hf.co/someone/repo:Q8_0", "hf.co/someone/repo/Q8_0"),
    ],
)
def test_ollama_names(name: str, path: str, ollama: Path) -> None:
    blob = add_manifest(ollama, path, "sha256:" + "ab" * 32)
    assert resolve_model(f"ollama:{name}").gguf == blob


def test_a_projector_of_ollama(ollama: Path) -> None:
    add_manifest(ollama, "registry.ollama.ai/library/sees/latest", "sha256:" + "ab" * 32, "sha256:" + "cd" * 32)
    assert resolve_model("ollama:sees").mmproj == ollama / "blobs" / f"sha256-{'cd' * 32}"
    add_manifest(ollama, "registry.ollama.ai/library/lies/latest", "sha256:" + "ab" * 32, "sha256:../../x")
    assert resolve_model("ollama:lies").mmproj is None


@pytest.mark.parametrize("name", ["../../etc", "a/../b", "a:../../x", "/etc/passwd", "a/b/c/d", "", "a:b:c"])
def test_ollama_names_stay_in_the_folder(name: str, ollama: Path) -> None:
    with pytest.raises(UnknownModel, match="names of Ollama"):
        resolve_model(f"ollama:{name}")


def test_ollama_manifests_are_checked(ollama: Path) -> None:
    with pytest.raises(UnknownModel, match="Ollama has not downloaded it"):
        resolve_model("ollama:missing")
    for digest, kind in (("sha256:../../x", "model"), ("sha256:" + "ab" * 32, "license"), ("md5:1", "model")):
        path = ollama / "manifests" / "registry.ollama.ai" / "library" / "bad" / "latest"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"layers": [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest}]})
        )
        with pytest.raises(UnknownModel, match="names no weights"):
            resolve_model("ollama:bad")
    path.write_text("[1")
    with pytest.raises(UnknownModel, match="names no weights"):
        resolve_model("ollama:bad")
