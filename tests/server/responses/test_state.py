"""Responses live in conversations: what that means for other doors, for branches, restarts and clients that leave."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.store import ReplyStatus
from tests.server.asking import get
from tests.server.live import Live

RESPONSES = "/v1/responses"
SUM = "What is 12 + 30?"
NAME = "My name is Ann."
ASKS = "What is my name?"


def create(http: httpx.Client, input: Any = SUM, **fields: Any) -> dict[str, Any]:
    answer = http.post(RESPONSES, json={"input": input, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def refused(http: httpx.Client, input: Any = SUM, **fields: Any) -> tuple[int, str | None]:
    answer = http.post(RESPONSES, json={"input": input, **fields})
    error = answer.json()["error"]
    return answer.status_code, error["param"]


def retrieve(http: httpx.Client, response: dict[str, Any]) -> dict[str, Any]:
    answer = http.get(f"{RESPONSES}/{response['id']}")
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def text(response: dict[str, Any]) -> str:
    said = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in said for part in item["content"])


def conversation(response: dict[str, Any]) -> str:
    id: str = response["conversation"]["id"]
    return id


def branch(http: httpx.Client, response: dict[str, Any]) -> list[tuple[str, str]]:
    """As every other door sees it."""
    found = http.get(f"/api/messages/{response['id'].removeprefix('resp_')}/path").json()
    return [(m["role"], "".join(p["text"] for p in m["parts"] if p["type"] == "text")) for m in found]


def over(http: httpx.Client, response: dict[str, Any]) -> dict[str, Any]:
    while response["status"] in ("queued", "in_progress"):
        response = retrieve(http, response)
    return response


def system_of(http: httpx.Client, response: dict[str, Any]) -> str:
    """The system prompt that the reply was made with."""
    message = http.get(f"/api/messages/{response['id'].removeprefix('resp_')}").json()
    return str(message["reply"]["settings"]["options"].get("system", ""))


def gauge(live: Live, name: str) -> int:
    found = re.search(rf"^palaver_{name} (\d+)$", get(f"{live.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


class TestDoors:
    def test_a_conversation_is_seen_through_every_door(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        second = create(http, ASKS, previous_response_id=first["id"])
        assert branch(http, second) == [
            ("user", NAME),
            ("assistant", text(first)),
            ("user", ASKS),
            ("assistant", text(second)),
        ]
        listed = http.get("/api/conversations").json()
        assert conversation(first) in [one["id"] for one in listed]

    def test_a_reply_of_another_door_is_a_response(self, http: httpx.Client) -> None:
        talk = http.post("/api/conversations", json={"system": "You are kind."}).json()
        message = {"role": "user", "parts": [{"type": "text", "text": NAME}]}
        body = {"parent": None, "message": message, "parameters": {"temperature": 0}}
        said = http.post(f"/api/conversations/{talk['id']}/say", json=body).json()
        response = over(http, retrieve(http, {"id": f"resp_{said['reply']['id']}"}))
        assert response["status"] == "completed"
        assert text(response)
        items = http.get(f"{RESPONSES}/{response['id']}/input_items").json()["data"]
        assert items[0]["content"] == [{"type": "input_text", "text": NAME}]
        after = create(http, ASKS, previous_response_id=response["id"])
        assert "Ann" in text(after)
        assert system_of(http, after) == "You are kind.", "the conversation's own system prompt holds"

    def test_a_conversation_is_gone_on_with_where_it_was_left(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        for named in (conversation(first), {"id": conversation(first)}):
            again = create(http, ASKS, conversation=named)
            assert "Ann" in text(again)
            assert conversation(again) == conversation(first)
        assert len(branch(http, again)) == 6
        assert refused(http, conversation=conversation(first), previous_response_id=first["id"])[0] == 400
        assert refused(http, conversation="nope")[0] == 404

    def test_a_history_that_is_sent_again_stays_one_conversation(self, http: httpx.Client) -> None:
        said: list[Any] = [{"role": "user", "content": "My name is Ann and I am here twice."}]
        first = create(http, said)
        said += [{"role": "assistant", "content": text(first)}, {"role": "user", "content": ASKS}]
        second = create(http, said)
        assert conversation(second) == conversation(first)
        assert len(branch(http, second)) == 4
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        said += [*second["output"], {"role": "user", "content": SUM}]
        third = create(http, said)
        assert len(branch(http, third)) == 6
        items = http.get(f"{RESPONSES}/{third['id']}/input_items?order=asc").json()["data"]
        assert [item.get("role") for item in items if item["type"] == "message"] == [
            "user", "assistant", "user", "assistant", "user"
        ]  # fmt: skip
        http.delete(f"{RESPONSES}/{second['id']}")
        fourth = create(http, said)
        assert conversation(fourth) == conversation(first), "the branch of the first one is still there"
        assert branch(http, fourth)[:2] == branch(http, third)[:2]

    def test_an_item_is_named_by_its_id(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        items = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
        named = [{"type": "item_reference", "id": item["id"]} for item in (*items, *first["output"])]
        again = create(http, [*named, {"role": "user", "content": ASKS}], store=False)
        assert "Ann" in text(again)
        assert refused(http, [{"type": "item_reference", "id": "msg_nope_0"}]) == (400, "input[0].id")


class TestInstructions:
    def test_they_hold_for_one_response(self, http: httpx.Client) -> None:
        first = create(http, NAME, instructions="You are kind.")
        assert (first["instructions"], system_of(http, first)) == ("You are kind.", "You are kind.")
        talk = http.get(f"/api/conversations/{conversation(first)}").json()
        assert talk["system"] == "You are kind.", "the page goes on as the conversation was begun"
        second = create(http, ASKS, previous_response_id=first["id"])
        assert (second["instructions"], system_of(http, second)) == (None, "")
        third = create(http, ASKS, previous_response_id=first["id"], instructions="You are brief.")
        assert system_of(http, third) == "You are brief."

    def test_what_the_input_says_of_the_system_is_carried_over(self, http: httpx.Client) -> None:
        said = [{"role": "developer", "content": "Speak softly."}, {"role": "user", "content": NAME}]
        first = create(http, said, instructions="You are kind.")
        assert system_of(http, first) == "You are kind.\n\nSpeak softly."
        second = create(http, ASKS, previous_response_id=first["id"])
        assert system_of(http, second) == "Speak softly."


class TestDeleting:
    def test_a_conversation_goes_with_its_last_response(self, http: httpx.Client) -> None:
        first = create(http, NAME)
        second = create(http, ASKS, previous_response_id=first["id"])
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
        http.delete(f"{RESPONSES}/{create(http, ASKS, previous_response_id=first['id'])['id']}")
        turn = first["id"].removeprefix("resp_")
        assert http.delete(f"{RESPONSES}/{first['id']}").status_code == 200
        assert http.post(f"/api/conversations/{conversation(first)}/undelete").status_code == 200
        forked = http.post(f"/api/turns/{turn}/fork", json={"tokens": 3}).json()
        response = over(http, retrieve(http, {"id": f"resp_{forked['id']}"}))
        assert response["status"] == "completed"
        assert response["id"] != first["id"]
        assert http.get(f"{RESPONSES}/{first['id']}").status_code == 404


class TestLeaving:
    def test_a_client_that_leaves_stops_its_response_and_finds_what_was_said(self, http: httpx.Client) -> None:
        body = {"input": SUM, "temperature": 0, "stream": True, "min_tokens": 6000}
        with http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            next(line for line in lines if "reasoning_text.delta" in line)
        response = over(http, retrieve(http, httpx.Response(200, text=first[6:]).json()["response"]))
        assert response["status"] == "cancelled"
        assert response["output"][0]["type"] == "reasoning"
        after = create(http, SUM, previous_response_id=response["id"])
        assert "42" in text(after)

    def test_in_the_background_it_goes_on(self, http: httpx.Client) -> None:
        body = {"input": SUM, "temperature": 0, "stream": True, "background": True}
        with http.stream("POST", RESPONSES, json=body) as answer:
            first = next(line for line in answer.iter_lines() if line.startswith("data: "))
        response = over(http, retrieve(http, httpx.Response(200, text=first[6:]).json()["response"]))
        assert text(response) == "12 + 30 = 42."

    def test_what_is_not_stored_ends_with_its_client(self, live: Live, http: httpx.Client) -> None:
        body = {"input": SUM, "stream": True, "min_tokens": 6000, "store": False}
        with http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "delta" in line)
            begun = gauge(live, "replies_running")
            assert begun > 0
        while gauge(live, "replies_running") >= begun:
            pass


class TestOnce:
    def test_a_key_makes_it_happen_once(self, http: httpx.Client) -> None:
        body = {"input": NAME, "temperature": 0}
        headers = {"idempotency-key": "once"}
        first, again = (http.post(RESPONSES, json=body, headers=headers).json() for _ in range(2))
        assert first == again

    def test_a_response_that_runs_can_not_be_gone_on_with(self, http: httpx.Client) -> None:
        running = create(http, background=True, min_tokens=6000)
        assert refused(http, previous_response_id=running["id"])[0] == 409
        assert refused(http, conversation=conversation(running))[0] == 409
        half = retrieve(http, running)
        assert half["status"] in ("queued", "in_progress")
        assert half["usage"] is None
        cancelled = http.post(f"{RESPONSES}/{running['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"


class TestRefusing:
    def test_nothing_is_left_of_what_was_refused(self, http: httpx.Client) -> None:
        def titles() -> list[str]:
            return [one["title"] for one in http.get("/api/conversations?limit=1000").json()]

        long = "word " * 9000
        schema = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}
        assert http.post(RESPONSES, json={"input": long}).json()["error"]["code"] == "context_length_exceeded"
        assert refused(http, "Refused 1", temperature=9) == (400, "temperature")
        assert refused(http, "Refused 2", text=schema) == (400, "text.format")
        assert refused(http, "Refused 2", text=schema, stream=True) == (400, "text.format")
        assert not [title for title in titles() if title.startswith(("word", "Refused"))]

    def test_what_does_not_fit_is_dropped_where_that_is_wanted(self, http: httpx.Client) -> None:
        said = [{"role": "user", "content": "word " * 9000}, {"role": "user", "content": SUM}]
        said.insert(1, {"role": "assistant", "content": "Well."})
        for store in (True, False):
            assert refused(http, said, store=store)[0] == 400
            assert "42" in text(create(http, said, truncation="auto", store=store))

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("input", {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
            ("input[0].role", {"input": [{"content": "a"}]}),
            ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "a"}]}),
            ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
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
        assert refused(http, **fields) == (400, name)

    def test_what_is_empty_is_refused(self, http: httpx.Client) -> None:
        empty: list[Any] = ["", [], None, [{"role": "system", "content": "a"}]]
        for input in empty:
            assert refused(http, input)[0] == 400


class TestRestarting:
    def test_a_response_goes_on_after_the_server_did(self, tmp_path: Path) -> None:
        """Put aside with the server, in the midst of a stream: whoever comes back hears the rest and nothing twice."""
        body = {
            "input": SUM,
            "seed": 7,
            "temperature": 1.0,
            "background": True,
            "stream": True,
            "max_output_tokens": 140,
        }
        with Live(tmp_path / "uncut") as live, httpx.Client(base_url=live.url, timeout=60) as http:
            uncut = _events(http.post(RESPONSES, json={**body, "min_tokens": 100}).text)
        with Live(tmp_path / "cut") as live, httpx.Client(base_url=live.url, timeout=60) as http:
            heard: list[dict[str, Any]] = []
            ended = threading.Event()
            with http.stream("POST", RESPONSES, json={**body, "min_tokens": 100}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        heard += _events(line)
                        if len(heard) == 20:
                            live.within(lambda: live.service.turns.park())
                            ended.set()
            assert ended.is_set()
            assert heard[-1]["type"] == "error"
            assert heard[-1]["sequence_number"] == heard[-2]["sequence_number"]
            id = heard[0]["response"]["id"]
        with Live(tmp_path / "cut") as live, httpx.Client(base_url=live.url, timeout=60) as http:
            after = heard[-1]["sequence_number"]
            rest = _events(http.get(f"{RESPONSES}/{id}?stream=true&starting_after={after}").text)
            whole = _events(http.get(f"{RESPONSES}/{id}?stream=true").text)
        assert [*heard[:-1], *rest] == whole
        assert [_told(event) for event in whole] == [_told(event) for event in uncut]

    def test_it_is_there_without_the_model_that_said_it(self, tmp_path: Path) -> None:
        with Live(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            response = create(http)
        with Live(tmp_path, model=None) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            assert retrieve(http, response) == response
            path = f"{RESPONSES}/{response['id']}?stream=true"
            assert _events(http.get(path).text)[-1]["response"] == response
            for number in (0, 3):
                answer = http.get(f"{path}&starting_after={number}")
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")

    def test_one_that_was_put_aside_can_be_cancelled(self, tmp_path: Path) -> None:
        with Live(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            running = create(http, background=True, min_tokens=6000)
            live.within(lambda: live.service.turns.park())
            cancelled = http.post(f"{RESPONSES}/{running['id']}/cancel").json()
            assert cancelled["status"] == "cancelled"
            assert retrieve(http, running) == cancelled, "it does not go on"

    def test_the_next_server_goes_on_with_it_before_anybody_asks(self, tmp_path: Path) -> None:
        settings = {"input": SUM, "seed": 3, "min_tokens": 100, "max_output_tokens": 120}
        with Live(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            uncut = http.post(RESPONSES, json=settings).json()
            running = http.post(RESPONSES, json={**settings, "background": True}).json()
            live.within(lambda: live.service.turns.park(leave=True))
        with Live(tmp_path, resume=True) as live:
            live.within(live.service.recovered.wait)
            live.within(lambda: live.service.turns.finish(60))
            with httpx.Client(base_url=live.url, timeout=60) as http:
                found = retrieve(http, running)
        assert found["status"] == uncut["status"]
        assert [item["content"] for item in found["output"]] == [item["content"] for item in uncut["output"]]

    def test_in_the_background_it_goes_on_by_itself_when_a_server_starts(self, tmp_path: Path) -> None:
        """Also where it was interrupted: its model had been put aside. Others wait until they are asked for."""
        with Live(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            running = create(http, background=True, min_tokens=100, max_output_tokens=120)
            cancelled = create(http, background=True, min_tokens=6000)
            live.within(lambda: live.service.turns.park())
            http.post(f"{RESPONSES}/{cancelled['id']}/cancel")
        with Live(tmp_path, resume=True) as live:
            live.within(live.service.recovered.wait)
            live.within(lambda: live.service.turns.finish(60))
            messages = live.service.store.messages
            found, other = (messages.get(one["id"].removeprefix("resp_")) for one in (running, cancelled))
            assert found.reply is not None
            assert found.reply.status in (ReplyStatus.DONE, ReplyStatus.LENGTH)
            assert other.reply is not None
            assert other.reply.status is ReplyStatus.INTERRUPTED

    def test_it_goes_on_when_it_is_looked_at(self, tmp_path: Path) -> None:
        with Live(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            running = create(http, background=True, min_tokens=100, max_output_tokens=120)
            live.within(lambda: live.service.turns.park())
            assert over(http, retrieve(http, running))["status"] in ("completed", "incomplete")


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [httpx.Response(200, text=line[6:]).json() for line in lines]


def _told(event: dict[str, Any]) -> Any:
    """What does not differ from one response to the next."""
    about = {name: value for name, value in event.items() if name in ("type", "sequence_number", "delta", "text")}
    return {**about, "usage": (event.get("response") or {}).get("usage") and True}
