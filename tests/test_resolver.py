"""Names of models: embedded ones, folders, hub ids on disk and on the hub, training configurations."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from palaver.errors import NoWeights, UnknownModel, UnsafeWeights
from palaver.models.resolver import DEFAULT_MODEL, ResolvedModel, embedded_models, resolve_folder, resolve_model

HUB_ID = "someone/some-model"


class Hub:
    """A hub in memory: `files` are in the repository, `snapshot` is the folder on disk, if any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, snapshot: Path | None, files: list[str] | None) -> None:
        self.snapshot = snapshot
        self.files = files
        self.downloads = 0
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_: self._list())
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: self._info())

    def _info(self) -> Any:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=1) for name in self._list()])

    def _list(self) -> list[str]:
        if self.files is None:
            raise ConnectionError("no route to the hub")
        return self.files

    def _download(self, name: str, local_files_only: bool = False, **_: Any) -> str:
        assert name == HUB_ID
        if not local_files_only:
            self._list()
            self.downloads += 1
        if self.snapshot is None:
            raise FileNotFoundError(name)
        return str(self.snapshot)


def model_folder(path: Path, *files: str) -> Path:
    path.mkdir()
    for name in ("config.json", *files):
        (path / name).write_text("{}")
    return path


def test_the_embedded_model_is_the_default() -> None:
    assert DEFAULT_MODEL in embedded_models()
    assert (resolve_model(DEFAULT_MODEL).folder / "config.json").is_file()


def test_a_folder_must_hold_a_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert resolve_model(str(folder)) == ResolvedModel(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownModel, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"))
    with pytest.raises(UnknownModel, match="it is a file"):
        resolve_model(str(folder / "config.json"))
    for name in ("nowhere", "./no/where", "~/no/where/at/all", "~nobody-here", "~nobody-here/model:Q8_0", "../a/b"):
        with pytest.raises(UnknownModel, match="name a folder, a model of the hub"):
            resolve_model(name)


def test_a_training_configuration_names_the_folder_and_the_adapter(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    adapter = tmp_path / "out"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    path = tmp_path / "run.yml"
    path.write_text("base_model: ./base\nadapter: lora\noutput_dir: ./out\nsequence_len: 64\nchat_template: chatml\n")
    assert resolve_model(str(path)) == ResolvedModel(
        base, adapter=adapter, output_folder=adapter, template_name="chatml", context_length=64
    )


@pytest.mark.parametrize("name", ["~nobody-here/run.yml", "~nobody-here/run.yml@checkpoint-2"])
def test_a_training_configuration_of_an_unknown_user(name: str) -> None:
    with pytest.raises(UnknownModel, match="name a folder, a model of the hub"):
        resolve_model(name)


def test_a_base_model_of_an_unknown_user(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("base_model: ~nobody-here/base\n")
    with pytest.raises(UnknownModel, match="~nobody-here/base"):
        resolve_model(str(path))


def test_a_complete_snapshot_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "snapshot", "model.safetensors")
    Hub(monkeypatch, folder, files=None)
    assert resolve_folder(HUB_ID) == folder


def test_an_incomplete_snapshot_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "snapshot", "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub = Hub(monkeypatch, folder, ["config.json", "one.safetensors", "two.safetensors"])
    assert resolve_folder(HUB_ID, weights=False) == folder
    assert hub.downloads == 0
    assert resolve_folder(HUB_ID) == folder
    assert hub.downloads == 1


@pytest.mark.parametrize("bars_off", [False, True])
def test_a_download_is_reported_and_prints_nothing(
    bars_off: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bars = importlib.import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(bars, "are_progress_bars_disabled", lambda name=None: bars_off)
    folder = model_folder(tmp_path / "model", "one.safetensors")
    hub = Hub(monkeypatch, None, ["config.json", "one.safetensors"])

    def download(name: str, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise FileNotFoundError(name)
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        files = options["tqdm_class"](total=2, unit="it")
        sizes = options["tqdm_class"](total=0, unit="B")
        sizes.total = 400
        for _ in range(4):
            sizes.update(100)
        files.update(2)
        return str(hub.snapshot or folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    progress: list[float | None] = []
    assert resolve_model(HUB_ID, progress.append).folder == folder
    assert progress == [None, 0.25, 0.5, 0.75, 1.0]
    assert capfd.readouterr() == ("", "")


def test_a_hub_id_that_is_not_on_disk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, None, files=None)
    with pytest.raises(
        UnknownModel, match=r"not on this computer and can't be downloaded from the hub \(no route to the hub\)"
    ):
        resolve_folder(HUB_ID)


def test_a_hub_id_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, None, ["config.json", "pytorch_model.bin"])
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        resolve_folder(HUB_ID)
    Hub(monkeypatch, None, ["config.json"])
    with pytest.raises(NoWeights):
        resolve_folder(HUB_ID)
