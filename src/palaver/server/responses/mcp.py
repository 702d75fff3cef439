"""Tools of servers in the Responses API: the `mcp` tool type, its output items and events, and approvals.

Palaver runs the calls (`chat/tool_loop.py`). One response goes on over all replies of the loop, until one calls no more
tools or a call needs an approval. The request with the approvals begins another response, which has the calls that it
decides about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palaver.chat.interface import CallDecision, Chat, ServerChat
from palaver.chat.parameters import LOOP
from palaver.chat.tool_loop import ANY
from palaver.errors import BadParameter, ShuttingDown
from palaver.messages import Role, describe_media
from palaver.server.openai.schemas import RequestFields
from palaver.server.responses.history import (
    ApprovalRecord,
    ResponseRecord,
    StoredResponse,
    find_response,
    last_reply,
    read_record,
    response_id,
    waits_for_approval,
)
from palaver.server.responses.schemas import FunctionTool, InputItem, McpTool, McpToolChoice, ResponseRequest
from palaver.server.state import ServerState
from palaver.store import Conflict, NotFound, StoredMessage
from palaver.store.tool_rounds import ENDED, CallState, RoundCall, RoundState, ToolRound
from palaver.tools.config import parse_server
from palaver.tools.servers import SEPARATOR, tool_name
from palaver.tools.toolbox import server_of

POLL_SECONDS = 0.5
"""How often a round is read again, beside the changes that this process knows of."""
INTERRUPTED = "The call was interrupted. It is not known whether it had an effect."
SERVER_UNKNOWN = "The tool server {name!r} was part of the request alone, and the program was started again since."
_REQUEST_PREFIX = "mcpr_"


# from the request


async def use_servers(
    chat: ServerChat, tools: Sequence[McpTool], record: ResponseRecord, before: Sequence[Mapping[str, Any]] = ()
) -> tuple[dict[str, Any], ResponseRecord]:
    """The parameters that offer the tools of these servers, and the record with them, without their secrets.

    `before` are the servers of the response whose calls are approved: they keep their names.
    """
    names = {one["server_label"]: one["name"] for one in before}
    servers: dict[str, dict[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        name = await _server_name(chat, f"tools[{index}]", tool, names.get(tool.server_label, ""))
        if name in servers:
            raise BadParameter(f"tools[{index}].server_label", tool.server_label, "is there twice")
        policy = {"allowed_tools": tool.allowed_tools, "require_approval": tool.require_approval}
        servers[name] = {key: _plain(value) for key, value in policy.items() if value is not None}
        shown.append({"type": "mcp", **_shown(tool), "name": name})
    parameters: dict[str, Any] = {"tool_servers": list(servers), "tool_policies": servers} if servers else {}
    return parameters, record.model_copy(update={"mcp": shown})


def force_calls(body: ResponseRequest, record: ResponseRecord) -> dict[str, Any]:
    """The parameter that forces a call of a server's tool, if the tool choice does."""
    labels = {one["server_label"]: one["name"] for one in record.mcp}
    match body.tool_choice:
        case McpToolChoice(server_label=label, name=tool):
            if label not in labels:
                raise BadParameter("tool_choice.server_label", label, "there is no such server among the tools")
            return {
                "must_call": [f"{labels[label]}{SEPARATOR}{ANY}" if tool is None else tool_name(labels[label], tool)]
            }
        case "required" if labels:
            functions = [one.name for one in body.tools or () if isinstance(one, FunctionTool)]
            return {"must_call": [*functions, ANY]}
        case _:
            return {}


async def _server_name(chat: ServerChat, where: str, tool: McpTool, name: str) -> str:
    if tool.server_url is None:
        for field in ("headers", "authorization"):
            if getattr(tool, field) is not None:
                raise BadParameter(
                    f"{where}.{field}", "...", "needs server_url: the operator sets those of other servers"
                )
        return tool.server_label
    headers = dict(tool.headers or {})
    if tool.authorization is not None:
        headers["Authorization"] = f"Bearer {tool.authorization}"
    config = parse_server(tool.server_label, {"url": tool.server_url, "headers": headers}, {})
    return await chat.lend_tool_server(config, name)


