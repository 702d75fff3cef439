"""The commands around the store: list, delete, export, import, backup, restore."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from palaver.cli import app
from palaver.commands.store import ExportFormat
from palaver.messages import Image, Message, Role, Text, Thinking, assistant
from palaver.store import Store, open_store
from palaver.transcripts import TranscriptFormat, read_conversation
from tests.store.factories import add_message, add_reply, new_conversation

Run = Callable[..., Result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def run(data: Path) -> Run:
    def invoke(*arguments: object, input: str | bytes = "", folder: Path = data) -> Result:
        return CliRunner().invoke(app, [*map(str, arguments), "--data", str(folder)], input=input)

    return invoke


@pytest.fixture
def store(data: Path) -> Iterator[Store]:
    with open_store(data) as opened:
        yield opened


@pytest.fixture
def rivers(store: Store) -> str:
    """A conversation with two branches and a picture."""
    made = new_conversation(store, title="Rivers", tags=["water"], system="Be brief.")
    picture = Message(Role.USER, (Text("Which river is this?"), Image("image/png", b"pixels")))
    root = store.messages.append(made.id, None, picture)
    lease = store.leases.open()
    add_reply(store, lease, made.id, root.id, "The Rhine.")
    add_reply(store, lease, made.id, root.id, "The Danube.")
    return made.id


@pytest.fixture
def mountains(store: Store) -> str:
    made = new_conversation(store)
    root = add_message(store, made.id, None, "A mountain?")
    store.messages.append(made.id, root.id, assistant("Säntis, with a \x1b[31mred\x1b[0m top."))
    return made.id


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(result: Result, *words: str, status: int = 2) -> None:
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


def test_the_help_names_every_command_and_the_formats_are_the_stores() -> None:
    help = ok(CliRunner().invoke(app, ["--help"]))
    for name in ("conversations", "delete", "undelete", "purge", "export", "import", "backup", "restore"):
        assert name in help
    assert [one.value for one in ExportFormat] == [one.value for one in TranscriptFormat]


def test_conversations_are_listed_the_newest_first(run: Run, rivers: str, mountains: str) -> None:
    lines = ok(run("conversations")).splitlines()
    assert [line.split()[0] for line in lines] == [mountains, rivers]
    assert lines[1].endswith("Rivers  [water]")
    assert lines[0].endswith("A mountain?")
    assert len(ok(run("conversations", "--limit", 1)).splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("conversations",), "No conversations yet."),
        (("conversations", "--search", "x"), 'No conversation matches "x".'),
        (("conversations", "--deleted"), "No deleted conversations."),
        (("keys", "list"), "No keys yet."),
    ],
)
def test_listing_creates_no_database(run: Run, tmp_path: Path, command: tuple[str, ...], sentence: str) -> None:
    result = run(*command, folder=tmp_path / "new")
    assert ok(result) == ""
    assert sentence in result.stderr
    assert not (tmp_path / "new").exists()


def test_conversations_are_found_by_title_and_by_what_was_said(run: Run, rivers: str, mountains: str) -> None:
    assert [line.split()[0] for line in ok(run("conversations", "--search", "river")).splitlines()] == [rivers, "You:"]
    title_only = ok(run("conversations", "--search", "rivers")).splitlines()
    assert [line.split()[0] for line in title_only] == [rivers]
    found = ok(run("conversations", "-s", "santis"))
    assert "Model: Säntis" in found
    assert "\x1b[31m" not in found, "what was said can't steer the terminal"
    nothing = run("conversations", "-s", "nothing like it")
    assert ok(nothing) == ""
    assert 'No conversation matches "nothing like it".' in nothing.stderr
    refused(run("conversations", "-s", "x", "--deleted"), "--deleted")
    assert "a message or a thought" in " ".join(ok(run("conversations", "--help")).split())
    refused(run("conversations", "-s", "caf\udce9"), "The text of --search is not UTF-8.")


def test_a_thought_is_found_as_the_models(run: Run, store: Store, mountains: str) -> None:
    head = store.conversations.get(mountains).head_id
    store.messages.append(mountains, head, Message(Role.ASSISTANT, (Thinking("It is the Eiger."), Text("No."))))
    assert "Model, thinking: It is the Eiger." in ok(run("conversations", "--search", "eiger"))


def test_what_was_deleted_comes_back(run: Run, rivers: str, mountains: str) -> None:
    assert "Rivers" in ok(run("delete", rivers[:6]))
    assert rivers not in ok(run("conversations"))
    assert rivers in ok(run("conversations", "--deleted"))
    refused(run("delete", rivers), rivers)
    assert "Rivers" in ok(run("undelete", rivers))
    assert rivers in ok(run("conversations"))
    refused(run("delete", rivers, "nonesuch"), "nonesuch")
    assert rivers in ok(run("conversations")), "all of them or none"
    refused(run("delete", ""), "conversation")


def test_what_was_purged_does_not_come_back(run: Run, rivers: str, mountains: str, tmp_path: Path) -> None:
    ok(run("delete", rivers))
    assert ok(run("purge")).startswith("0 deleted")
    assert rivers in ok(run("conversations", "--deleted"))
    assert ok(run("purge", "--days", 0)) == "1 deleted conversation was removed for good.\n"
    refused(run("undelete", rivers), rivers)
    assert mountains in ok(run("conversations"))
    refused(run("purge", "--days", -1), "days")
    ok(run("purge", folder=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_beginning_must_be_the_only_one(run: Run, store: Store) -> None:
    ids = [new_conversation(store, title=str(number)).id for number in range(40)]
    first = {id[0] for id in ids if sum(other[0] == id[0] for other in ids) > 1}
    refused(run("export", first.pop()), "Several conversations", "type more")


@pytest.mark.parametrize(
    ("format", "lines", "words"),
    [
        ("jsonl", 1, '"text": "The Rhine."'),
        ("branches", 2, '"text": "The Danube."'),
        ("tree", 1, '"tree":'),
        ("sharegpt", 1, '"from": "gpt"'),
    ],
)
def test_a_conversation_is_exported(run: Run, rivers: str, format: str, lines: int, words: str) -> None:
    out = ok(run("export", rivers, "--as", format))
    assert len(out.splitlines()) == lines
    assert words in out
    for line in out.splitlines():
        json.loads(line)


def test_all_are_exported_to_a_file_that_is_there_whole(
    run: Run, rivers: str, mountains: str, tmp_path: Path, data: Path
) -> None:
    file = tmp_path / "all.jsonl"
    result = run("export", "--all", "-o", file)
    assert ok(result) == ""
    assert "2 of 2" in result.stderr
    before = file.read_bytes()
    assert len(before.splitlines()) == 2
    refused(run("export", "--all", "-o", tmp_path / "no" / "folder"), "no: there is no such folder", status=1)
    refused(run("export", "--all", "-o", data), f"{data}: Is a directory", status=1)
    ok(run("export", "--all", "-o", file))
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "data"]


def test_several_in_markdown_are_a_page_each(run: Run, rivers: str, mountains: str, tmp_path: Path) -> None:
    assert ok(run("export", rivers, "--as", "markdown")).startswith("# Rivers\n\n## System\n\nBe brief.")
    refused(run("export", "--all", "--as", "markdown"), "folder")
    ok(run("export", "--all", "--as", "markdown", "-o", tmp_path / "pages"))
    names = sorted(path.name for path in (tmp_path / "pages").iterdir())
    assert names == [f"A-mountain-{mountains}.md", f"Rivers-{rivers}.md"]


def test_what_to_export_must_be_said_once(run: Run, rivers: str) -> None:
    refused(run("export"), "--all")
    refused(run("export", rivers, "--all"), "--all")
    refused(run("export", "nonesuch"), "nonesuch")


def test_a_message_without_a_reply_is_exported_too(run: Run, store: Store) -> None:
    add_message(store, new_conversation(store).id, None, "hello")
    line = json.loads(ok(run("export", "--all")))
    assert line["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


def test_what_was_exported_is_imported_once(run: Run, store: Store, rivers: str, tmp_path: Path) -> None:
    tree = ok(run("export", rivers, "--as", "tree"))
    file = tmp_path / "one.jsonl"
    file.write_text(tree)
    elsewhere = tmp_path / "elsewhere"
    assert "1 imported, 0 already there" in ok(run("import", file, folder=elsewhere))
    assert "0 imported, 1 already there" in ok(run("import", file, folder=elsewhere))
    assert "0 imported, 1 already there" in ok(run("import", "-", input=tree, folder=elsewhere))
    with open_store(elsewhere) as other:
        (id,) = other.conversations.ids(other.users.ensure().id)
        old, new = read_conversation(store, rivers), read_conversation(other, id)
        assert [entry.message for entry in new.entries] == [entry.message for entry in old.entries]
        assert (new.title, new.system, new.tags) == (old.title, old.system, old.tags)
    ok(run("delete", id, folder=elsewhere))
    assert f"palaver undelete {id}" in run("import", file, folder=elsewhere).stderr


def test_a_file_that_cannot_be_read_keeps_no_other_out(run: Run, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("broken.json", "latin.txt", "missing.json", "good.jsonl")]
    files[0].write_text('{"a": 1}')
    files[1].write_bytes("Zürich".encode("latin-1"))
    files[3].write_text(
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "narrator", "content": "x"}]}\n{"b": 2}\n'
    )
    result = run("import", *files)
    refused(result, "broken.json: Can't read this file. Supported:", "neither text in UTF-8", "missing.json", "skipped")
    assert "good.jsonl: 1 imported" in result.stdout
    assert len(ok(run("conversations")).splitlines()) == 1


def test_a_backup_is_restored_into_an_empty_place(run: Run, store: Store, rivers: str, tmp_path: Path) -> None:
    file = tmp_path / "store.zip"
    assert "1 conversation, 1 media file" in ok(run("backup", file))
    refused(run("backup", file), "choose another name")
    elsewhere = tmp_path / "elsewhere"
    ok(run("conversations", folder=elsewhere))  # an empty store is no hindrance
    assert "Restored 1 conversation and 1 media file from" in ok(run("restore", file, folder=elsewhere))
    with open_store(elsewhere) as other:
        assert read_conversation(other, rivers) == read_conversation(store, rivers)
    refused(run("restore", file, folder=elsewhere), "already")
    refused(run("restore", tmp_path / "missing.zip", folder=tmp_path / "third"), "missing.zip")


def test_whose_conversations(run: Run, store: Store, rivers: str) -> None:
    ann = store.users.ensure("ann").id
    hers = store.conversations.create(ann, title="Hers").id
    assert hers not in ok(run("conversations"))
    assert [line.split()[0] for line in ok(run("conversations", "--user", "ann")).splitlines()] == [hers]
    refused(run("conversations", "--user", "bob"), "bob")


def test_a_place_that_cannot_be_is_told_of(run: Run, tmp_path: Path, data: Path) -> None:
    refused(run("conversations", "--database", "mysql://ann:secret@host/x"), "must begin with")
    assert "secret" not in run("conversations", "--database", "mysql://ann:secret@host/x").output
    refused(run("conversations", "--database", "nonsense"), "no URL")
    missing = f"postgresql://nobody@/none?host={tmp_path}"
    refused(run("conversations", "--database", missing), "does not answer", status=1)
    assert str(tmp_path) in run("conversations", "--database", missing).output, "what the driver says of the address"
    (tmp_path / "file").write_text("")
    refused(run("conversations", folder=tmp_path / "file" / "x"), "file", status=1)


def test_the_place_may_be_in_the_environment(rivers: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALAVER_DATA", str(data))
    assert rivers in ok(CliRunner().invoke(app, ["conversations"]))
