"""The terminal speaks: through a player, into files where there is none, and it stops."""

from __future__ import annotations

import asyncio
import io
import os
import wave
from pathlib import Path

import numpy as np
import pytest

from palaver.chat.turn_log import LogEntry
from palaver.events import AnswerDelta, Finished, ThinkingDelta, Usage
from palaver.generation import Finish
from palaver.repl.voice import PlayerProgram, SessionVoice, SoundPlayer, find_player
from palaver.voice.base import RATE, VoiceSettings
from tests.repl.conftest import local

pytest.importorskip("espeakng_loader")

RECORDS = "#!/bin/sh\nexec /bin/cat > {heard}\n"
NEVER_ENDS = "#!/bin/sh\necho $$ > {heard}\nexec /bin/sleep 600\n"
DONE = Finished(Finish.END, Usage(1, 0, 1, 0))


def player(folder: Path, script: str) -> Path:
    """A player named aplay, the only program that is found; what it hears is the returned file."""
    heard = folder / "heard"
    folder.mkdir(exist_ok=True)
    (folder / "aplay").write_text(script.format(heard=heard))
    (folder / "aplay").chmod(0o755)
    return heard


def seconds(data: bytes) -> float:
    """Of speech, as it was sent to a player: a WAV file without an end."""
    samples = np.frombuffer(data[44:], dtype="<i2")
    assert data[:4] == b"RIFF"
    assert float(np.abs(samples).max()) > 3000
    return len(samples) / RATE


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def found_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


async def read(voice: SessionVoice, *entries: LogEntry) -> None:
    reading = await voice.read("reply")
    assert reading is not None
    for entry in entries:
        reading.take(entry)
    reading.leave()


async def test_only_the_answer_is_played(tmp_path: Path, found_in: Path) -> None:
    heard = player(found_in, RECORDS)
    voice = SessionVoice(tmp_path, print)
    program = await voice.turn_on(VoiceSettings())
    assert program is not None
    assert program.name == "aplay"
    thought = LogEntry(1, ThinkingDelta("A thought that is very much longer than the answer to it will ever be."))
    await read(voice, thought, LogEntry(2, AnswerDelta("Yes. It")), LogEntry(3, AnswerDelta(" is.")), LogEntry(3, DONE))
    await voice.heard()
    await voice.close()
    assert 0.8 < seconds(heard.read_bytes()) < 2.5


async def test_without_a_player_it_is_saved(tmp_path: Path, found_in: Path) -> None:
    told: list[str] = []
    voice = SessionVoice(tmp_path, told.append)
    assert await voice.turn_on(VoiceSettings("de")) is None
    await read(voice, LogEntry(1, AnswerDelta("Guten Tag.")), LogEntry(1, DONE))
    await voice.heard()
    path = tmp_path / "spoken" / "reply.wav"
    assert told == [f"Spoken into {path}"]
    with wave.open(io.BytesIO(path.read_bytes())) as file:
        assert file.getnframes() > 0.3 * RATE
    voice.turn_off()
    assert await voice.read("reply") is None


async def test_a_stop_kills_the_player_at_once(tmp_path: Path, found_in: Path) -> None:
    heard = player(found_in, NEVER_ENDS)
    voice = SessionVoice(tmp_path, print)
    await voice.turn_on(VoiceSettings())
    await read(voice, LogEntry(1, AnswerDelta("Something. And more.")))
    while not (heard.exists() and heard.read_text().strip()):
        await asyncio.sleep(0.01)
    pid = int(heard.read_text())
    assert is_alive(pid)
    voice.stop()
    await voice.heard()
    await voice.close()
    assert not is_alive(pid)


async def test_a_stopped_reply_is_not_read_to_its_end(tmp_path: Path, found_in: Path) -> None:
    player(found_in, NEVER_ENDS)
    voice = SessionVoice(tmp_path, print)
    await voice.turn_on(VoiceSettings())
    stopped = Finished(Finish.STOPPED, Usage(1, 0, 1, 0))
    await read(voice, LogEntry(1, AnswerDelta("Something. And more.")), LogEntry(1, stopped))
    await voice.heard()
    await voice.close()


async def test_a_player_that_is_closed_breaks_nothing(tmp_path: Path, found_in: Path) -> None:
    player(found_in, "#!/bin/sh\nexit 1\n")
    program = find_player()
    assert isinstance(program, PlayerProgram)
    playing = SoundPlayer(program)
    for _ in range(3):
        await playing.play(np.zeros(RATE * 5, dtype=np.float32))
    await playing.end()


@pytest.mark.slow
def test_the_terminal_speaks(tmp_path: Path) -> None:
    heard = player(tmp_path / "bin", RECORDS)
    os.mkfifo(heard)  # its end is the end of the sound: typing a line before would cut it off
    saved = tmp_path / "saved.wav"
    with local(tmp_path / "data").open("--think", "off", environment={"PATH": str(tmp_path / "bin")}) as talk:
        talk.prompt()
        assert "played by aplay" in talk.do("/voice on")
        assert "Sprout" in talk.do("Who are you?")
        assert seconds(heard.read_bytes()) > 1
        assert "spoken" in talk.do("/voice")
        assert "Spoken into" in talk.do(f"/voice save {saved}")
        assert "no longer spoken" in talk.do("/voice off")
    assert seconds(saved.read_bytes()) > 1
