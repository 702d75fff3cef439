"""Tools of the type mcp by the official SDK: real servers, approvals, streams, and whose tools they are."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from palaver.address_guard import AddressGuard
from palaver.chat.service import Service
from palaver.server.responses import mcp
from palaver.tools.toolbox import OperatorServers, Toolbox
from tests.chat.tool_service import ANSWER, open_tools, question
from tests.client.live import served
from tests.server.live_server import LiveServer
from tests.tools.demo_server import demo_config, serve_demo

QUESTION = "What time is it, and what is 17 * 23?"
DEMO: Any = {"type": "mcp", "server_label": "demo"}
BAD: Any = {"type": "mcp", "server_label": "bad"}
SECRET = "a-secret-that-is-stored-nowhere"
LOOPBACK = AddressGuard(lambda host, port: [ipaddress.ip_address("127.0.0.1")], lambda address: True)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Sprout, with the demo server over stdio."""
    folder = tmp_path_factory.mktemp("mcp")
    toolbox = Toolbox(OperatorServers((demo_config(folder),)), folder / "tools", guard=LOOPBACK)
    with LiveServer(folder, toolbox=toolbox) as server:
        yield server


@pytest.fixture
def client(tools: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output if item.type != "reasoning"]


def answers(response: Any, approve: bool = True, **fields: Any) -> list[Any]:
    requests = [item for item in response.output if item.type == "mcp_approval_request"]
    return [
        {"type": "mcp_approval_response", "approval_request_id": item.id, "approve": approve, **fields}
        for item in requests
    ]


def test_sprout_calls_two_tools_in_one_turn_with_one_request_of_approvals(client: openai.OpenAI) -> None:
    asked: Any = {"model": "sprout", "tools": [DEMO], "temperature": 0, "stream": True}
    events = list(client.responses.create(input=QUESTION, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first: Any = events[-1].response
    assert first.status == "completed"
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request", "mcp_approval_request"]
    assert [tool.name for tool in first.output[0].tools][:2] == ["clock", "calculate"]
    assert [item.name for item in first.output[-2:]] == ["clock", "calculate"]
    again = list(client.responses.create(input=answers(first), previous_response_id=first.id, **asked))
    assert [event.sequence_number for event in again] == list(range(len(again)))
    call = [event.type for event in again if "mcp" in event.type]
    assert call == 2 * [
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
    ]
    second: Any = again[-1].response
    assert kinds(second) == ["mcp_call", "mcp_call", "message"]
    assert second.output[1].output == "391"
    assert second.output[0].output in second.output_text
    assert "391" in second.output_text
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(second.id) == second
    rest = list(client.responses.retrieve(second.id, stream=True, starting_after=4))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in again[5:]]
    asked_for = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in asked_for] == 2 * ["mcp_approval_response"]
    repeated = client.responses.create(input=answers(first), model="sprout", tools=[DEMO])
    assert repeated.id == second.id  # nothing ran again
    with pytest.raises(openai.ConflictError):
        client.responses.create(input=answers(first, approve=False), model="sprout", tools=[DEMO])
    thanks = client.responses.create(input="Thank you!", previous_response_id=second.id, model="sprout")
    items = client.conversations.items.list(thanks.conversation.id if thanks.conversation else "", order="asc")
    assert [item.type for item in items if item.type != "reasoning"] == [
        "message", *2 * ["function_call"], *2 * ["function_call_output"], *3 * ["message"],
    ]  # fmt: skip


def test_without_parallel_calls_one_approval_is_requested(client: openai.OpenAI) -> None:
    asked: Any = {"model": "sprout", "tools": [DEMO], "temperature": 0, "parallel_tool_calls": False}
    first = client.responses.create(input=QUESTION, **asked)
    assert not first.parallel_tool_calls
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    second = client.responses.create(input=answers(first), previous_response_id=first.id, **asked)
    assert kinds(second)[0] == "mcp_call"
    assert kinds(second).count("mcp_approval_request") <= 1


