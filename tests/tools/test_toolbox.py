"""Whose tool servers they are, and what several processes on one data folder see of them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from palaver.commands.serve import _toolbox
from palaver.errors import BadParameter
from palaver.store import open_store
from palaver.tools.config import FILE_NAME, BadToolServer, ServerConfig, add_server, read_servers
from palaver.tools.toolbox import Toolbox


def server(name: str, host: str = "tools.example") -> ServerConfig:
    return ServerConfig(name, url=f"https://{host}/mcp")


async def test_a_server_that_one_process_adds_is_known_to_the_other(tmp_path: Path) -> None:
    one, other = Toolbox(folder=tmp_path), Toolbox(folder=tmp_path)
    assert other.names("ada") == ()
    one.add("ada", server("search"))
    assert other.names("ada") == ("search",)
    other.add("ada", server("weather"))
    assert one.names("ada") == ("search", "weather")
    with pytest.raises(BadToolServer, match="already"):
        one.add("ada", server("weather"))
    await one.remove("ada", "search")
    assert one.names("ada") == other.names("ada") == ("weather",)
    assert not other.has("ada", "search")
    assert one.names("grace") == ()
    await other.remove("ada", "weather")
    one.add("ada", server("weather", "elsewhere.example"))
    (config,) = read_servers(tmp_path / "ada.json")
    assert other._of("ada").config("weather") == config
    await one.close()
    await other.close()


def add_some(path: Path, prefix: str) -> None:
    for number in range(10):
        add_server(path, server(f"{prefix}{number}"))


def test_two_processes_that_add_servers_lose_none(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add_some, args=(tmp_path / "ada.json", prefix)) for prefix in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_servers(tmp_path / "ada.json")) == 20
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


async def test_the_file_of_an_operator_is_for_all_and_that_of_the_data_folder_for_the_local_user(
    tmp_path: Path,
) -> None:
    file = tmp_path / "operator.json"
    add_server(file, server("shared"))
    with open_store(tmp_path / "data") as store:
        add_server(store.folder / FILE_NAME, server("local"))
        ada, grace = store.users.ensure().id, store.users.ensure("grace").id
        assert (_toolbox(store, file).names(ada), _toolbox(store, file).names(grace)) == (("shared",), ("shared",))
        toolbox = _toolbox(store, None)
        assert (toolbox.names(ada), toolbox.names(grace)) == (("local",), ())
        toolbox.add(grace, server("hers"))
        assert (toolbox.names(ada), toolbox.names(grace)) == (("local",), ("hers",))
        with pytest.raises(BadToolServer, match="no tool server 'local'"):
            await toolbox.connect(grace, ["local"])
        with pytest.raises(BadParameter, match="--tools"):
            _toolbox(store, tmp_path / "missing.json")
        await toolbox.close()
