"""Stored responses: other APIs, branches, restarts, idempotency and clients that disconnect."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.store import ReplyStatus
from tests.server.chat_client import get
from tests.server.live_server import LiveServer

RESPONSES = "/v1/responses"
SUM = "What is 12 + 30?"
NAME = "My name is Ann."
QUESTION = "What is my name?"


def create(http: httpx.Client, input: Any = SUM, **fields: Any) -> dict[str, Any]:
    answer = http.post(RESPONSES, json={"input": input, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def expect_error(http: httpx.Client, input: Any = SUM, **fields: Any) -> tuple[int, str | None]:
    answer = http.post(RESPONSES, json={"input": input, **fields})
    error = answer.json()["error"]
    return answer.status_code, error["param"]


def retrieve(http: httpx.Client, response: dict[str, Any]) -> dict[str, Any]:
    answer = http.get(f"{RESPONSES}/{response['id']}")
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def text(response: dict[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def conversation(response: dict[str, Any]) -> str:
    id: str = response["conversation"]["id"]
    return id


def branch(http: httpx.Client, response: dict[str, Any]) -> list[tuple[str, str]]:
    """The branch as the conversations API returns it."""
    found = http.get(f"/api/messages/{response['id'].removeprefix('resp_')}/path").json()
    return [(m["role"], "".join(p["text"] for p in m["parts"] if p["type"] == "text")) for m in found]


def wait_ended(http: httpx.Client, response: dict[str, Any]) -> dict[str, Any]:
    while response["status"] in ("queued", "in_progress"):
        response = retrieve(http, response)
    return response


def system_prompt(http: httpx.Client, response: dict[str, Any]) -> str:
    """The system prompt that the reply was made with."""
    message = http.get(f"/api/messages/{response['id'].removeprefix('resp_')}").json()
    return str(message["reply"]["settings"]["options"].get("system", ""))


def gauge(live: LiveServer, name: str) -> int:
    found = re.search(rf"^palaver_{name} (\S+)$", get(f"{live.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


class TestOtherApis:
    def test_a_conversation_is_seen_through_every_door(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        second = create(http, QUESTION, previous_response_id=first["id"])
        assert branch(http, second) == [
            ("user", NAME),
            ("assistant", text(first)),
            ("user", QUESTION),
            ("assistant", text(second)),
        ]
        listed = http.get("/api/conversations").json()
        assert conversation(first) in [one["id"] for one in listed]

    def test_a_reply_of_another_door_is_a_response(self, http: httpx.Client) -> None:
        talk = http.post("/api/conversations", json={"system": "You are kind."}).json()
        message = {"role": "user", "parts": [{"type": "text", "text": NAME}]}
        body = {"parent": None, "message": message, "parameters": {"temperature": 0}}
        sent = http.post(f"/api/conversations/{talk['id']}/say", json=body).json()
        response = wait_ended(http, retrieve(http, {"id": f"resp_{sent['reply']['id']}"}))
        assert response["status"] == "completed"
        assert text(response)
        items = http.get(f"{RESPONSES}/{response['id']}/input_items").json()["data"]
        assert items[0]["content"] == [{"type": "input_text", "text": NAME}]
        after = create(http, QUESTION, previous_response_id=response["id"])
        assert "Ann" in text(after)
        assert system_prompt(http, after) == "You are kind.", "the conversation's own system prompt holds"

    def test_a_conversation_is_gone_on_with_where_it_was_left(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        for named in (conversation(first), {"id": conversation(first)}):
            again = create(http, QUESTION, conversation=named)
            assert "Ann" in text(again)
            assert conversation(again) == conversation(first)
        assert len(branch(http, again)) == 6
        assert expect_error(http, conversation=conversation(first), previous_response_id=first["id"])[0] == 400
        assert expect_error(http, conversation="nope")[0] == 404

    def test_a_history_that_is_sent_again_stays_one_conversation(self, http: httpx.Client) -> None:
        history: list[Any] = [{"role": "user", "content": "My name is Ann and I am here twice."}]
        first = create(http, history)
        history += [{"role": "assistant", "content": text(first)}, {"role": "user", "content": QUESTION}]
        second = create(http, history)
        assert conversation(second) == conversation(first)
        assert len(branch(http, second)) == 4
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        history += [*second["output"], {"role": "user", "content": SUM}]
        third = create(http, history)
        assert len(branch(http, third)) == 6
        items = http.get(f"{RESPONSES}/{third['id']}/input_items?order=asc").json()["data"]
        assert [item.get("role") for item in items if item["type"] == "message"] == [
            "user", "assistant", "user", "assistant", "user"
        ]  # fmt: skip
        http.delete(f"{RESPONSES}/{second['id']}")
        fourth = create(http, history)
        assert conversation(fourth) == conversation(first), "the branch of the first one is still there"
        assert branch(http, fourth)[:2] == branch(http, third)[:2]

    def test_an_item_is_named_by_its_id(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        items = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
        named = [{"type": "item_reference", "id": item["id"]} for item in (*items, *first["output"])]
        again = create(http, [*named, {"role": "user", "content": QUESTION}], store=False)
        assert "Ann" in text(again)
        assert expect_error(http, [{"type": "item_reference", "id": "msg_nope_0"}]) == (400, "input[0].id")


class TestInstructions:
    def test_they_hold_for_one_response(self, http: httpx.Client) -> None:
        first = create(http, NAME, instructions="You are kind.")
        assert (first["instructions"], system_prompt(http, first)) == ("You are kind.", "You are kind.")
        talk = http.get(f"/api/conversations/{conversation(first)}").json()
        assert talk["system"] == "You are kind.", "the page continues with the conversation's own system prompt"
        second = create(http, QUESTION, previous_response_id=first["id"])
        assert (second["instructions"], system_prompt(http, second)) == (None, "")
        third = create(http, QUESTION, previous_response_id=first["id"], instructions="You are brief.")
        assert system_prompt(http, third) == "You are brief."

    def test_what_the_input_says_of_the_system_is_carried_over(self, http: httpx.Client) -> None:
        history = [{"role": "developer", "content": "Speak softly."}, {"role": "user", "content": NAME}]
        first = create(http, history, instructions="You are kind.")
        assert system_prompt(http, first) == "You are kind.\n\nSpeak softly."
        second = create(http, QUESTION, previous_response_id=first["id"])
        assert system_prompt(http, second) == "Speak softly."


class TestDelete:
    def test_a_conversation_goes_with_its_last_response(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        second = create(http, QUESTION, previous_response_id=first["id"])
        path = f"/api/conversations/{conversation(first)}"
        deleted = http.delete(f"{RESPONSES}/{first['id']}").json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        assert http.get(path).status_code == 200, "the second one hangs on it"
        assert "Ann" in text(retrieve(http, second))
        assert http.delete(f"{RESPONSES}/{first['id']}").status_code == 404
        http.delete(f"{RESPONSES}/{second['id']}")
        assert http.get(path).status_code == 404

    def test_a_reply_that_was_made_from_it_stays(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        http.delete(f"{RESPONSES}/{create(http, QUESTION, previous_response_id=first['id'])['id']}")
        turn = first["id"].removeprefix("resp_")
        assert http.delete(f"{RESPONSES}/{first['id']}").status_code == 200
        assert http.post(f"/api/conversations/{conversation(first)}/undelete").status_code == 200
        forked = http.post(f"/api/turns/{turn}/fork", json={"tokens": 3}).json()
        response = wait_ended(http, retrieve(http, {"id": f"resp_{forked['id']}"}))
        assert response["status"] == "completed"
        assert response["id"] != first["id"]
        assert http.get(f"{RESPONSES}/{first['id']}").status_code == 404


class TestDisconnect:
    def test_a_client_that_leaves_stops_its_response_and_finds_what_was_said(self, http: httpx.Client) -> None:
        body = {"input": SUM, "temperature": 0, "stream": True, "min_tokens": 6000}
        with http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            next(line for line in lines if "reasoning_text.delta" in line)
        response = wait_ended(http, retrieve(http, httpx.Response(200, text=first[6:]).json()["response"]))
        assert response["status"] == "cancelled"
        assert response["output"][0]["type"] == "reasoning"
        after = create(http, SUM, previous_response_id=response["id"])
        assert "42" in text(after)

    def test_in_the_background_it_goes_on(self, http: httpx.Client) -> None:
        body = {"input": SUM, "temperature": 0, "stream": True, "background": True}
        with http.stream("POST", RESPONSES, json=body) as answer:
            first = next(line for line in answer.iter_lines() if line.startswith("data: "))
        response = wait_ended(http, retrieve(http, httpx.Response(200, text=first[6:]).json()["response"]))
        assert text(response).endswith(" 42.")

    def test_what_is_not_stored_ends_with_its_client(self, live: LiveServer, http: httpx.Client) -> None:
        body = {"input": SUM, "stream": True, "min_tokens": 6000, "store": False}
        with http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "delta" in line)
            running = gauge(live, "replies_running")
            assert running > 0
        while gauge(live, "replies_running") >= running:
            pass


class TestIdempotency:
    def test_a_key_makes_it_happen_once(self, http: httpx.Client) -> None:
        body = {"input": NAME, "temperature": 0}
        headers = {"idempotency-key": "once"}
        first, again = (http.post(RESPONSES, json=body, headers=headers).json() for _ in range(2))
        assert first == again

    def test_a_response_that_runs_can_not_be_gone_on_with(self, http: httpx.Client) -> None:
        running = create(http, background=True, min_tokens=6000)
        assert expect_error(http, previous_response_id=running["id"])[0] == 409
        assert expect_error(http, conversation=conversation(running))[0] == 409
        half = retrieve(http, running)
        assert half["status"] in ("queued", "in_progress")
        assert half["usage"] is None
        cancelled = http.post(f"{RESPONSES}/{running['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"


class TestInvalidRequests:
    def test_nothing_is_left_of_what_was_refused(self, http: httpx.Client) -> None:
        def titles() -> list[str]:
            return [one["title"] for one in http.get("/api/conversations?limit=1000").json()]

        long = "word " * 9000
        schema = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}
        assert http.post(RESPONSES, json={"input": long}).json()["error"]["code"] == "context_length_exceeded"
        assert expect_error(http, "Refused 1", temperature=9) == (400, "temperature")
        assert expect_error(http, "Refused 2", text=schema) == (400, "text.format")
        assert expect_error(http, "Refused 2", text=schema, stream=True) == (400, "text.format")
        assert not [title for title in titles() if title.startswith(("word", "Refused"))]

    def test_what_does_not_fit_is_dropped_where_that_is_wanted(self, http: httpx.Client) -> None:
        history = [{"role": "user", "content": "word " * 9000}, {"role": "user", "content": SUM}]
        history.insert(1, {"role": "assistant", "content": "Well."})
        for store in (True, False):
            assert expect_error(http, history, store=store)[0] == 400
            assert "42" in text(create(http, history, truncation="auto", store=store))

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("input", {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
            ("input[0].role", {"input": [{"content": "a"}]}),
            ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "a"}]}),
            ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_video"}]}]}),
            ("input[0].encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}),
            ("input[0].wings", {"input": [{"role": "user", "content": "a", "wings": 2}]}),
            ("metadata", {"metadata": {str(n): "x" for n in range(17)}}),
            ("metadata", {"metadata": {"x" * 65: "x"}}),
            ("top_logprobs", {"top_logprobs": 6}),
            ("context_management", {"context_management": [{"type": "compaction"}]}),
            ("tool_choice", {"tool_choice": {"type": "function", "name": "nope"}}),
            ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
            ("reasoning.effort", {"reasoning": {"effort": "nope"}}),
            ("store", {"store": False, "conversation": "x"}),
            ("wings", {"wings": 2}),
        ],
    )
    def test_what_is_wrong_is_named(self, http: httpx.Client, name: str, fields: dict[str, Any]) -> None:
        assert expect_error(http, **fields) == (400, name)

    @pytest.mark.parametrize("store", [True, False])
    def test_a_file_that_can_not_be_read_is_named_by_its_item(self, http: httpx.Client, store: bool) -> None:
        reply = [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"role": "assistant", "content": "It's 42."},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        ]
        broken = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
        result = {"type": "function_call_output", "call_id": "c", "output": broken}
        question = {"role": "user", "content": "What is it?"}
        for input, where in (
            ([question, *reply[:2], {"role": "user", "content": broken}], "input[3]"),
            ([question, *reply, result, question], "input[4]"),
            ([question, *reply, result], "input[4]"),
        ):
            answer = http.post(RESPONSES, json={"input": input, "store": store})
            assert answer.status_code == 400
            assert where in answer.json()["error"]["message"]
        made = http.post("/v1/conversations", json={"items": [question, {"role": "user", "content": broken}]})
        assert "items[1]" in made.json()["error"]["message"]

    def test_what_is_empty_is_refused(self, http: httpx.Client) -> None:
        empty: list[Any] = [[], None]
        for input in empty:
            assert expect_error(http, input)[0] == 400


class TestRestart:
    def test_a_response_goes_on_after_the_server_did(self, tmp_path: Path) -> None:
        """Parked during a stream: a client that resumes gets the rest, and no event twice."""
        body = {
            "input": SUM,
            "seed": 7,
            "temperature": 1.0,
            "background": True,
            "stream": True,
            "max_output_tokens": 140,
        }
        with LiveServer(tmp_path / "uncut") as live, httpx.Client(base_url=live.url, timeout=60) as http:
            uncut = _parse_events(http.post(RESPONSES, json={**body, "min_tokens": 100}).text)
        with LiveServer(tmp_path / "cut") as live, httpx.Client(base_url=live.url, timeout=60) as http:
            events: list[dict[str, Any]] = []
            ended = threading.Event()
            with http.stream("POST", RESPONSES, json={**body, "min_tokens": 100}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events += _parse_events(line)
                        if len(events) == 20:
                            live.run_in_loop(lambda: live.service.turns.park())
                            ended.set()
            assert ended.is_set()
            assert events[-1]["type"] == "error"
            assert events[-1]["sequence_number"] == events[-2]["sequence_number"]
            id = events[0]["response"]["id"]
        with LiveServer(tmp_path / "cut") as live, httpx.Client(base_url=live.url, timeout=60) as http:
            after = events[-1]["sequence_number"]
            rest = _parse_events(http.get(f"{RESPONSES}/{id}?stream=true&starting_after={after}").text)
            whole = _parse_events(http.get(f"{RESPONSES}/{id}?stream=true").text)
        assert [*events[:-1], *rest] == whole
        assert [_comparable(event) for event in whole] == [_comparable(event) for event in uncut]

    def test_it_is_there_without_the_model_that_said_it(self, tmp_path: Path) -> None:
        with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            response = create(http)
        with LiveServer(tmp_path, model=None) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            assert retrieve(http, response) == response
            path = f"{RESPONSES}/{response['id']}?stream=true"
            assert _parse_events(http.get(path).text)[-1]["response"] == response
            for number in (0, 3):
                answer = http.get(f"{path}&starting_after={number}")
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")

    def test_one_that_was_put_aside_can_be_cancelled(self, tmp_path: Path) -> None:
        with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            running = create(http, background=True, min_tokens=6000)
            live.run_in_loop(lambda: live.service.turns.park())
            cancelled = http.post(f"{RESPONSES}/{running['id']}/cancel").json()
            assert cancelled["status"] == "cancelled"
            assert retrieve(http, running) == cancelled, "it does not go on"

    def test_the_next_server_goes_on_with_it_before_anybody_asks(self, tmp_path: Path) -> None:
        settings = {"input": SUM, "seed": 3, "min_tokens": 100, "max_output_tokens": 120}
        with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            uncut = http.post(RESPONSES, json=settings).json()
            running = http.post(RESPONSES, json={**settings, "background": True}).json()
            live.run_in_loop(lambda: live.service.turns.park(leave=True))
        with LiveServer(tmp_path, resume=True) as live:
            live.run_in_loop(live.service.recovered.wait)
            live.run_in_loop(lambda: live.service.turns.drain(60))
            with httpx.Client(base_url=live.url, timeout=60) as http:
                found = retrieve(http, running)
        assert found["status"] == uncut["status"]
        assert [item["content"] for item in found["output"]] == [item["content"] for item in uncut["output"]]

    def test_in_the_background_it_goes_on_by_itself_when_a_server_starts(self, tmp_path: Path) -> None:
        """Also if its model was unloaded before. A cancelled response is not resumed."""
        with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            running = create(http, background=True, min_tokens=100, max_output_tokens=120)
            cancelled = create(http, background=True, min_tokens=6000)
            live.run_in_loop(lambda: live.service.turns.park())
            http.post(f"{RESPONSES}/{cancelled['id']}/cancel")
        with LiveServer(tmp_path, resume=True) as live:
            live.run_in_loop(live.service.recovered.wait)
            live.run_in_loop(lambda: live.service.turns.drain(60))
            messages = live.service.store.messages
            found, other = (messages.get(one["id"].removeprefix("resp_")) for one in (running, cancelled))
            assert found.reply is not None
            assert found.reply.status in (ReplyStatus.DONE, ReplyStatus.LENGTH)
            assert other.reply is not None
            assert other.reply.status is ReplyStatus.INTERRUPTED

    def test_it_goes_on_when_it_is_looked_at(self, tmp_path: Path) -> None:
        with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            running = create(http, background=True, min_tokens=100, max_output_tokens=120)
            live.run_in_loop(lambda: live.service.turns.park())
            assert wait_ended(http, retrieve(http, running))["status"] in ("completed", "incomplete")


def _parse_events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [httpx.Response(200, text=line[6:]).json() for line in lines]


def _comparable(event: dict[str, Any]) -> Any:
    """The fields that are equal in two runs of the same response."""
    common = {name: value for name, value in event.items() if name in ("type", "sequence_number", "delta", "text")}
    return {**common, "usage": (event.get("response") or {}).get("usage") and True}


class TestInstructionsAlone:
    @pytest.mark.parametrize("store", [True, False])
    @pytest.mark.parametrize(
        "body",
        [
            {"instructions": "Greet the user."},
            {"instructions": "Greet the user.", "input": []},
            {"input": [{"role": "developer", "content": "Greet the user."}]},
            {"input": ""},
        ],
    )
    def test_they_are_answered(self, http: httpx.Client, body: dict[str, Any], store: bool) -> None:
        answer = http.post(RESPONSES, json={**body, "store": store, "max_output_tokens": 16})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["output_tokens"] == 16

    def test_the_conversation_goes_on(self, http: httpx.Client) -> None:
        first = http.post(RESPONSES, json={"instructions": "Greet the user.", "max_output_tokens": 16}).json()
        assert retrieve(http, first)["instructions"] == "Greet the user."
        assert get(f"{http.base_url}{RESPONSES}/{first['id']}/input_items").json()["data"] == []
        second = create(http, SUM, previous_response_id=first["id"])
        assert [role for role, _ in branch(http, second)] == ["assistant", "user", "assistant"]
        assert "42" in text(second)

    @pytest.mark.parametrize("body", [{}, {"input": []}, {"instructions": ""}])
    def test_nothing_at_all_is_refused(self, http: httpx.Client, body: dict[str, Any]) -> None:
        assert http.post(RESPONSES, json=body).json()["error"]["name"] == "no_messages"

    def test_nothing_after_a_response_is_refused(self, http: httpx.Client) -> None:
        first = create(http)
        asked = {"instructions": "Greet the user.", "previous_response_id": first["id"]}
        assert http.post(RESPONSES, json=asked).json()["error"]["name"] == "no_messages"