def _shown(tool: McpTool) -> dict[str, Any]:
    """The tool as the response repeats it: of its URL only the host, which has no secrets."""
    url = tool.server_url
    shown = None if url is None else "/".join(url.split("/", 3)[:3]).partition("?")[0].partition("#")[0]
    return {
        "server_label": tool.server_label,
        "server_url": None if shown is None else f"{shown}/<redacted>",
        "allowed_tools": _plain(tool.allowed_tools),
        "require_approval": _plain(tool.require_approval) or "always",
        "headers": None,
    }


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, RequestFields) else value


def approval_items(items: Sequence[InputItem] | str | None) -> list[InputItem]:
    return [item for item in items if item.type == "mcp_approval_response"] if isinstance(items, list) else []


async def decide_calls(
    chat: ServerChat, body: ResponseRequest, record: ResponseRecord, parameters: Callable[[], Mapping[str, Any]]
) -> StoredResponse:
    """Approves and denies the calls that the input decides about. What follows is the response that is returned."""
    decisions = _decisions(body.input)
    reply_id = next(iter(decisions))[0]
    try:
        reply, round = await chat.message(reply_id), await chat.tool_round(reply_id)
    except NotFound:
        round = None
    if round is None or {position for _, position in decisions} - {call.position for call in round.calls}:
        raise BadParameter("input", f"{_REQUEST_PREFIX}{reply_id}", "there is no such approval request")
    previous = await _previous(chat, body, reply)
    before, answers = read_record(reply), {position: one.allowed for (_, position), one in decisions.items()}
    if before.approval is not None and before.approval.answers != answers:
        raise Conflict("These approval requests were answered before, in another way.")
    if before.approval is None:
        if missing := [one.position for one in _waiting(round) if one.position not in answers]:
            why = "every approval request of the response needs an answer"
            raise BadParameter("input", f"{_REQUEST_PREFIX}{reply_id}_{missing[0]}", why)
        servers, record = await use_servers(chat, _tools(body), record, before.mcp)
        interrupted = [one.position for one in round.calls if one.state is CallState.INTERRUPTED]
        record = record.model_copy(update={"previous": previous})
        approval = ApprovalRecord(
            answers=answers, interrupted=interrupted, record=record.model_dump(exclude_defaults=True)
        )
        note = before.model_copy(update={"approval": approval, "of": reply_id}).note()
        reply = await chat.annotate_reply(reply_id, note, {**parameters(), **servers})
    await chat.decide_calls(reply_id, [one for (_, _), one in decisions.items()])
    return StoredResponse(reply, after_approval=True)


def _tools(body: ResponseRequest) -> list[McpTool]:
    return [tool for tool in body.tools or () if isinstance(tool, McpTool)]


def _waiting(round: ToolRound) -> list[RoundCall]:
    return [call for call in round.calls if call.state in (CallState.WAITING, CallState.INTERRUPTED)]


def _decisions(items: Sequence[InputItem] | str | None) -> dict[tuple[str, int], CallDecision]:
    """By reply and position. Items before the answers are the history, which is stored; after them nothing may come."""
    assert isinstance(items, list)
    found: dict[tuple[str, int], CallDecision] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type != "mcp_approval_response":
            if found:
                raise BadParameter(
                    where, item.type or item.role, "nothing may follow the approvals: send it afterwards"
                )
            continue
        if item.approve is None:
            raise BadParameter(f"{where}.approve", None, "is needed here")
        id = item.approval_request_id or ""
        reply, _, position = id.removeprefix(_REQUEST_PREFIX).partition("_")
        if not id.startswith(_REQUEST_PREFIX) or not position.isdecimal() or len(position) > 6:
            raise BadParameter(f"{where}.approval_request_id", id[:80], "there is no such approval request")
        if found and reply != next(iter(found))[0]:
            raise BadParameter(f"{where}.approval_request_id", id[:80], "is of another response than those before")
        found[reply, int(position)] = CallDecision(int(position), item.approve, reason=item.reason or "")
    return found


def approval_answers(response: StoredResponse) -> list[dict[str, Any]]:
    """The input items of a response that decided about calls."""
    approval, reply = response.record.approval, response.reply.id
    assert approval is not None
    return [
        {
            "id": f"mcpa_{reply}_{position}",
            "type": "mcp_approval_response",
            "approval_request_id": f"{_REQUEST_PREFIX}{reply}_{position}",
            "approve": approve,
        }
        for position, approve in approval.answers.items()
    ]


