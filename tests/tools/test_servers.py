"""Tool servers over stdio and HTTP: the demo, and one that misbehaves in every way."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from palaver.address_guard import Address, AddressGuard
from palaver.cli import app
from palaver.tools.config import BadToolServer, ServerConfig, add_server, parse_server, read_servers, remove_server
from palaver.tools.demo import calculate_expression, roll
from palaver.tools.servers import ToolServerFailed, ToolServers, ToolServerState, tool_name
from palaver.tools.transports import MESSAGE_UNIT, MessageBudget, StdioProcess, ToolLimits
from tests.tools import misbehaving_server
from tests.tools.demo_server import demo_config, free_port, serve_demo, serve_misbehaving

LIMITS = ToolLimits(connect_seconds=20.0, call_seconds=20.0)
FEW_MESSAGES = replace(LIMITS, messages_per_second=10.0, message_burst=500)


def misbehaving(folder: Path, mode: str = "", name: str = "bad") -> ServerConfig:
    return ServerConfig(name, sys.executable, (misbehaving_server.__file__, mode, str(folder / "record")))


@pytest.fixture
async def bad(tmp_path: Path) -> AsyncIterator[ToolServers]:
    servers = ToolServers([misbehaving(tmp_path)], LIMITS)
    yield servers
    await servers.close()


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[ToolServers]:
    servers = ToolServers([demo_config(tmp_path)], LIMITS)
    yield servers
    await servers.close()


async def wait_for_record(folder: Path, line: str) -> None:
    async with asyncio.timeout(10):
        record = folder / "record"
        while not record.exists() or line not in record.read_text().splitlines():
            await asyncio.sleep(0.01)


async def test_the_demo_over_stdio(demo: ToolServers, tmp_path: Path) -> None:
    (card,) = await demo.connect()
    assert card.state is ToolServerState.READY
    names = [tool.name for tool in card.tools]
    assert names[:3] == ["demo__clock", "demo__calculate", "demo__roll_dice"]
    assert card.tools[1].parameters == {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }
    calls = [("demo__calculate", {"expression": "17 * 23"}), ("demo__add_note", {"text": "buy milk"})]
    product, noted = await asyncio.gather(*(demo.call(name, values) for name, values in calls))
    assert (product.text, noted.text) == ("391", "Noted: buy milk")
    assert (await demo.call("demo__read_notes", {})).text == "buy milk"
    assert (tmp_path / "notes").stat().st_mode & 0o777 == 0o600
    notes, summarize = await demo.list_resources("demo")
    assert (notes.kind, notes.name, notes.media_type) == ("resource", "notes://all", "text/plain")
    assert (summarize.kind, summarize.name, summarize.arguments) == ("prompt", "summarize", ("text",))
    assert await demo.read_resource("demo", "notes://all", {}) == b"buy milk"
    assert b"one sentence: Hello" in await demo.read_resource("demo", "summarize", {"text": "Hello"})
    with pytest.raises(ToolServerFailed, match="answered with an error"):
        await demo.read_resource("demo", "notes://none", {})
    failed = await demo.call("demo__calculate", {"expression": "__import__('os')"})
    assert failed.is_error
    assert "is not an arithmetic expression" in failed.text


@pytest.fixture(scope="module")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_demo(tmp_path_factory.mktemp("notes")) as url:
        yield url


async def test_the_demo_over_http_beside_a_dead_server(demo_url: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead_url = f"http://127.0.0.1:{unused.getsockname()[1]}/mcp"
    servers = ToolServers([ServerConfig("web", url=demo_url), ServerConfig("dead", url=dead_url)], LIMITS)
    web, dead = await servers.connect()
    assert (web.state, dead.state) == (ToolServerState.READY, ToolServerState.FAILED)
    assert "could not be reached" in dead.error
    assert (await servers.call("web__calculate", {"expression": "2 ** 10"})).text == "1024"
    await servers.close()


async def test_an_http_server_that_is_started_again_gets_a_new_session(tmp_path: Path) -> None:
    port = free_port()
    with serve_demo(tmp_path, port) as url:
        servers = ToolServers([ServerConfig("web", url=url)], LIMITS)
        assert (await servers.call("web__add_note", {"text": "one"})).text == "Noted: one"
    with serve_demo(tmp_path, port):
        assert (await servers.call("web__add_note", {"text": "two"})).text == "Noted: two"
        assert servers.card("web").state is ToolServerState.READY
        calls = [servers.call("web__calculate", {"expression": f"{number} + 1"}) for number in range(3)]
        assert [one.text for one in await asyncio.gather(*calls)] == ["1", "2", "3"]
    with pytest.raises(ToolServerFailed):
        await servers.call("web__read_notes", {})
    await servers.close()
    assert (tmp_path / "notes").read_text() == "one\ntwo\n"


async def test_a_guard_refuses_private_addresses(demo_url: str) -> None:
    servers = ToolServers([ServerConfig("web", url=demo_url)], LIMITS, AddressGuard())
    (card,) = await servers.connect()
    assert card.state is ToolServerState.FAILED
    assert "an address that is not public" in card.error
    await servers.close()


async def test_a_guard_connects_to_the_address_that_it_checked(demo_url: str) -> None:
    resolved: list[str] = []

    def resolve(host: str, port: int) -> list[Address]:
        resolved.append(host)
        return [ipaddress.ip_address("127.0.0.1")]

    guard = AddressGuard(resolve, lambda address: True)
    config = ServerConfig("web", url=demo_url.replace("127.0.0.1", "localhost"))
    servers = ToolServers([config], LIMITS, guard)
    assert (await servers.call("web__calculate", {"expression": "6 * 7"})).text == "42"
    assert set(resolved) == {"localhost"}
    await servers.close()


async def test_odd_duplicate_and_monstrous_tools(bad: ToolServers) -> None:
    (card,) = await bad.connect()
    names = [tool.name for tool in card.tools]
    assert names.count("bad__slow") == 1
    assert "bad__odd_name_with_signs_" in " ".join(names)
    schemas = {tool.name: tool.parameters for tool in card.tools}
    assert schemas["bad__deep"] == schemas["bad__wide"] == {"type": "object"}
    assert "A second tool 'slow' was left out" in card.notices[0]
    assert any("nested more than 32 deep" in notice for notice in card.notices)
    assert any("more than 64 kB" in notice for notice in card.notices)


async def test_a_slow_tool_is_bounded_and_cancelled(tmp_path: Path) -> None:
    servers = ToolServers([misbehaving(tmp_path)], ToolLimits(call_seconds=0.3))
    with pytest.raises(ToolServerFailed, match=r"did not answer within 0.3 s"):
        await servers.call("bad__slow", {})
    await wait_for_record(tmp_path, "cancelled")
    assert (await servers.call("bad__unchanged", {})).text == "as always"
    await servers.close()
    assert (tmp_path / "record").read_text().splitlines()[-1] == "ended"


async def test_a_cancelled_call_tells_the_server(bad: ToolServers, tmp_path: Path) -> None:
    await bad.connect()
    call = asyncio.create_task(bad.call("bad__slow", {}))
    await wait_for_record(tmp_path, "call slow")
    call.cancel()
    await asyncio.wait([call])
    await wait_for_record(tmp_path, "cancelled")


async def test_a_server_that_ends_in_a_call_is_started_again(bad: ToolServers) -> None:
    with pytest.raises(ToolServerFailed, match="ended with exit code 3: out of cheese"):
        await bad.call("bad__dies", {})
    assert bad.card("bad").state is ToolServerState.FAILED
    assert (await bad.call("bad__unchanged", {})).text == "as always"


async def test_wrong_json_is_an_answer_that_is_not_of_the_protocol(bad: ToolServers) -> None:
    with pytest.raises(ToolServerFailed, match="sent an answer that is not of the protocol"):
        await bad.call("bad__wrong_json", {})
    assert (await bad.call("bad__unchanged", {})).text == "as always"


async def test_a_result_of_100_mb_ends_the_connection(bad: ToolServers) -> None:
    with pytest.raises(ToolServerFailed, match="sent a message of more than 8 MB"):
        await bad.call("bad__huge", {})
    assert (await bad.call("bad__unchanged", {})).text == "as always"


async def test_a_list_that_changes(bad: ToolServers) -> None:
    await bad.connect()
    with pytest.raises(BadToolServer, match="has no tool"):
        await bad.find_tool("bad__new_0")
    await bad.call("bad__change", {})
    async with asyncio.timeout(10):
        while "bad__new_0" not in [tool.name for tool in (await bad.connect())[0].tools]:
            await asyncio.sleep(0.01)


@pytest.fixture
async def bad_web(tmp_path: Path) -> AsyncIterator[ToolServers]:
    """The misbehaving server over HTTP."""
    with serve_misbehaving(tmp_path / "record") as url:
        servers = ToolServers([ServerConfig("bad", url=url)], LIMITS)
        yield servers
        await servers.close()


async def test_the_misbehaving_server_over_http(bad_web: ToolServers, tmp_path: Path) -> None:
    (card,) = await bad_web.connect()
    assert card.state is ToolServerState.READY
    assert (await bad_web.call("bad__control_text", {"stream": True})).text == misbehaving_server.CONTROL_TEXT
    with pytest.raises(ToolServerFailed, match="sent an answer that is not of the protocol"):
        await bad_web.call("bad__wrong_json", {})
    await wait_for_record(tmp_path, "listens")
    await bad_web.call("bad__change", {})
    async with asyncio.timeout(20):
        while "bad__new_0" not in [tool.name for tool in (await bad_web.connect())[0].tools]:
            await asyncio.sleep(0.01)
    slow = asyncio.create_task(bad_web.call("bad__slow", {}))
    await wait_for_record(tmp_path, "call slow")
    assert (await bad_web.call("bad__unchanged", {})).text == "as always"  # beside it
    slow.cancel()
    await wait_for_record(tmp_path, "cancelled")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_result_of_100_mb_over_http(bad_web: ToolServers, stream: bool) -> None:
    with pytest.raises(ToolServerFailed, match=r"more than 8 MB|broke its answer off"):
        await bad_web.call("bad__huge", {"stream": stream})
    assert (await bad_web.call("bad__unchanged", {})).text == "as always"


async def test_a_slow_http_server_is_bounded_and_one_that_ends_in_a_call_fails(tmp_path: Path) -> None:
    port = free_port()
    with serve_misbehaving(tmp_path / "record", port) as url:
        servers = ToolServers([ServerConfig("bad", url=url)], ToolLimits(call_seconds=0.5))
        with pytest.raises(ToolServerFailed, match=r"did not answer within 0.5 s"):
            await servers.call("bad__slow", {})
        await wait_for_record(tmp_path, "cancelled")
        with pytest.raises(ToolServerFailed):
            await servers.call("bad__dies", {})
        with pytest.raises(ToolServerFailed, match="could not be reached"):
            await servers.call("bad__unchanged", {})
        assert servers.card("bad").state is ToolServerState.FAILED
        assert (tmp_path / "record").read_text().count("call dies") == 1
        await servers.close()


@pytest.mark.parametrize("over_http", [False, True])
async def test_a_flood_of_valid_messages_ends_the_connection(tmp_path: Path, over_http: bool) -> None:
    with serve_misbehaving(tmp_path / "record") if over_http else nullcontext() as url:
        config = ServerConfig("bad", url=url) if url else misbehaving(tmp_path)
        servers = ToolServers([config], FEW_MESSAGES)
        await servers.connect()
        if over_http:
            await wait_for_record(tmp_path, "listens")
        with pytest.raises(ToolServerFailed, match=r"^The tool server 'bad' sent too many messages\.$"):
            await servers.call("bad__floods", {})
        assert (servers.card("bad").state, servers.card("bad").error) == ("failed", "sent too many messages")
        assert (await servers.call("bad__unchanged", {})).text == "as always"
        await servers.close()


def test_a_server_may_send_many_messages_at_once_and_some_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = MessageBudget(ToolLimits(messages_per_second=10.0, message_burst=100))
    assert budget.spend(100, 0)
    assert not budget.spend(1, 0)
    for _ in range(100):
        now += 1.0
        assert budget.spend(9, 0)
    now += 1000.0
    assert budget.spend(1, 99 * MESSAGE_UNIT)  # a large message counts as several
    assert not budget.spend(1, 0)


async def test_results_are_data(bad: ToolServers) -> None:
    assert (await bad.call("bad__control_text", {})).text == misbehaving_server.CONTROL_TEXT
    assert (await bad.call("bad__injection", {})).text == misbehaving_server.INJECTION
    assert (await bad.call("bad__surrogates", {})).text == "a?b"


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("hangs", "did not answer within 0.5 s"),
        ("floods", "output that is not of the protocol"),
        ("floods_valid", "sent too many messages"),
    ],
)
async def test_a_server_that_hangs_or_floods_at_the_start(tmp_path: Path, mode: str, why: str) -> None:
    limits = replace(FEW_MESSAGES, connect_seconds=0.5 if mode == "hangs" else 20.0, message_burst=2000)
    servers = ToolServers([misbehaving(tmp_path, mode)], limits)
    (card,) = await servers.connect()
    assert card.state is ToolServerState.FAILED
    assert why in card.error
    await servers.close()


async def test_a_server_that_fails_is_not_started_again_at_once(tmp_path: Path) -> None:
    script = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')"
    servers = ToolServers([ServerConfig("fails", sys.executable, ("-c", script))], LIMITS)
    for _ in range(3):
        (card,) = await servers.connect()
        assert (card.state, card.error) == (ToolServerState.FAILED, "ended with exit code 0")
    assert (tmp_path / "starts").read_text() == "x"
    await servers.close()


async def test_output_before_the_first_message_is_ignored(tmp_path: Path) -> None:
    servers = ToolServers([misbehaving(tmp_path, "junk")], LIMITS)
    (card,) = await servers.connect()
    assert card.state is ToolServerState.READY
    await servers.close()


def test_a_long_result_is_cut() -> None:
    from mcp import types

    from palaver.tools.servers import _read_result

    block = types.TextContent(type="text", text="x" * 50)
    outcome = _read_result(types.CallToolResult(content=[block]), ToolLimits(result_chars=10))
    assert outcome.text == "x" * 10 + "\n[40 more characters were left out]"


CONNECTS = """
import asyncio, sys, time
from palaver.tools.config import ServerConfig
from palaver.tools.servers import ToolServers

