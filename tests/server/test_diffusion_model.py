"""Sprout Diffusion at every door: the same seed gives the same reply, alone and in company, cut and uncut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from palaver.chat.reply_stream import ReplyRequest
from palaver.cli import app
from palaver.engines.diffusion.engine import LACKS
from palaver.events import DraftBlock
from palaver.generation import Finish
from palaver.messages import user
from palaver.sampling import Sampling
from tests.chat.process_kills import run as run_kills
from tests.repl.conftest import Door
from tests.server.live_server import ADMIN, LiveServer
from tests.server.socket.client import connect_client

QUESTION = "What is 17 + 25?"
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7, "steps": 8}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("diffusion"), model="sprout-diffusion") as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, headers=ADMIN, timeout=120) as client:
        yield client


def chat(http: httpx.Client, text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **fields})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def ask_socket(live: LiveServer, text: str = QUESTION, **fields: Any) -> str:
    """By the socket, with the other doors' defaults instead of its own."""
    generation = {"length_penalty": 1.0, "max_new_tokens": 600, **fields}
    async with connect_client(live.url, additional_headers=ADMIN) as client:
        asked = [{"role": "user", "content": text}]
        received = await client.request(messages=asked, enable_thinking=True, generation=generation)
    assert received[-1]["type"] == "done", received[-1]
    answer: str = received[-1]["text"]
    return answer


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def test_its_card_says_what_its_engine_lacks(http: httpx.Client) -> None:
    expected = {capability.value: why for capability, why in LACKS.items()}
    assert "constraints" in expected
    assert http.get("/v1/models").json()["data"][0]["lacks"] == expected
    assert http.get("/v1/models/sprout-diffusion").json()["lacks"] == expected
    assert http.get("/api/model").json()["lacks"] == expected


def test_it_thinks_and_answers(http: httpx.Client) -> None:
    message = chat(http)
    assert "42" in message["content"]
    assert "7+5=12" in message["reasoning_content"].replace(" ", "")


def test_every_door_gives_the_same_reply_to_the_same_seed(live: LiveServer, http: httpx.Client) -> None:
    expected = chat(http, **DRAWN)["content"]
    streamed = "".join(choice["delta"].get("content") or "" for choice in stream(http, **DRAWN))
    response = http.post("/v1/responses", json={"input": QUESTION, "store": False, **DRAWN}).json()
    (message,) = (item for item in response["output"] if item["type"] == "message")
    conversation = http.post("/api/conversations", json={}).json()
    said = {"message": {"role": "user", "parts": [{"type": "text", "text": QUESTION}]}, "parent": None}
    sent = http.post(f"/api/conversations/{conversation['id']}/say", json={**said, "parameters": DRAWN}).json()
    with http.stream("GET", f"/api/turns/{sent['reply']['id']}/events") as events:
        list(events.iter_lines())
    stored = http.get(f"/api/messages/{sent['reply']['id']}").json()
    text = "".join(part["text"] for part in stored["parts"] if part["type"] == "text")
    asked = {"max_tokens": 600, "messages": [{"role": "user", "content": QUESTION}], **DRAWN}
    blocks = http.post("/v1/messages", json=asked, headers={"anthropic-version": "2023-06-01"}).json()["content"]
    messages = "".join(block["text"] for block in blocks if block["type"] == "text")
    by_socket = asyncio.run(ask_socket(live, **DRAWN))
    assert [streamed, message["content"][0]["text"], text, messages, by_socket] == [expected] * 5


async def test_the_socket_answers_with_its_own_defaults(live: LiveServer) -> None:
    async with connect_client(live.url, additional_headers=ADMIN) as client:
        asked = [{"role": "user", "content": QUESTION}]
        received = await client.request(
            messages=asked, enable_thinking=True, generation={"do_sample": False, "steps": 16}
        )
    assert received[-1]["type"] == "done", received[-1]
    assert "42" in received[-1]["text"]


def test_the_command_line_and_the_terminal_give_the_same_reply(tmp_path: Path, http: httpx.Client) -> None:
    """Each with a model of its own: `palaver ask`, and `palaver chat` at a terminal."""
    expected = chat(http, **DRAWN)
    settings = [part for name, value in DRAWN.items() for part in ("--set", f"{name}={value}")]
    asked = CliRunner().invoke(app, ["ask", QUESTION, "-m", "sprout-diffusion", *settings, "--json"])
    reply = json.loads(asked.stdout)
    assert (reply["answer"], reply["thinking"]) == (expected["content"], expected["reasoning_content"])
    door = Door("local", tmp_path, ("sprout-diffusion", "--local", "--data", str(tmp_path)))
    with door.open(*settings) as terminal:
        terminal.wait(" is ready · ")
        terminal.prompt()
        shown = terminal.do(QUESTION)
        assert " ".join(expected["content"].split()) in " ".join(shown.split())
        assert not any(shade in shown for shade in "░▒▓"), "a mask is left on the screen"