def test_a_server_of_the_request_alone(client: openai.OpenAI, tools: LiveServer, tmp_path: Path) -> None:
    with serve_demo(tmp_path) as url:
        server = {"server_url": f"{url}?key={SECRET}", "authorization": SECRET, "headers": {"X-A": SECRET}}
        tool: Any = {"type": "mcp", "server_label": "web", "require_approval": "never", **server}
        response = client.responses.create(model="sprout", input=QUESTION, tools=[tool], temperature=0)
        assert kinds(response) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
        assert [item.server_label for item in response.output if item.type == "mcp_call"] == ["web", "web"]
        assert "391" in response.output_text
        assert response.tools[0].to_dict()["server_url"] == f"{url.removesuffix('/mcp')}/<redacted>"
        limited: Any = {
            **tool,
            "allowed_tools": ["clock"],
            "require_approval": {"never": {"tool_names": ["calculate"]}},
        }
        shown = client.responses.create(model="sprout", input="What time is it?", tools=[limited], temperature=0)
        assert [tool.name for tool in shown.output[0].tools] == ["clock"]  # type: ignore[union-attr]
        assert kinds(shown)[1:] == ["mcp_approval_request"]
    assert SECRET.encode() not in b"".join(one.read_bytes() for one in tools.service.store.folder.glob("*.db*"))
    assert "web" not in httpx.get(f"{tools.url}/api/tools").text


