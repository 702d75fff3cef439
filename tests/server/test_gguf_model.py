"""A conversation with a GGUF model through the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.models.resolver import resolve_folder
from tests.gguf_files import convert_qwen3
from tests.server.live_server import ADMIN, LiveServer


def test_two_turns_over_chat_completions(tmp_path: Path) -> None:
    file = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf")
    with LiveServer(tmp_path / "data", model=str(file)) as server, httpx.Client(headers=ADMIN, timeout=120) as client:

        def ask(*messages: dict[str, Any]) -> dict[str, Any]:
            body = {"model": str(file), "messages": list(messages), "temperature": 0}
            answer = client.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        question = {"role": "user", "content": "What is 12 + 30?"}
        first = ask(question)
        message = first["choices"][0]["message"]
        assert message["content"] == "12 + 30 = 42."
        assert first["choices"][0]["finish_reason"] == "stop"
        answer = {"role": "assistant", "content": message["content"]}
        second = ask(question, answer, {"role": "user", "content": "What is 5 + 6?"})
        assert "11" in second["choices"][0]["message"]["content"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 8