def test_company_changes_nothing(http: httpx.Client) -> None:
    """Eight streams at once, with seeds of their own."""
    questions = [QUESTION, "Spell tree backwards.", "Hello!", "What is 8 + 5?"]
    cases = [(question, {**DRAWN, "seed": seed}) for question in questions for seed in (7, 8)]
    alone = [chat(http, question, **fields) for question, fields in cases]
    with ThreadPoolExecutor(len(cases)) as threads:
        together = list(threads.map(lambda case: chat(http, case[0], **case[1]), cases))
    assert together == alone


async def test_company_at_another_door_changes_nothing(live: LiveServer, http: httpx.Client) -> None:
    by_socket, by_http = "Spell tree backwards.", QUESTION
    other_seed = {**DRAWN, "seed": 8}
    alone = [await ask_socket(live, by_socket, **DRAWN), chat(http, by_http, **other_seed)["content"]]
    answer, message = await asyncio.gather(
        ask_socket(live, by_socket, **DRAWN), asyncio.to_thread(chat, http, by_http, **other_seed)
    )
    assert [answer, message["content"]] == alone


def test_drafts_come_where_they_are_asked_for(http: httpx.Client) -> None:
    choices = stream(http, stream_options={"include_drafts": True}, **DRAWN)
    drafts = [choice["draft"] for choice in choices if "draft" in choice]
    assert drafts
    assert all(len(draft["texts"]) == len(draft["confidence"]) for draft in drafts)
    assert any(None in draft["texts"] for draft in drafts)
    assert not any("draft" in choice for choice in stream(http, **DRAWN))


def test_a_reply_stopped_in_a_block_goes_on_as_uncut(live: LiveServer) -> None:
    model = live.service.models.current()
    request = ReplyRequest((user(QUESTION),), Sampling(temperature=0.8, seed=7, steps=8))

    async def cut(after: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that a stop after so many drafts keeps, and those of the continued reply."""
        drafts = 0
        async with model.stream_reply(request) as stream:
            async for event in stream:
                drafts += isinstance(event, DraftBlock)
                if drafts == after:
                    stream.stop()
            stopped = stream.reply()
        if stopped.finish is Finish.END:
            return stopped.token_ids, stopped.token_ids
        async with model.continue_reply(stopped) as stream:
            async for _ in stream:
                pass
            return stopped.token_ids, stream.reply().token_ids

    async def all_cuts() -> None:
        uncut = (await model.reply(request)).token_ids
        for after in (1, 8, 13):
            kept, whole = await cut(after)
            assert whole == uncut
            assert len(kept) % 32 == 0 or kept == uncut

    live.run_in_loop(all_cuts)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"steps": 0}, "steps must be between 1 and 10,000"),
        ({"remasking": "luck"}, "remasking must be confidence or entropy"),
        ({"top_p": 0.5}, "is not for diffusion models"),
        ({"response_format": {"type": "json_object"}}, "writes many tokens at once"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(http: httpx.Client, fields: dict[str, Any], sentence: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_masks_are_filled(http: httpx.Client) -> None:
    body = {"text": "17 + [MASK:2] = 42, and 4 + 4 = [MASK].", "steps": 3, "seed": 1}
    answer = http.post("/v1/fill", json=body).json()
    text = answer["choices"][0]["text"]
    assert text.startswith("17 + ")
    assert " = 42, and 4 + 4 = " in text
    assert text.endswith(".")
    assert "[MASK" not in text
    assert http.post("/v1/fill", json=body).json()["choices"][0]["text"] == text
    for wrong, sentence in (
        ({"text": "nothing to fill"}, "must have at least one [MASK]"),
        ({"text": "a [MASK:0]"}, "must be from 1 to 10,000 tokens long"),
        ({"text": "a [MASK:9999]"}, "context"),
        ({"text": "a [MASK]", "stream": True}, "stream must be false"),
        ({"text": "a [MASK]", "max_tokens": 4}, "is not for texts with masks"),
    ):
        refused = http.post("/v1/fill", json=wrong)
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]["message"]


def test_a_kill_in_a_block_loses_nothing_that_was_shown(tmp_path: Path) -> None:
    count = run_kills(tmp_path, "sprout-diffusion", kills=1, seconds=0.5, streams=2)
    assert count.wrong == []
    assert count.interrupted > 0
