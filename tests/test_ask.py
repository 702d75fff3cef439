"""`palaver ask`: files, schemas, code blocks, prompts, conversations that go on, and the running server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from palaver.chat.model import Model
from palaver.cli import app
from palaver.client.discovery import announce_server, sign_nonce
from palaver.commands.ask import _extract_code
from palaver.store import open_store
from tests import media_files
from tests.chat import scripted_service

GREEDY = ("--set", "temperature=0")
SUM = (
    '{"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": false}'
)


def ask(*arguments: object, data: Path, input: str = "") -> Result:
    return CliRunner().invoke(app, ["ask", *map(str, arguments), "--data", str(data)], input=input)


def ask_json(*arguments: object, data: Path) -> dict[str, Any]:
    result = ask(*arguments, "--json", data=data)
    assert result.exit_code == 0, result.output
    reply: dict[str, Any] = json.loads(result.stdout)
    return reply


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The data folder and the address of a running `palaver serve`."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "palaver", "serve", "--data", str(folder), "--port", str(port), "--device", "cpu")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    try:
        assert server.stdout is not None
        assert any("http://" in line for line in server.stdout)
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 240
        while httpx.get(f"{url}/ready", timeout=60, trust_env=False).status_code != 200:
            assert time.monotonic() < until, "the model did not load"
            time.sleep(0.1)
        yield folder, url
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


@pytest.mark.parametrize("where", ["here", "server"])
def test_an_answer_follows_a_schema_and_files_are_read(where: str, served: tuple[Path, str], tmp_path: Path) -> None:
    flags = ("--no-server",) if where == "here" else ()
    for schema in (SUM, tmp_path / "schema.json"):
        (tmp_path / "schema.json").write_text(SUM)
        result = ask("What is 17 + 25?", *flags, *GREEDY, "--schema", schema, "--no-thinking", data=served[0])
        assert json.loads(result.stdout) == {"sum": 42}, result.output
    file = tmp_path / "question.docx"
    file.write_bytes(media_files.docx("<w:p><w:r><w:t>word</w:t></w:r></w:p>"))
    reply = json.loads(ask("Hi", *flags, *GREEDY, "-a", file, "--json", data=served[0]).stdout)
    alone = json.loads(ask("Hi", *flags, *GREEDY, "--json", data=served[0]).stdout)
    assert reply["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"] + 5
    assert alone["seed"] >= 0
    assert len(alone["token_ids"]) == alone["usage"]["reply_tokens"]
    refused = ask("Hi", *flags, "-a", picture(tmp_path), data=served[0])
    assert refused.exit_code != 0
    assert "does not accept pictures" in refused.stderr


@pytest.mark.parametrize("where", ["here", "server"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_text_that_is_not_utf8_is_named(where: str, locale: str, served: tuple[Path, str], tmp_path: Path) -> None:
    """In the C locale Python reads such bytes as surrogates."""
    folder = served[0] if where == "server" else tmp_path
    latin = b"caf\xe9"
    for arguments, input, sentence in (
        (["ask"], latin + b"\n", "The standard input is not UTF-8 (byte 3)."),
        (["ask", latin], b"", "The text of QUESTION is not UTF-8."),
        (["ask", "hi", "-s", latin], b"", "The text of --system is not UTF-8."),
        (["conversations", "--search", latin], b"", "The text of --search is not UTF-8."),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "palaver", *arguments, "--data", str(folder)],
            input=input,
            capture_output=True,
            env={**os.environ, "LC_ALL": locale},
            check=False,
        )
        assert (done.returncode, done.stderr.decode()) == (2, f"palaver: {sentence}\n")


def test_a_half_character_in_a_schema_is_refused_by_the_client(served: tuple[Path, str]) -> None:
    refused = ask("Hi", "--schema", r'{"title": "\ud800"}', data=served[0])
    assert refused.exit_code == 2, refused.output
    assert "lone surrogate" in refused.stderr


@pytest.mark.parametrize("flags", [("--no-server",), (), ("--store",)])
def test_a_text_in_another_encoding_is_refused_as_a_document(
    flags: tuple[str, ...], served: tuple[Path, str], tmp_path: Path
) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9 on 3 May\n")
    refused = ask("Which dates?", *flags, "-a", file, data=served[0])
    assert refused.exit_code == 2, refused.output
    assert refused.stderr == "palaver: latin.txt is neither text in UTF-8 nor a PDF, DOCX or HTML file.\n"


def picture(folder: Path) -> Path:
    file = folder / "red.png"
    file.write_bytes(media_files.picture("PNG", (64, 64)))
    return file


def test_the_running_server_answers_without_the_store_or_an_engine(served: tuple[Path, str]) -> None:
    folder, url = served
    here = ask_json("What is 2 + 3?", "--no-server", *GREEDY, data=folder)
    there = ask_json("What is 2 + 3?", *GREEDY, data=folder)
    named = ask_json("What is 2 + 3?", *GREEDY, "--server", url, data=folder / "other")
    assert here["token_ids"] == there["token_ids"]
    assert {name: there[name] for name in here if name not in ("seed", "usage")} == {
        name: here[name] for name in here if name not in ("seed", "usage")
    }
    assert named["token_ids"] == here["token_ids"]
    code = (
        "import sys; from palaver.cli import app; "
        f"app(['ask', 'What is 2 + 3?', '--data', {str(folder)!r}], standalone_mode=False); "
        "print([one for one in ('numpy', 'sqlalchemy', 'tokenizers', 'palaver.store') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True
    )
    answer, modules = done.stdout.splitlines()
    assert "5" in answer
    assert modules == "[]"
    with open_store(folder) as store:
        assert not store.conversations.list(store.users.ensure().id)


def test_the_server_is_asked_for_models_that_it_has(served: tuple[Path, str], tiny_model: Path) -> None:
    folder, url = served
    assert ask("Hi", "-m", "sprout", *GREEDY, data=folder).exit_code == 0
    local = ask("Hi", "-m", tiny_model, "--set", "max_tokens=4", "--json", data=folder)
    assert json.loads(local.stdout)["usage"]["reply_tokens"] == 4
    unknown = ask("Hi", "-m", "nowhere", "--server", url, data=folder)
    assert unknown.exit_code == 2
    assert "There is no model 'nowhere'" in unknown.stderr
    assert (
        "--server can't be combined with --device" in ask("Hi", "--server", url, "--device", "cpu", data=folder).stderr
    )
    gone = ask("Hi", "--server", "http://127.0.0.1:1", data=folder)
    assert (gone.exit_code, "can't be reached" in gone.stderr) == (1, True)


class TakenPort(ThreadingHTTPServer):
    """The server of a data folder until it has proved itself once; then another program listens on its port."""

    def __init__(self, secret: str) -> None:
        super().__init__(("127.0.0.1", 0), _TakenPortHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.secret = secret
        self.instance = ""
        self.requests: list[bytes] = []
        """What the other program received."""

    def __enter__(self) -> TakenPort:
        threading.Thread(target=self.serve_forever).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _TakenPortHandler(BaseHTTPRequestHandler):
    server: TakenPort

    def do_GET(self) -> None:
        secret, self.server.secret = self.server.secret, "guessed"
        if secret == "guessed":
            self._record()
        nonce = self.path.partition("?nonce=")[2]
        answer = {"instance": self.server.instance, "proof": sign_nonce(secret, self.server.instance, nonce)}
        body = json.dumps({**answer, "data": [{"id": "sprout"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self._record()
        self.send_error(500)

    def _record(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests.append(f"{self.requestline}\n{self.headers}".encode() + body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("flags", [(), ("-m", "sprout"), ("--store",)])
def test_a_program_that_takes_the_port_of_a_server_gets_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with TakenPort("a secret") as taken, announce_server(tmp_path, taken.url, "a secret") as announcement:
        taken.instance = announcement.instance
        result = ask("A private question", *flags, data=tmp_path)
    assert result.exit_code == 1
    assert "no server of this data folder answers there" in result.stderr
    assert taken.requests
    assert not any(b"secret" in request or b"private" in request for request in taken.requests)


def test_a_dead_server_is_passed_over(tmp_path: Path) -> None:
    with announce_server(tmp_path, "http://127.0.0.1:1", "a secret"):
        result = ask("What is 2 + 3?", *GREEDY, data=tmp_path)
    assert "5" in result.stdout, result.output


@pytest.mark.parametrize("where", ["here", "server"])
def test_a_conversation_goes_on(where: str, served: tuple[Path, str], tmp_path: Path) -> None:
    folder = served[0] if where == "server" else tmp_path
    assert ask("My name is Ada.", "--store", *GREEDY, data=folder).exit_code == 0
    reply = ask("What is my name?", "--continue", *GREEDY, data=folder)
    assert "Ada" in reply.stdout, reply.output
    assert 'Continuing "My name is Ada."' in reply.stderr
    summed = ask("What is 2 + 3?", "-c", "--schema", SUM, "--json", *GREEDY, data=folder)
    assert json.loads(json.loads(summed.stdout)["answer"]) == {"sum": 5}, summed.output
    with open_store(folder) as store:
        (conversation,) = store.conversations.list(store.users.ensure().id)
        path = store.messages.path(str(conversation.head_id))
    assert [message.role.value for message in path] == ["user", "assistant"] * 3


def test_code_blocks_are_extracted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "First:\n```python\nx = 1\n```\nthen\n~~~~\ny\n~~~\nz\n~~~~\nEnd."
    assert _extract_code(text, last=False) == "x = 1"
    assert _extract_code(text, last=True) == "y\n~~~\nz"
    result = ask("Hello", "--extract", "--no-thinking", *GREEDY, data=tmp_path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "contains no code block" in result.stderr


@pytest.mark.parametrize(("flag", "block"), [("--extract", "x = 1"), ("--extract-last", "y = 2")])
def test_the_code_block_of_a_reply_is_all_of_stdout(
    flag: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripted_service.reply("Two.", "Here:\n```python\nx = 1\n```\nand\n```\ny = 2\n```\nThat is all.")

    @asynccontextmanager
    async def load(*_: object) -> AsyncIterator[Model]:
        yield scripted_service.model([script])

    monkeypatch.setattr("palaver.commands.ask._load_model", load)
    result = ask("Write two lines of code.", flag, "--no-server", data=tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{block}\n"
    assert "Two." in result.stderr


def prompts(*arguments: object, data: Path, input: str = "") -> Result:
    return CliRunner().invoke(app, ["prompts", *map(str, arguments), "--data", str(data)], input=input)


def test_named_prompts_are_filled_in(tmp_path: Path) -> None:
    assert "no prompts yet" in prompts("list", data=tmp_path).stderr
    assert prompts("save", "add", "What is {{a}} + {{ b }}?", data=tmp_path).exit_code == 0
    assert prompts("save", "echo", input="Spell: {{input}}\n", data=tmp_path).exit_code == 0
    assert prompts("list", data=tmp_path).stdout.splitlines()[0] == "add  {{a}} {{b}}  What is {{a}} + {{ b }}?"
    assert prompts("show", "echo", data=tmp_path).stdout == "Spell: {{input}}\n"
    asked = ask("-p", "add", "--var", "a=17", "--var", "b=25", *GREEDY, data=tmp_path)
    plain = ask("What is 17 + 25?", *GREEDY, data=tmp_path)
    assert asked.stdout == plain.stdout
    for arguments, reason in (
        (("-p", "add", "--var", "a=1"), "--var b=VALUE"),
        (("-p", "add", "--var", "a=1", "--var", "b=2", "--var", "c=3"), "no such variable (it has: a, b)"),
        (("-p", "echo"), "needs a question for {{input}}"),
        (("-p", "gone"), "no such prompt (saved: add, echo)"),
        (("-p", "../token"), "letters, digits"),
        (("Hi", "--var", "a=1"), "--var needs --prompt"),
        (("Hi", "--schema", "[1]"), "No such file"),
        (("Hi", "--schema", "{"), "must be a JSON object"),
        (("Hi", "-a", tmp_path / "gone.txt"), "No such file"),
        (("Hi", "--json", "--extract"), "can't be combined"),
    ):
        refused = ask(*arguments, data=tmp_path)
        assert refused.exit_code in (1, 2)
        assert reason in refused.stderr, refused.output
    assert prompts("remove", "add", data=tmp_path).exit_code == 0
    assert "no such prompt" in prompts("show", "add", data=tmp_path).stderr


def test_a_picture_is_seen(tmp_path: Path) -> None:
    result = ask("What colour is it?", "-m", "sprout-omni", "-a", picture(tmp_path), *GREEDY, data=tmp_path)
    assert "red" in result.stdout, result.output