async def connect():
    servers = ToolServers([ServerConfig("bad", sys.executable, tuple(sys.argv[1:]))])
    print((await servers.connect())[0].state, flush=True)
    await asyncio.sleep(600)

asyncio.run(connect())
"""


def test_a_server_that_stays_ends_with_a_program_that_is_killed(tmp_path: Path) -> None:
    arguments = misbehaving(tmp_path, "stays").args
    with subprocess.Popen([sys.executable, "-c", CONNECTS, *arguments], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        pids = [int(word) for word in (tmp_path / "record").read_text().split()[1:3]]
        assert all(map(psutil.pid_exists, pids))
        program.kill()
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < end, "the server is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("failure", ["no pipe", "cancelled"])
async def test_a_server_whose_watcher_does_not_start_is_ended(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec
    started: list[asyncio.subprocess.Process] = []
    watcher_starts = asyncio.Event()

    def fail() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    async def start_server_only(program: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        if started:
            watcher_starts.set()
            await asyncio.Event().wait()
        started.append(await start(program, *arguments, **options))
        if failure == "no pipe":
            monkeypatch.setattr(os, "pipe", fail)
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_server_only)
    process = StdioProcess(ServerConfig("stays", sys.executable, ("-c", "import sys; sys.stdin.read()")), LIMITS)
    opening = asyncio.create_task(process.open().__aenter__())
    if failure == "cancelled":
        await watcher_starts.wait()
        opening.cancel()
    with pytest.raises((OSError, asyncio.CancelledError)):
        await opening
    assert started[0].returncode is not None


def test_names_are_kept_apart_by_server() -> None:
    assert tool_name("files", "read") == "files__read"
    assert tool_name("a", "x/y") != tool_name("a", "x:y")
    assert len(tool_name("a", "x" * 200)) == 64


def test_the_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    assert read_servers(path) == ()
    servers = {
        "files": {"command": "npx", "args": ["-y", "files"], "env": {"TOKEN": "${HOME}"}, "autoApprove": []},
        "web": {"type": "http", "url": "https://tools.example/mcp", "headers": {"Authorization": "Bearer secret"}},
        "off": {"command": "x", "disabled": True},
    }
    path.write_text(json.dumps({"mcpServers": servers, "other": 1}))
    files, web = read_servers(path)
    assert (files.command, files.args, web.transport) == ("npx", ("-y", "files"), "http")
    assert files.env["TOKEN"] != "${HOME}"
    assert "secret" not in repr(web)
    add_server(path, ServerConfig("new", url="https://new.example/mcp"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["mcpServers"]["files"]["autoApprove"] == []
    assert json.loads(path.read_text())["other"] == 1
    remove_server(path, "new")
    assert [one.name for one in read_servers(path)] == ["files", "web"]


@pytest.mark.parametrize(
    ("name", "entry", "why"),
    [
        ("a__b", {"command": "x"}, "can't be the name"),
        ("a/b", {"command": "x"}, "can't be the name"),
        ("a", {}, "either a command or a url"),
        ("a", {"command": "x", "url": "https://x.example"}, "either a command or a url"),
        ("a", {"url": "file:///etc/passwd"}, "not a plain http or https URL"),
        ("a", {"type": "sse", "url": "https://x.example/sse"}, "obsolete"),
        ("a", {"command": "x", "args": "y"}, "list of texts"),
        ("a", {"command": "${NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE"),
        ("a", ["x"], "must be an object"),
    ],
)
def test_bad_servers_are_refused(name: str, entry: object, why: str) -> None:
    with pytest.raises(BadToolServer, match=why):
        parse_server(name, entry)


@pytest.mark.parametrize(
    ("text", "value"), [("17 * 23", "391"), ("2^10", "1024"), ("(1 + 2) / 4", "0.75"), ("-7 // 2 =", "-4")]
)
def test_the_calculator(text: str, value: str) -> None:
    assert calculate_expression(text) == value


@pytest.mark.parametrize("text", ["9**9**9", "1/0", "print(1)", "a", "(" * 150 + "1", "'x' * 9", "True + 1", ""])
def test_the_calculator_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"large|zero|expression"):
        calculate_expression(text)


def test_dice() -> None:
    assert int(roll("d6")) in range(1, 7)
    assert "=" in roll("3d8")
    with pytest.raises(ValueError, match="no dice"):
        roll("0d6")


def test_the_command_adds_lists_calls_and_removes(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["tools", *words, "--data", str(tmp_path)])
        return result.exit_code, result.output

    assert "No tool servers yet" in run("list")[1]
    assert run("add", "bad", sys.executable, misbehaving_server.__file__) == (0, "Added bad.\n")
    assert "already" in run("add", "bad", "x")[1]
    assert run("add", "gone", "no-such-command")[0] == 0
    status, output = run("list")
    assert status == 1
    assert "bad__unchanged()" in output
    assert "gone (stdio): could not be started" in output
    assert run("call", "bad__unchanged") == (0, "as always\n")
    assert run("call", "bad__unchanged", "[]")[0] == 2
    assert run("call", "bad__nothing")[0] == 2
    assert run("remove", "bad")[0] == 0
    assert run("add", "nothing")[0] == 2
