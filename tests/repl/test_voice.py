"""Spoken replies in the terminal: with a player, saved as files, stopped."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from palaver.chat.turn_log import LogEntry
from palaver.events import AnswerDelta, Finished, ThinkingDelta, Usage
from palaver.generation import Finish
from palaver.repl.voice import PlayerProgram, SessionVoice, SoundPlayer, find_player
from palaver.voice.base import SAMPLE_RATE, VoiceSettings
from tests.repl.conftest import local_door
from tests.repl.scripted_session import open_session

pytest.importorskip("espeakng_loader")

RECORDING_PLAYER = "#!/bin/sh\nexec /bin/cat > {received}\n"
ENDLESS_PLAYER = "#!/bin/sh\necho $$ > {received}\nexec /bin/sleep 600\n"
DONE = Finished(Finish.END, Usage(1, 0, 1, 0))


def install_player(folder: Path, script: str) -> Path:
    """Installs a fake player named aplay. Returns the file that receives its input."""
    received = folder / "received"
    folder.mkdir(exist_ok=True)
    (folder / "aplay").write_text(script.format(received=received))
    (folder / "aplay").chmod(0o755)
    return received


def seconds(data: bytes) -> float:
    """The length of the speech sent to a player, a WAV stream of unknown length."""
    samples = np.frombuffer(data[44:], dtype="<i2")
    assert data[:4] == b"RIFF"
    assert float(np.abs(samples).max()) > 3000
    return len(samples) / SAMPLE_RATE


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def player_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


async def speak(voice: SessionVoice, *entries: LogEntry) -> None:
    spoken = await voice.speak_reply("reply")
    assert spoken is not None
    for entry in entries:
        spoken.handle(entry)
    spoken.close()


async def test_only_the_answer_is_played(tmp_path: Path, player_folder: Path) -> None:
    received = install_player(player_folder, RECORDING_PLAYER)
    voice = SessionVoice(tmp_path, print)
    program = await voice.turn_on(VoiceSettings())
    assert program is not None
    assert program.name == "aplay"
    thought = LogEntry(1, ThinkingDelta("A thought that is very much longer than the answer to it will ever be."))
    await speak(
        voice, thought, LogEntry(2, AnswerDelta("Yes. It")), LogEntry(3, AnswerDelta(" is.")), LogEntry(3, DONE)
    )
    await voice.wait()
    await voice.close()
    assert 0.8 < seconds(received.read_bytes()) < 2.5


async def test_without_a_player_it_is_saved(tmp_path: Path, player_folder: Path) -> None:
    notices: list[str] = []
    voice = SessionVoice(tmp_path, notices.append)
    assert await voice.turn_on(VoiceSettings("de")) is None
    await speak(voice, LogEntry(1, AnswerDelta("Guten Tag.")), LogEntry(1, DONE))
    await voice.wait()
    path = tmp_path / "spoken" / "reply.wav"
    assert notices == [f"Saved the audio to {path}"]
    with wave.open(io.BytesIO(path.read_bytes())) as file:
        assert file.getnframes() > 0.3 * SAMPLE_RATE
    voice.turn_off()
    assert await voice.speak_reply("reply") is None


async def test_a_stop_kills_the_player_at_once(tmp_path: Path, player_folder: Path) -> None:
    received = install_player(player_folder, ENDLESS_PLAYER)
    voice = SessionVoice(tmp_path, print)
    await voice.turn_on(VoiceSettings())
    await speak(voice, LogEntry(1, AnswerDelta("Something. And more.")))
    while not (received.exists() and received.read_text().strip()):
        await asyncio.sleep(0.01)
    pid = int(received.read_text())
    assert is_alive(pid)
    voice.stop()
    await voice.wait()
    await voice.close()
    assert not is_alive(pid)


async def test_a_stopped_reply_is_not_read_to_its_end(tmp_path: Path, player_folder: Path) -> None:
    install_player(player_folder, ENDLESS_PLAYER)
    voice = SessionVoice(tmp_path, print)
    await voice.turn_on(VoiceSettings())
    stopped = Finished(Finish.STOPPED, Usage(1, 0, 1, 0))
    await speak(voice, LogEntry(1, AnswerDelta("Something. And more.")), LogEntry(1, stopped))
    await voice.wait()
    await voice.close()


async def test_a_player_that_is_closed_breaks_nothing(tmp_path: Path, player_folder: Path) -> None:
    install_player(player_folder, "#!/bin/sh\nexit 1\n")
    program = find_player()
    assert isinstance(program, PlayerProgram)
    sound_player = SoundPlayer(program)
    for _ in range(3):
        await sound_player.play(np.zeros(SAMPLE_RATE * 5, dtype=np.float32))
    await sound_player.end()


async def test_a_voice_that_is_not_installed_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    async with open_session(tmp_path) as opened:
        shown = await opened.do("/voice on")
        assert shown.startswith("Replies stay text. The voice espeak needs the package espeakng-loader")
        assert "palaver[voice]" in shown
        assert opened.session.succeeded, "it is no error"
        assert opened.session.voice.voice is None
        await opened.do("/voice save sound.wav")
        assert not opened.session.succeeded, "nothing but sound was asked for"


@pytest.mark.slow
def test_the_terminal_speaks(tmp_path: Path) -> None:
    received = install_player(tmp_path / "bin", RECORDING_PLAYER)
    os.mkfifo(received)  # its end is the end of the sound: typing a line before would cut it off
    saved = tmp_path / "saved.wav"
    options = ("--think", "off", "--set", "temperature=0")
    with local_door(tmp_path / "data").open(*options, environment={"PATH": str(tmp_path / "bin")}) as terminal:
        terminal.prompt()
        assert "played by aplay" in terminal.do("/voice on")
        assert "Sprout" in terminal.do("Who are you?")
        assert seconds(received.read_bytes()) > 1
        assert "spoken" in terminal.do("/voice")
        assert "Saved the audio to" in terminal.do(f"/voice save {saved}")
        assert "no longer spoken" in terminal.do("/voice off")
    assert seconds(saved.read_bytes()) > 1