async def _previous(chat: Chat, body: ResponseRequest, reply: StoredMessage) -> str:
    """The response that requested the approvals. Raises BadParameter if the request names another."""
    name = body.previous_response_id
    if name is None:
        return response_id(reply.id)
    try:
        found = (await last_reply(chat, (await find_response(chat, name)).reply)).id
    except NotFound:
        found = ""
    chain = {reply.id, (await last_reply(chat, reply)).id}
    if found not in chain:
        raise BadParameter("previous_response_id", name[:80], "did not request these approvals")
    return name


# output items


@dataclass(frozen=True, slots=True)
class ItemStep:
    """A step of an output item: it is opened, has events, is done, or several of these."""

    opened: Mapping[str, Any] | None = None
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    done: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What comes after the calls of a reply: the next reply, or the end of the response."""

    next_id: str | None = None
    status: str = "completed"
    error: str | None = None


def list_steps(reply: StoredMessage, previous: StoredMessage | None) -> list[ItemStep]:
    """The tools of the servers of a reply, as it was offered them. Lists of the reply before are not repeated."""
    before = _lists(previous) if previous is not None else {}
    steps = []
    for number, (label, (tools, error)) in enumerate(_lists(reply).items()):
        if before.get(label) == (tools, error):
            continue
        empty = {"id": f"mcpl_{reply.id}_{number}", "type": "mcp_list_tools", "server_label": label, "tools": []}
        done = {**empty, "tools": tools, **({"error": error} if error else {})}
        ended = f"response.mcp_list_tools.{'failed' if error else 'completed'}"
        steps.append(ItemStep(empty, (("response.mcp_list_tools.in_progress", {}), (ended, {})), done))
    return steps


def _lists(reply: StoredMessage) -> dict[str, tuple[list[dict[str, Any]], str]]:
    """By label: the tools, and why there are none."""
    assert reply.reply is not None
    loop, labels = reply.reply.settings.options.get(LOOP), _labels(reply)
    if not loop:
        return {}
    found: dict[str, tuple[list[dict[str, Any]], str]] = {
        labels.get(name, name): ([], loop["failed"].get(name, "")) for name in loop["servers"]
    }
    for tool in reply.reply.settings.tools:
        full = loop["tools"].get(tool.name)
        if full is not None:
            described = {"name": _own_name(full), "description": tool.description, "input_schema": tool.parameters}
            found[labels.get(server_of(full), server_of(full))][0].append({**described, "annotations": None})
    return found


def _labels(reply: StoredMessage) -> dict[str, str]:
    return {one["name"]: one["server_label"] for one in read_record(reply).mcp}


def _own_name(full: str) -> str:
    return full.partition(SEPARATOR)[2] or full


def _request_id(reply: str, call: RoundCall) -> str:
    return f"{_REQUEST_PREFIX}{reply}_{call.position}"


def _call_item(reply: StoredMessage, labels: Mapping[str, str], call: RoundCall, approved: bool) -> dict[str, Any]:
    server = server_of(call.name)
    return {
        "id": f"mcp_{reply.id}_{call.position}",
        "type": "mcp_call",
        "status": "in_progress",
        "server_label": labels.get(server, server),
        "name": _own_name(call.name),
        "arguments": call.edited or call.arguments,
        "approval_request_id": _request_id(reply.id, call) if approved else None,
        "output": None,
        "error": None,
    }


def _start_step(item: Mapping[str, Any]) -> ItemStep:
    events: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("response.mcp_call.in_progress", {}),
        ("response.mcp_call_arguments.delta", {"delta": item["arguments"]}),
        ("response.mcp_call_arguments.done", {"arguments": item["arguments"]}),
    )
    return ItemStep({**item, "arguments": ""}, events)


def _end_step(item: Mapping[str, Any], result: str, is_error: bool) -> ItemStep:
    if not is_error:
        return ItemStep(None, (("response.mcp_call.completed", {}),), {**item, "status": "completed", "output": result})
    error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": result}]}
    return ItemStep(None, (("response.mcp_call.failed", {}),), {**item, "status": "failed", "error": error})


def _request_step(reply: StoredMessage, labels: Mapping[str, str], call: RoundCall) -> ItemStep:
    item = _call_item(reply, labels, call, False)
    value = {"id": _request_id(reply.id, call), "type": "mcp_approval_request"}
    value |= {name: item[name] for name in ("server_label", "name", "arguments")}
    return ItemStep(value, (), value)


# the calls of a reply


class StillRunning(Exception):
    """The response goes on, and the reader does not wait."""

    def __init__(self, is_queued: bool = False) -> None:
        super().__init__()
        self.is_queued = is_queued


class RoundReader:
    """Reads the round of a reply; with `wait`, until it is as expected."""

    def __init__(self, state: ServerState, chat: ServerChat, owner: str, wait: bool = True) -> None:
        self._state = state
        self._chat = chat
        self._owner = owner
        self._wait = wait

    async def get(self, reply_id: str) -> ToolRound | None:
        return await self._chat.tool_round(reply_id)

    async def until(self, reply_id: str, is_ready: Callable[[ToolRound], bool]) -> ToolRound:
        """Raises StillRunning if it is not to wait, and ShuttingDown if the server does."""
        async with self._chat.changes() as changes:
            change = asyncio.ensure_future(anext(changes))
            try:
                while True:
                    round = await self._chat.tool_round(reply_id)
                    assert round is not None
                    if is_ready(round) or round.state in (RoundState.STOPPED, RoundState.FAILED):
                        return round
                    if not self._wait:
                        raise StillRunning
                    if self._state.closing.is_set():
                        raise ShuttingDown
                    await asyncio.wait({change}, timeout=POLL_SECONDS)
                    if change.done():
                        change = asyncio.ensure_future(anext(changes))
            finally:
                change.cancel()

    def unknown_server(self, round: ToolRound) -> str | None:
        """A server of calls that can't go on, since the request that named it came to an earlier process."""
        waiting = [call for call in round.calls if call.state in (CallState.NEW, CallState.APPROVED)]
        toolbox = self._state.service.loop.toolbox
        names = [server_of(call.name) for call in waiting if SEPARATOR in call.name]
        return next((name for name in names if not toolbox.has(self._owner, name)), None)


