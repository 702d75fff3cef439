"""A conversation with a GGUF model through the server."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.models.catalog import Catalog
from palaver.models.disk import read_facts
from palaver.models.resolver import resolve_folder, resolve_model
from tests.gguf_files import convert_qwen3
from tests.media_files import picture
from tests.mmproj_files import make_projector
from tests.server.live_server import ADMIN, LiveServer


def test_two_turns_over_chat_completions(tmp_path: Path) -> None:
    """With text, and with a picture that the model sees through the projector beside its file."""
    file = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf")
    make_projector(tmp_path / "mmproj-sprout.gguf", "mlp", 256)
    with LiveServer(tmp_path / "data", model=str(file)) as server, httpx.Client(headers=ADMIN, timeout=120) as client:

        def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
            body = {"model": str(file), "messages": list(messages), "temperature": 0, **fields}
            answer = client.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        question = {"role": "user", "content": "What is 12 + 30?"}
        first = ask(question)
        message = first["choices"][0]["message"]
        assert message["content"].endswith(" 42.")
        assert first["choices"][0]["finish_reason"] == "stop"
        answer = {"role": "assistant", "content": message["content"]}
        second = ask(question, answer, {"role": "user", "content": "What is 5 + 6?"})
        assert "11" in second["choices"][0]["message"]["content"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 8

        model = client.get(f"{server.url}/v1/models").json()["data"][0]
        assert model["input_modalities"] == ["text", "image", "video"]
        assert read_facts(resolve_model(str(file))).media == ("image", "video"), "the same before it is loaded"
        seen = {"role": "user", "content": [_picture(1), {"type": "text", "text": "What is it?"}]}
        third = ask(seen, max_tokens=8)
        without = ask({"role": "user", "content": "What is it?"}, max_tokens=8)
        assert third["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + 64
        again = ask(seen, {"role": "assistant", "content": "A picture."}, {"role": "user", "content": "Really?"})
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        other = ask({"role": "user", "content": [_picture(2), {"type": "text", "text": "What is it?"}]}, max_tokens=8)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 64


LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


def test_hostile_files_end_in_one_sentence_beside_a_stream(tmp_path: Path) -> None:
    """The server lives on, and so does a reply of an honest file that runs meanwhile."""
    honest = convert_qwen3(resolve_folder("sprout"), tmp_path / "honest.gguf")
    data = honest.read_bytes()
    hostile = {"cut": data[:-100_000], "foreign": b"GGML" + data[4:]}
    for name, content in hostile.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    extra = {"tokenizer.chat_template": LOOPS}
    convert_qwen3(resolve_folder("sprout"), tmp_path / "looping.gguf", extra=extra)
    expected = {"cut": "damaged", "foreign": "not a GGUF file", "looping": "template"}
    files = {name: str(tmp_path / f"{name}.gguf") for name in expected}
    body = {"model": str(honest), "messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
    body |= {"min_tokens": 600, "max_tokens": 600}
    with (
        LiveServer(tmp_path / "data", model=str(honest), catalog=Catalog((str(honest), *files.values()))) as server,
        httpx.Client(base_url=server.url, headers=ADMIN, timeout=120) as client,
    ):
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            for name, file in files.items():
                refused = client.post("/v1/chat/completions", json=body | {"model": file})
                sentence = refused.json()["error"]["message"]
                assert refused.status_code >= 400, name
                assert expected[name] in sentence
                assert "\n" not in sentence
            streamed = [line for line in (first, *lines) if line.startswith("data: {")]
        assert client.get("/health").status_code == 200
        whole = client.post("/v1/chat/completions", json=body).json()
        assert _text(streamed) == whole["choices"][0]["message"]["content"]
        assert whole["usage"]["completion_tokens"] == 600


def _text(lines: list[str]) -> str:
    deltas = [json.loads(line.removeprefix("data: "))["choices"] for line in lines]
    return "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)


def _picture(number: int) -> dict[str, Any]:
    data = base64.b64encode(picture(size=(40, 48), colour=(60 * number, 20, 90))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
