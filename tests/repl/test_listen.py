"""Speech as input: the words of a file are put into the prompt."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import soundfile

from palaver.repl.input import StreamLineSource
from tests.repl.scripted_session import open_session
from tests.voice.tiny_models import make_whisper


async def test_the_words_can_be_edited_before_they_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "my words.wav"
    soundfile.write(file, np.random.default_rng(0).normal(size=16_000) * 0.1, 16_000)
    async with open_session(tmp_path / "data") as opened:
        session = opened.session
        assert "--transcriber" in await opened.do(f"/listen {file}")
        opened.stage.service.transcriber_name = str(make_whisper(tmp_path / "whisper"))
        assert await opened.do(f"/listen {file}") == ""
        expected = await session.chat.transcribe(file.read_bytes(), file.name)
        assert expected
        assert session.initial_line is not None
        assert session.initial_line.text == expected
        assert session.cursor.conversation_id is None, "nothing was sent"
        session.lines = StreamLineSource(io.StringIO(), sys.stderr)
        assert (await opened.do(f"/listen {file}")).startswith(f"my words.wav says: {expected[:4]}")
        file.write_bytes(b"no sound")
        assert "is of a type that is not supported" in await opened.do(f"/listen {file}")
        assert "/listen FILE" in await opened.do("/listen")
