"""Pictures in the terminal: which protocol it has, and sequences that draw the same pixels."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from palaver.messages import Image as ImagePart
from palaver.messages import Message, Role, Text
from palaver.repl.commands.attachments import parse_files, split_media
from palaver.repl.pictures import encode_picture, picture_protocol
from tests import media_files
from tests.chat.scripted_service import OTHER
from tests.repl.conftest import Door
from tests.repl.scripted_session import open_session
from tests.repl.terminal import ENTER
from tests.scripted_engine import ScriptedEngine

PIXELS = np.zeros((20, 30, 3), np.uint8)
PIXELS[:, 15:] = (255, 0, 0)


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"}, None),
        ({}, None),
    ],
)
def test_the_protocol_of_a_terminal(environment: dict[str, str], protocol: str | None) -> None:
    assert picture_protocol(environment) == protocol


def test_a_dropped_path_is_seen(tmp_path: Path) -> None:
    """At a terminal, by the model that sees and hears."""
    picture = tmp_path / "a square.png"
    picture.write_bytes(media_files.picture(size=(64, 64)))
    door = Door("local", tmp_path / "data", ("sprout-omni", "--local", "--data", str(tmp_path / "data")))
    with door.open("--set", "temperature=0", columns=200) as terminal:
        terminal.wait(" is ready · ")
        terminal.prompt()
        terminal.paste(str(picture).replace(" ", "\\ "))
        terminal.wait("square.png")
        terminal.type(ENTER)
        terminal.prompt()
        assert "red" in terminal.do("What colour is it?").rpartition("What colour is it?")[2]


def test_kitty() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", encode_picture(noise, "kitty"))
    assert [control[-1] for control, _ in chunks] == ["1"] * (len(chunks) - 1) + ["0"]
    assert len(chunks) > 1
    decoded = Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in chunks))))
    assert np.array_equal(np.asarray(decoded), noise)


def test_iterm2() -> None:
    found = re.fullmatch(r"\x1b\]1337;File=inline=1;size=(\d+):(.*)\a", encode_picture(PIXELS, "iterm2"))
    assert found is not None
    data = base64.b64decode(found[2])
    assert len(data) == int(found[1])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), PIXELS)


def test_sixel() -> None:
    found = re.fullmatch(
        r'\x1bP0;1q"1;1;(\d+);(\d+)((?:#\d+;2;\d+;\d+;\d+)+)(.*)\x1b\\', encode_picture(PIXELS, "sixel")
    )
    assert found is not None
    width, height = int(found[1]), int(found[2])
    palette = {int(i): tuple(map(int, rgb)) for i, *rgb in re.findall(r"#(\d+);2;(\d+);(\d+);(\d+)", found[3])}
    drawn = np.full((height + 6, width, 3), -1)
    for band, text in enumerate(found[4].split("-")):
        for row in text.split("$"):
            colour, bits = re.fullmatch(r"#(\d+)(.*)", row).groups()  # type: ignore[union-attr]
            for column, character in enumerate(bits):
                for bit in range(6):
                    if (ord(character) - 63) >> bit & 1:
                        drawn[6 * band + bit, column] = palette[int(colour)]
    assert np.array_equal(drawn[:height], PIXELS.astype(int) * 100 // 255)


def test_a_large_picture_is_scaled_down() -> None:
    sequence = encode_picture(np.zeros((2000, 3000, 3), np.uint8), "iterm2")
    image = Image.open(io.BytesIO(base64.b64decode(sequence.partition(":")[2].rstrip("\a"))))
    assert image.size == (480, 320)


def test_files_that_are_dropped_into_the_line(tmp_path: Path) -> None:
    plain, spaced = tmp_path / "a.png", tmp_path / "my picture.png"
    for path in (plain, spaced):
        path.write_bytes(b"x")
    escaped = str(spaced).replace(" ", "\\ ")
    assert parse_files(str(plain)) == [plain]
    assert parse_files(f" '{spaced}' ") == [spaced]
    assert parse_files(f"{plain} {escaped}") == [plain, spaced]
    assert parse_files(spaced.as_uri()) == [spaced]
    others = (
        "a.png",
        f"look at {plain}",
        f"{plain} please",
        str(tmp_path),
        "/missing.png",
        "it's",
        "/help",
        "",
        "/" + "x" * 9999,
        "~nobody-here",
        f"{plain} ~nobody-here/a.png",
    )
    for line in others:
        assert parse_files(line) == []


def test_media_at_the_ends_of_a_line_are_attached_to_it(tmp_path: Path) -> None:
    plain, spaced, notes = tmp_path / "a.png", tmp_path / "my picture.png", tmp_path / "notes.txt"
    for path in (plain, spaced):
        path.write_bytes(media_files.picture())
    notes.write_text("Hello")
    escaped = str(spaced).replace(" ", "\\ ")
    assert split_media(f"'{spaced}' What's this?") == ([spaced], "What's this?")
    assert split_media(f"What's this? {escaped}") == ([spaced], "What's this?")
    assert split_media(f"{plain} {spaced.as_uri()} or {escaped} '{plain}'") == ([plain, spaced, spaced, plain], "or")
    others = (f"What does {plain} show?", f"{notes} says hello", "it's /missing.png", " a.png ", f"x{plain}", "'")
    for line in (*others, "~ten", "~ten or ~12"):
        assert split_media(line) == ([], line)


async def test_attached_files_go_with_the_next_message(tmp_path: Path) -> None:
    document, picture = tmp_path / "trip.pdf", tmp_path / "red.png"
    document.write_bytes(media_files.pdf("Leaves at nine"))
    picture.write_bytes(media_files.picture())
    async with open_session(tmp_path / "data") as session:
        assert "does not accept pictures" in await session.do(f"/attach {picture}")
        assert "will be sent with your next message" in await session.do(f"/attach '{document}'")
        await session.do("When?")
        path = await session.session.cursor.path()
        assert path[0].parts == (Text("\n\nFile trip.pdf:\n\nLeaves at nine\n\n"), Text("When?"))


async def test_two_slashes_send_the_name_of_a_file_as_text(tmp_path: Path) -> None:
    notes, picture = tmp_path / "notes.txt", tmp_path / "red.png"
    notes.write_text("Hello")
    picture.write_bytes(media_files.picture())
    async with open_session(tmp_path / "data", OTHER, OTHER) as session:
        for line in (str(notes), f"{picture} What is it?"):
            await session.do(f"/{line}")
            sent = await session.session.cursor.last_message(Role.USER)
            assert sent is not None
            assert sent.parts == (Text(line),)
        assert "notes.txt will be sent with your next message" in await session.do(str(notes))


async def test_a_word_that_begins_with_a_tilde_is_text(tmp_path: Path) -> None:
    async with open_session(tmp_path, OTHER, OTHER) as session:
        for line in ("~ten", "How far is ~ten miles, or ~12"):
            await session.do(line)
            sent = await session.session.cursor.last_message(Role.USER)
            assert sent is not None
            assert sent.parts == (Text(line),)


@pytest.mark.parametrize(("terminal", "is_drawn"), [("xterm-kitty", True), ("xterm-256color", False)])
async def test_an_attached_picture_is_drawn_where_the_terminal_can(
    terminal: str, is_drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KITTY_WINDOW_ID", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr(ScriptedEngine, "info", property(lambda engine: replace(engine._info, media=("image",))))
    picture = tmp_path / "dot.png"
    picture.write_bytes(media_files.picture())
    async with open_session(tmp_path / "data") as opened:
        opened.session.screen.is_live = True
        shown = await opened.do(f"/attach {picture}")
        assert ("\x1b_G" in shown) == is_drawn
        assert "dot.png" in shown
        await opened.session.close()


async def test_a_picture_is_named_in_the_history(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        chat = session.stage.chat
        conversation = await chat.create_conversation()
        message = Message(Role.USER, (ImagePart("image/png", media_files.picture(), "red.png"), Text("Look!")))
        stored = await chat.append_message(conversation.id, None, message)
        await session.session.open(conversation.id)
        await session.session.cursor.move(stored.id)
        assert "[red.png, image/png, 8 × 6]" in await session.do("/history")