async def follow_round(
    rounds: RoundReader, reply: StoredMessage, after_approval: bool = False
) -> AsyncGenerator[ItemStep | RoundOutcome]:
    """The items of the calls of a reply, one call after the other, and at last the outcome.

    A response has the calls that needed no approval, and the requests for others. `after_approval` has those others.
    """
    labels, approval = _labels(reply), read_record(reply).approval
    answered = approval.answers if approval is not None else {}
    round = await rounds.until(reply.id, lambda one: all(call.state is not CallState.NEW for call in one.calls))
    if (unknown := rounds.unknown_server(round)) is not None and round.state is RoundState.OPEN:
        name = labels.get(unknown, unknown)
        yield RoundOutcome(status="failed", error=SERVER_UNKNOWN.format(name=name))
        return
    requests: list[RoundCall] = []
    for call in round.calls:
        requested_before = call.position in answered
        if after_approval and not requested_before:
            continue
        item = _call_item(reply, labels, call, requested_before)
        if requested_before and not after_approval:
            if approval is not None and call.position in approval.interrupted:
                item["approval_request_id"] = None
                for step in (_start_step(item), _end_step(item, INTERRUPTED, True)):
                    yield step
            requests.append(call)
            continue
        if call.state is CallState.WAITING:
            requests.append(call)
            continue
        yield _start_step(item)
        round = await rounds.until(reply.id, lambda one, at=call.position: _is_settled(one, at))  # type: ignore[misc]
        ended = next(one for one in round.calls if one.position == call.position)
        if ended.state in ENDED:
            lines = [ended.result or "", *map(describe_media, ended.media)]
            yield _end_step(item, "\n".join(line for line in lines if line), ended.is_error)
        else:
            yield _end_step(item, INTERRUPTED, True)
            requests.append(ended)
    for call in requests:
        yield _request_step(reply, labels, call)
    if requests:
        yield RoundOutcome(status="cancelled" if round.state is RoundState.STOPPED else "completed")
        return
    round = await rounds.until(reply.id, lambda one: one.state is RoundState.DONE or waits_for_approval(one))
    status = {RoundState.STOPPED: "cancelled", RoundState.FAILED: "failed"}.get(round.state, "completed")
    yield RoundOutcome(round.next_id, status, round.error)


def _is_settled(round: ToolRound, position: int) -> bool:
    call = next(one for one in round.calls if one.position == position)
    return call.state in (*ENDED, CallState.INTERRUPTED, CallState.WAITING)


async def reply_before(chat: Chat, reply: StoredMessage) -> StoredMessage | None:
    """The last reply before this one on its branch."""
    path = await chat.path(reply.parent_id) if reply.parent_id is not None else ()
    return next((one for one in reversed(path) if one.role is Role.ASSISTANT and one.reply is not None), None)
