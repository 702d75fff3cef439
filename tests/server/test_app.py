"""`palaver keys` and `palaver serve` as a person starts them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from palaver.cli import app
from palaver.client.discovery import find_server
from palaver.commands.serve import _ensure_keys
from palaver.models.resolver import resolve_folder
from palaver.server.app import listen, server_url
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from tests.client.test_tls import made
from tests.server.chat_client import get

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    status, made = run("keys", "add", "ann", *data)
    assert (status, made.startswith("pal-")) == (0, True)
    run("keys", "add", "root", "--admin", *data)
    listed = run("keys", "list", *data)[1].splitlines()
    assert [line.split()[-1] for line in listed] == ["ann", "root"]
    assert made.strip() not in "\n".join(listed)
    id = listed[0].split()[0]
    assert "revoked" in run("keys", "revoke", id, *data)[1]
    status, told = run("keys", "revoke", "nope", *data)
    assert (status, "no key" in told) == (2, True)


def test_it_does_not_listen_to_others_without_keys(tmp_path: Path) -> None:
    status, told = run("serve", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path))
    assert status == 2
    assert "palaver keys add" in told


def test_odd_options_are_named(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    for options in (("--prefix", "x"), ("--tls-cert", "/no/such"), ("--set", "x=1"), ("--force", "temperature=9")):
        status, told = run("serve", *options, *data)
        assert status == 2, told


def test_a_key_is_made_and_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path) as store:
        for _ in range(2):
            _ensure_keys(store, ServerSettings(host="0.0.0.0"), make_key=True)
        shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pal-")]
        assert len(shown) == 1
        key = store.keys.find(shown[0])
        assert key is not None
        assert key.admin


def test_it_serves_from_start_to_signal(tmp_path: Path) -> None:
    """Health answers while the model loads, and a signal ends it in order."""
    command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--prefix", "/x", "--data", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[3]
            assert url.endswith("/x")
            health = get(f"{url}/health").json()
            assert health["status"] in ("loading", "ready")
            assert asyncio.run(find_server(tmp_path)) is not None, "others of this user find it"
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert not list((tmp_path / "servers").glob("*.json"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="NOTHING IS SHOWN HERE: there is no openssl")
def test_a_terminal_attaches_to_a_server_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    certificate = made(tmp_path, "own")
    command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--data", str(tmp_path)]
    command += ["--tls-cert", str(certificate), "--tls-key", str(certificate)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[3]
            while asyncio.run(find_server(tmp_path)) is None:
                assert process.poll() is None
            chat = [sys.executable, "-m", "palaver", "chat", "--data", str(tmp_path), "--set", "temperature=0"]
            asked = {"input": "What is 12 + 30?\n", "capture_output": True, "text": True, "env": environment}
            ran = subprocess.run([*chat], check=False, timeout=300, **asked)  # type: ignore[call-overload]
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert url.startswith("https://")
    assert f"connected to your server at {url}" in ran.stderr
    assert "42" in ran.stdout


def test_it_preloads_models_and_unloads_them_again_and_refuses_one_that_does_not_fit(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    for folder in (large, small):
        shutil.copytree(resolve_folder("sprout"), folder)
    with (large / "model.safetensors").open("ab") as weights:
        weights.truncate(9_000_000_000)  # takes no space on the disk
    options = ["--preload", str(large), "--preload", str(small), "--memory", "3GB", "--keep-alive", "3s"]
    command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--data", str(tmp_path), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[3]
            refused = process.stderr.readline()
            states: list[str] = []
            while states[-2:] != ["ready", "available"]:
                state = get(f"{url}/api/model", params={"name": str(small)}).json()["state"]
                states += [state] if states[-1:] != [state] else []
                time.sleep(0.02)
            body = {"model": str(large), "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
            too_large = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
            body = {**body, "model": str(small)}
            answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert "needs about" in refused
    assert too_large.status_code == 400
    assert too_large.json()["error"]["message"] in refused
    assert (answered.status_code, answered.json()["model"]) == (200, str(small)), "it is loaded again"
    assert "Traceback" not in rest


def test_a_model_that_is_not_there_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "palaver", "serve", str(tmp_path / "no"), "--port", "0", "--data", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert ran.returncode == 1
    assert "Can't find the model" in ran.stderr
    assert "Traceback" not in ran.stderr


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "bound", "tls", "shown"),
    [
        ("localhost", "127.0.0.1", False, "http://127.0.0.1"),
        ("localhost", "127.0.0.1", True, "https://localhost"),
        ("127.0.0.5", "127.0.0.5", False, "http://127.0.0.5"),
        ("0.0.0.0", "0.0.0.0", False, "http://127.0.0.1"),
    ],
)
def test_the_url_has_the_address_that_the_server_has(host: str, bound: str, tls: bool, shown: str) -> None:
    """Another program may listen at another address of the same name."""
    with socket.create_server((bound, 0)) as listening:
        port = listening.getsockname()[1]
        assert server_url(ServerSettings(host=host), listening, tls) == f"{shown}:{port}"


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on this machine")
def test_a_server_at_all_ipv6_addresses_is_reached_at_its_url() -> None:
    settings = ServerSettings(host="::", port=0)
    with listen(settings) as listening:
        url = urlsplit(server_url(settings, listening, tls=False))
        assert url.port is not None
        socket.create_connection((url.hostname, url.port)).close()
