"""`palaver models`, with a hub on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from palaver.cli import app
from palaver.engines import machine
from palaver.engines.machine import has_gpu_memory
from palaver.models import resolver
from palaver.models.catalog import BadCatalog, read_catalog, write_alias
from palaver.models.disk import find_models, offered_names, remove_model
from palaver.models.download import RemoteFile, Repository
from palaver.models.resolver import ResolvedModel, resolve_folder
from tests.hub import Hub, running_hub

NAME = "test/sprout"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GGUF = "test/quantised"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    folder = resolve_folder("sprout")
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    weights = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    parts = {f"m-{kind}.gguf": b"GGUF" + kind.encode() * 1000 for kind in ("Q4_K_M", "Q8_0")}
    with running_hub({NAME: {**files, **weights}, GGUF: parts, "test/none": {"README.md": b""}}) as hub:
        yield hub


def command(hub: Hub, folder: Path, *words: str) -> subprocess.Popen[str]:
    words = (sys.executable, "-m", "palaver", "models", *words)
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=hub.environment(folder), stdout=pipe, stderr=pipe, text=True)


def run(hub: Hub, folder: Path, *words: str) -> tuple[int, str, str]:
    process = command(hub, folder, *words)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_download_is_resumed_checked_and_shared(hub: Hub, tmp_path: Path) -> None:
    size = len(hub.repositories[NAME]["model.safetensors"])
    hub.cut_after, hub.ranges, hub.sent = 1 << 20, [], 0
    hub.damaged = False
    code, out, err = run(hub, tmp_path, "pull", NAME)
    assert (code, out.count("\n")) == (0, 2), err
    assert out.startswith(f"{NAME}: {size / 1e6:.0f} MB in 1 file; needs about ")
    assert "tokens per second" in out
    assert "100% downloaded" in err
    assert hub.ranges[0] == ""
    assert all(one.startswith("bytes=") for one in hub.ranges[1:])
    assert hub.sent == size, "no byte comes twice"
    assert offered_names(tmp_path / "hub")[-1] == NAME
    hub.cut_after, before = None, len(hub.ranges)
    assert run(hub, tmp_path, "pull", NAME)[0] == 0
    assert len(hub.ranges) == before, "it is on disk"
    code, out, _ = run(hub, tmp_path, "show", NAME)
    assert code == 0
    assert "context: 8,192" in out
    assert "takes: text, tools" in out
    code, out, _ = run(hub, tmp_path, "list")
    assert f"{NAME} " in out
    assert "sprout-omni" in out
    code, out, _ = run(hub, tmp_path, "remove", NAME)
    assert code == 0
    assert NAME not in offered_names(tmp_path / "hub")
    assert "is not in the hub's cache" in run(hub, tmp_path, "remove", NAME)[2]


def test_a_damaged_download_is_deleted_and_two_processes_share_one(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.damaged = None, True
    code, _, err = run(hub, tmp_path, "pull", NAME)
    assert code == 1
    assert "is damaged (its SHA-256 differs)" in err.splitlines()[-1]
    hub.damaged = False
    assert NAME not in offered_names(tmp_path / "hub")
    hub.ranges, hub.sent = [], 0
    both = [command(hub, tmp_path, "pull", NAME) for _ in range(2)]
    for one in both:
        one.communicate(timeout=120)
    assert [one.returncode for one in both] == [0, 0]
    assert hub.sent == len(hub.repositories[NAME]["model.safetensors"]), "two processes download it once"
    assert [one.name for one in find_models(tmp_path / "hub")][-1] == NAME


def test_one_quantisation_of_several_and_wrong_names(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.damaged = None, False
    assert run(hub, tmp_path, "pull", f"{GGUF}:Q8_0")[0] == 0
    assert offered_names(tmp_path / "hub")[-1] == f"{GGUF}:Q8_0"
    assert remove_model(f"{GGUF}:Q8_0", tmp_path / "hub") == 4 + 4000
    assert f"{GGUF}:Q8_0" not in offered_names(tmp_path / "hub")
    for name, why in (
        ("test/missing", "no such model on the hub"),
        ("test/none", "contains no weights"),
        ("x", "names"),
        ("sprout", "nothing to download"),
    ):
        code, _, err = run(hub, tmp_path, "pull", name)
        assert code == (2 if name == "sprout" else 1)
        assert why in err
        assert err.count("\n") == 1
    assert "can't be removed" in run(hub, tmp_path, "remove", "sprout")[2]


@pytest.mark.skipif(has_gpu_memory(), reason="NOTHING IS SHOWN HERE: the model may fit the GPU")
def test_a_model_that_does_not_fit_is_only_downloaded_by_force(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.damaged, hub.sent = None, False, 0
    hub.declared = {"model.safetensors": 10**15}
    try:
        code, out, err = run(hub, tmp_path, "pull", NAME)
        assert (code, hub.sent) == (2, 0), "nothing is downloaded"
        assert "1000000.0 GB in 1 file; does not fit: it needs about" in out
        assert (err.count("\n"), "--force downloads it anyway" in err) == (1, True)
        code, out, _ = run(hub, tmp_path, "show", NAME)
        assert (code, "is not on this computer" in out, "does not fit" in out) == (0, True, True)
    finally:
        hub.declared = {}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("nbytes", [10**6, 10**15])
def test_a_model_that_may_fit_the_gpu_is_downloaded(
    nbytes: int, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_gpu_memory", lambda: gpu)
    repository = Repository(NAME, "main", (RemoteFile("model.safetensors", nbytes),))
    monkeypatch.setattr(resolver, "files_to_download", lambda name: (repository, tuple(repository.sizes)))
    monkeypatch.setattr(resolver, "resolve_model", lambda name, report: ResolvedModel(tmp_path))
    done = CliRunner().invoke(app, ["models", "pull", NAME])
    assert ("the GPU was not looked at" in done.output) == gpu
    assert ("does not fit the main memory" in done.output) == (gpu and nbytes == 10**15)
    assert done.exit_code == (0 if gpu or nbytes == 10**6 else 2)


def test_an_alias_says_whether_its_model_is_there(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "alias", "gpt-4o", "sprout") == (0, "gpt-4o is sprout\n", "")
    code, out, err = run(hub, tmp_path, "alias", "gpt-5", NAME)
    assert (code, out) == (0, f"gpt-5 is {NAME}\n")
    assert err == f"{NAME} is not on this computer yet: `palaver models pull {NAME}` downloads it\n"
    assert run(hub, tmp_path, "alias", "gpt-5") == (0, "gpt-5 names no model any more\n", "")
    assert "gpt-5" not in run(hub, tmp_path, "list")[1]


def test_aliases_are_written_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "data" / "models.toml"
    write_alias(file, "gpt-4o", "sprout")
    text = '# mine\n[aliases]\ngpt-4o = "a/b" # old\n\n[models.own]\nmodel = "sprout"\nexact = true\n'
    file.write_text(text)
    write_alias(file, "gpt-4o", "sprout")
    write_alias(file, "claude.x", "own")
    found = read_catalog(file)
    assert found.aliases == {"gpt-4o": "sprout", "claude.x": "own"}
    assert [(one.name, one.source, one.options) for one in found.entries] == [("own", "sprout", {"exact": True})]
    assert file.read_text().startswith("# mine\n[aliases]\n")
    write_alias(file, "gpt-4o", None)
    assert read_catalog(file).aliases == {"claude.x": "own"}
    for wrong, why in (
        ("[aliases\n", "not valid TOML"),
        ("[aliases]\nx = 1\n", "must name a model"),
        ("[models.a]\nspeed = 1\n", "unknown option 'speed'"),
        ("[models.a]\nexact = 1\n", "exact must be a bool"),
        ('[models.a]\nadapter = "none"\n', "does not exist"),
        ('[models.a]\nadapter = "~nobody-here/adapter"\n', "does not exist"),
        ("other = 1\n", "no setting 'other'"),
    ):
        file.write_text(wrong)
        with pytest.raises(BadCatalog, match=why):
            read_catalog(file)