class Recorder(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.seen.append((self.headers["Authorization"], self.headers["X-A"]))  # type: ignore[attr-defined]
        self.send_error(401)

    def log_message(self, *args: object) -> None:
        pass


def test_headers_go_to_the_server_alone_and_a_failed_list_is_an_item(client: openai.OpenAI) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as site:
        site.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        url = f"http://tools.example:{site.server_port}/mcp"
        tool: Any = {**DEMO, "server_label": "locked", "server_url": url, "headers": {"X-A": "1"}, "authorization": "t"}
        events = list(client.responses.create(model="sprout", input="Hello!", tools=[tool], stream=True))
        site.shutdown()
        thread.join()
    assert site.seen[0] == ("Bearer t", "1")  # type: ignore[attr-defined]
    assert [event.type for event in events if "mcp" in event.type][-1] == "response.mcp_list_tools.failed"
    last: Any = events[-1].response  # type: ignore[union-attr]
    assert last.output[0].error
    assert kinds(last) == ["mcp_list_tools", "message"]


def test_resources_are_read_over_http(tools: LiveServer) -> None:
    with httpx.Client(base_url=f"{tools.url}/api/tools", timeout=60) as http:
        listed = http.get("/resources?server=demo").json()
        assert [(one["kind"], one["name"]) for one in listed] == [("resource", "notes://all"), ("prompt", "summarize")]
        asked = {"server": "demo", "name": "summarize", "arguments": {"text": "Hello"}}
        assert http.post("/resources/read", json=asked).text == "Summarize this in one sentence: Hello"


def test_a_private_address_is_refused(client: openai.OpenAI, tools: LiveServer) -> None:
    toolbox = tools.service.loop.toolbox
    toolbox.guard = AddressGuard()
    try:
        tool: Any = {**DEMO, "server_label": "inside", "server_url": f"{tools.url}/mcp"}
        response = client.responses.create(model="sprout", input="Hello!", tools=[tool])
    finally:
        toolbox.guard = LOOPBACK
    assert "not public" in response.output[0].error  # type: ignore[union-attr, operator]


@dataclass(frozen=True)
class Calling:
    """A model that calls what the message says, with the server that misbehaves."""

    service: Service
    url: str
    client: openai.AsyncOpenAI

    async def ask(self, *rounds: list[Any], **fields: Any) -> Any:
        asked = {"input": question(*rounds).text, "tools": [BAD], "model": "calling", **fields}
        return await self.client.responses.create(**asked)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calling(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Calling]:
    async with (
        open_tools(tmp_path_factory.mktemp("calling")) as service,
        served(service) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield Calling(service, url, client)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_is_denied_with_a_reason_and_a_history_is_sent_back(calling: Calling) -> None:
    first = await calling.ask(["bad__unchanged"], ["bad__unchanged"])
    with pytest.raises(openai.BadRequestError, match="nothing may follow"):
        await calling.ask(input=[*answers(first), {"role": "user", "content": "And now?"}])
    other = await calling.ask(["bad__unchanged"])
    with pytest.raises(openai.BadRequestError, match="did not request"):
        await calling.ask(input=answers(first), previous_response_id=other.id)
    sent = [{"role": "user", "content": question(["bad__unchanged"], ["bad__unchanged"]).text}]
    sent += [item.to_dict() for item in first.output]
    second = await calling.ask(input=[*sent, *answers(first, approve=False, reason="Not today.")])
    assert kinds(second) == ["mcp_call", "mcp_approval_request"]
    assert second.output[0].status == "failed"
    assert second.output[0].error.content[0]["text"] == "The user did not allow this call. Not today."
    third = await calling.ask(input=answers(second), previous_response_id=second.id)
    assert kinds(third) == ["mcp_call", "message"]
    assert (third.output[0].output, third.output_text) == ("as always", ANSWER)
    sent += [item.to_dict() for one in (second, third) for item in one.output]
    fourth = await calling.ask(input=[*sent, {"role": "user", "content": question().text}])
    assert fourth.conversation.id == first.conversation.id  # the branch was found by its messages


@pytest.mark.asyncio(loop_scope="module")
async def test_some_calls_run_others_wait_and_functions_are_the_clients(calling: Calling) -> None:
    function: Any = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
    only = {**BAD, "require_approval": {"never": {"tool_names": ["unchanged"]}}}
    first = await calling.ask(["bad__unchanged", "bad__injection", "mine"], tools=[only, function])
    assert kinds(first) == ["mcp_list_tools", "function_call", "mcp_call", "mcp_approval_request"]
    wrong = [{**answers(first)[0], "approval_request_id": "mcpr_nothing_0"}]
    with pytest.raises(openai.BadRequestError, match="no such approval request"):
        await calling.ask(input=wrong)
    second = await calling.ask(input=answers(first), tools=[only, function])
    assert kinds(second) == ["mcp_call"]
    done = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "mine"}
    third = await calling.ask(input=[done], previous_response_id=second.id, tools=[only, function])
    assert third.output_text == ANSWER
    retrieved = await calling.client.responses.retrieve(first.id)
    assert retrieved.output == first.output


@pytest.mark.asyncio(loop_scope="module")
async def test_a_response_is_cancelled_while_a_tool_runs(calling: Calling) -> None:
    never = {**BAD, "require_approval": "never"}
    queued = await calling.ask(["bad__slow"], tools=[never], background=True)
    kinds_seen: list[str] = []
    async for event in await calling.client.responses.retrieve(queued.id, stream=True):
        kinds_seen.append(event.type)
        if event.type == "response.mcp_call_arguments.done":
            running = await calling.client.responses.retrieve(queued.id)
            assert running.status == "in_progress"
            assert running.output[-1].type == "mcp_call"
            with pytest.raises(openai.ConflictError):
                await calling.ask(input="[]", previous_response_id=queued.id)
            cancelled = await calling.client.responses.cancel(queued.id)
            assert cancelled.status == "cancelled"
    assert kinds_seen[-4:] == [
        "response.output_item.done", "response.output_item.added", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert mcp.INTERRUPTED in cancelled.to_json()
    await calling.client.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        await calling.client.responses.retrieve(queued.id)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_other_user_and_no_other_origin_decides(calling: Calling) -> None:
    store = calling.service.store
    key = store.keys.add(store.users.ensure("stranger").id)[1]
    first = await calling.ask(["bad__unchanged"])
    async with openai.AsyncOpenAI(base_url=f"{calling.url}/v1", api_key=key, max_retries=0) as stranger:
        with pytest.raises(openai.BadRequestError, match="no such approval request"):
            await stranger.responses.create(input=answers(first), model="calling")
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.cancel(first.id)
    async with httpx.AsyncClient(base_url=calling.url, trust_env=False) as http:
        body = {"input": answers(first), "model": "calling", "tools": [BAD]}
        foreign = await http.post("/v1/responses", json=body, headers={"Origin": "https://evil.example"})
        assert foreign.status_code == 403
    with pytest.raises(openai.BadRequestError, match="need store"):
        await calling.ask(["bad__unchanged"], store=False)
    with pytest.raises(openai.BadRequestError, match="no tool server 'nothing'"):
        await calling.ask(["bad__unchanged"], tools=[{**BAD, "server_label": "nothing"}])
    again = await calling.client.responses.retrieve(first.id)
    assert again == first


def test_the_tool_choice_of_tools_of_servers(client: openai.OpenAI) -> None:
    def create(choice: Any, **fields: Any) -> Any:
        tools: Any = [{**DEMO, "require_approval": "always"}]
        return client.responses.create(model="sprout", input="Hello!", tools=tools, tool_choice=choice, **fields)

    none = create("none")
    assert kinds(none) == ["mcp_list_tools", "message"]
    assert none.tool_choice == "none"
    assert kinds(create("required"))[:2] == ["mcp_list_tools", "mcp_approval_request"]
    for choice in ({"name": "clock"}, {}):
        value = create({"type": "mcp", "server_label": "demo", **choice})
        requests = [item for item in value.output if item.type == "mcp_approval_request"]
        assert [item.server_label for item in requests][:1] == ["demo"]
        assert not choice or {item.name for item in requests} == {"clock"}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        create({"type": "mcp", "server_label": "demo", "name": "nothing"})
    with pytest.raises(openai.BadRequestError, match="no such server"):
        create({"type": "mcp", "server_label": "other"})
