"""The loop of tool calls: a reply ends with calls, they are approved and run, and the next reply reads their results.

The loop belongs to the server, as turns do. Its state is in the store (`store/tool_rounds.py`); `advance` does whatever
comes next and may be called at any time, by any process: after a decision, after a result, after a crash.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from asyncio import to_thread
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from palaver.chat.attachments import AttachmentReader
from palaver.chat.interface import CallDecision, ConversationChange, Remember
from palaver.chat.parameters import LOOP, OFFER
from palaver.chat.turn_log import OUTAGE_SECONDS
from palaver.chat.turns import NewTurn
from palaver.errors import BadParameter, PalaverError, ShuttingDown
from palaver.media import BadMedia
from palaver.messages import MediaPart, Part, Role, Text, ToolCall, tool
from palaver.store import (
    Blob,
    Disconnected,
    DiskFull,
    Lease,
    Locked,
    NotFound,
    ReplySettings,
    StorageDisconnected,
    StoredMessage,
    StoreError,
)
from palaver.store.encoding import load_media, store_media
from palaver.store.tool_rounds import ENDED, CallState, RoundCall, RoundState, ToolRound
from palaver.store.tool_rules import Rule
from palaver.tools.servers import SEPARATOR, ServerTool, ToolFile, ToolOutcome
from palaver.tools.toolbox import Toolbox, ToolPolicy, parse_policy, server_of

if TYPE_CHECKING:
    from palaver.chat.service import Service

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
"""The first pause between attempts to record what a call does. Each is twice as long as the one before."""
MAX_RETRY_SECONDS = 30.0
PASSING_ERRORS = (DiskFull, Locked, Disconnected, StorageDisconnected)
"""Failures of the store that pass by themselves."""
DENIED = "The user did not allow this call."
FORBIDDEN = "This tool is not allowed in this conversation."
SKIPPED = "The call was interrupted. It is not known whether it had an effect."
NO_POLICY = ToolPolicy()
MAX_NOTICES = 10
"""Notices of a server that a reply carries."""
ANY = "*"
"""In `must_call`: any tool of the servers, or after the name of a server and the separator, any of its tools."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_SUCH_TOOL = "There is no tool {name!r}."
BAD_ARGUMENTS = "The arguments are not a JSON object."
EDITED = "[The user changed the arguments to {arguments}]\n{result}"


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """What a loop may use before it waits for the user to continue it."""

    rounds: int = 16
    seconds: float = 900.0
    """Of replies and calls, without the time that calls waited for approval."""
    tokens: int = 65_536


def server_calls(settings: ReplySettings, parts: Sequence[Part]) -> tuple[ToolCall, ...]:
    """The calls of a reply that Palaver runs, with the full names of their tools.

    If the client offered no tools itself, these are all calls, also of tools that do not exist.
    """
    names = settings.options.get(LOOP, {}).get("tools", {})
    return tuple(
        replace(part, name=names.get(part.name, part.name))
        for part in parts
        if isinstance(part, ToolCall) and runs_here(settings, part.name)
    )


def runs_here(settings: ReplySettings, name: str) -> bool:
    """Whether Palaver runs the calls of a reply to the tool of this name, as the model wrote it."""
    loop = settings.options.get(LOOP)
    if not loop:
        return False
    only_servers = all(one.name in loop["tools"] for one in settings.tools)
    return only_servers or name in loop["tools"] or server_of(name) in loop["servers"]


class ToolLoop:
    def __init__(self, service: Service, toolbox: Toolbox, limits: LoopLimits | None = None) -> None:
        self._service = service
        self._rounds = service.store.tool_rounds
        self._rules = service.store.tool_rules
        self.toolbox = toolbox
        self._limits = limits or LoopLimits()
        self._calls: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._returned: set[tuple[str, int]] = set()
        """The calls whose tools have returned, and whose results are being recorded."""
        self._failing: dict[str, asyncio.Task[None]] = {}
        """The rounds that have failed, by reply, until that is recorded. They do not go on meanwhile."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing = False

    # what front-ends do

    async def decide(self, owner: str, reply_id: str, decisions: Sequence[CallDecision]) -> ToolRound:
        """Approves or denies calls that wait, and goes on. Calls that were decided before stay as they are."""
        round = await self._get(reply_id)
        for decision in decisions:
            call = next((one for one in round.calls if one.position == decision.position), None)
            if call is None:
                raise BadParameter("position", decision.position, "there is no such call")
            if decision.arguments is not None:
                _parse_arguments(decision.arguments, "arguments")
        if round.state in (RoundState.STOPPED, RoundState.FAILED) and decisions:
            await self._reopen(reply_id)
        for decision in decisions:
            call = next(one for one in round.calls if one.position == decision.position)
            await self._decide(owner, round, call, decision)
        self._publish(owner, round)
        await self.advance(reply_id)
        return await self._get(reply_id)

    async def stop(self, owner: str, reply_id: str) -> bool:
        """Stops the round of a reply. Its servers are told to cancel the calls that run. If that can't be stored, they
        go on: no call is left as running that does not run."""
        stopped = await to_thread(self._rounds.stop, reply_id)
        self.cancel_calls(reply_id)
        if stopped:
            self._publish(owner, await self._get(reply_id))
        return stopped

    def cancel_calls(self, reply_id: str) -> None:
        """Cancels the calls of a reply that run in this process. Results that are known are still recorded."""
        for task in [task for key, task in self._calls.items() if key[0] == reply_id and key not in self._returned]:
            if not task.cancelling():  # a second time would cut the message that tells the server
                task.cancel()

    async def resume(self, owner: str, reply_id: str) -> ToolRound | None:
        """Continues a round that was stopped, failed, or was left by another process. None if there is none to."""
        round = await to_thread(self._rounds.get, reply_id)
        if round is None or round.state is RoundState.DONE:
            return None
        await self._reopen(reply_id)
        self._publish(owner, round)
        await self.advance(reply_id)
        return await self._get(reply_id)

    async def _reopen(self, reply_id: str) -> None:
        """Continues a round, also one whose failure is not recorded yet."""
        await to_thread(self._rounds.reopen, reply_id)
        if failing := self._failing.pop(reply_id, None):
            failing.cancel()

    # what happens by itself

    def reply_ended(self, reply_id: str) -> None:
        """Goes on after a reply that ended with calls."""
        self._spawn(self.advance(reply_id))

    async def recover(self, resume: bool) -> None:
        """Marks calls of dead processes as interrupted. `resume`: also goes on with what needs no decision."""
        for reply_id in await to_thread(self._rounds.interrupt_orphans):
            with suppress(NotFound):  # in a deleted conversation
                reply = await to_thread(self._service.store.messages.get, reply_id)
                self._publish(await self._owner(reply), await self._get(reply_id))
        for reply_id in await to_thread(self._rounds.list_actionable) if resume else ():
            reply = await to_thread(self._service.store.messages.get, reply_id)
            assert reply.reply is not None
            owner, loop = await self._owner(reply), reply.reply.settings.options.get(LOOP, {})
            if all(self.toolbox.has(owner, name) for name in loop.get("servers", ())):  # else it is of another program
                await self.advance(reply_id)

    async def advance(self, reply_id: str) -> None:
        """Does what comes next in the round of a reply: applies rules, runs approved calls, starts the next reply."""
        lock = self._locks.setdefault(reply_id, asyncio.Lock())
        async with lock:
            try:
                await self._advance(reply_id)
            except ShuttingDown:
                pass  # the round stays open: the next process goes on
            except Exception as error:
                self._fail(reply_id, error)
                if failing := self._failing.get(reply_id):  # in an outage, the caller does not wait for its end
                    await asyncio.wait([failing], timeout=RETRY_SECONDS)

    def _fail(self, reply_id: str, error: BaseException) -> None:
        """Fails a round as soon as the store can be written. It does not go on meanwhile: it would fail again."""
        if not isinstance(error, PalaverError):
            _log.error("a loop of tool calls failed", exc_info=error)
        if reply_id in self._failing or self._closing:
            return

        def end(task: asyncio.Task[None]) -> None:
            if self._failing.get(reply_id) is task:
                del self._failing[reply_id]

        text = str(error) or type(error).__name__
        task = self._create_task(self._retry(lambda: self._record_failure(reply_id, text), StoreError))
        self._failing[reply_id] = task
        task.add_done_callback(end)

    async def _record_failure(self, reply_id: str, error: str) -> None:
        await to_thread(self._rounds.fail, reply_id, error)
        reply = await to_thread(self._service.store.messages.get, reply_id)
        self._publish(await self._owner(reply), await self._get(reply_id))

    async def close(self) -> None:
        """Ends the calls that run: they are interrupted, and the next process asks about them."""
        self._closing = True
        for task in (*self._calls.values(), *self._tasks):
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._calls.values(), *self._tasks, return_exceptions=True)
        await self.toolbox.close()

    async def _advance(self, reply_id: str) -> None:
        before = await to_thread(self._rounds.get, reply_id)
        if before is None or before.state is not RoundState.OPEN or self._closing or reply_id in self._failing:
            return
        reply = await to_thread(self._service.store.messages.get, reply_id)
        owner = await self._owner(reply)
        for call in before.calls:
            if call.state is CallState.NEW:
                await self._apply_rules(owner, reply, call)
        round = await self._get(reply_id)
        if reply_id in self._failing:  # a call failed meanwhile
            return
        for call in round.calls:
            if call.state is CallState.APPROVED and (reply_id, call.position) not in self._calls:
                self._start(owner, round, call)
        if all(call.state in ENDED for call in round.calls):
            await self._use_results(owner, reply, round)
            round = await self._get(reply_id)
        if round != before:
            self._publish(owner, round)

    async def _apply_rules(self, owner: str, reply: StoredMessage, call: RoundCall) -> None:
        assert reply.reply is not None
        loop = reply.reply.settings.options[LOOP]
        if call.name not in loop["tools"].values():
            answer = NO_SUCH_TOOL.format(name=call.name)
            await to_thread(self._rounds.apply_rule, reply.id, call.position, False, answer)
            return
        rule = await to_thread(self._rules.get, owner, reply.conversation_id, call.name, server_of(call.name))
        approval = loop.get("approvals", {}).get(call.name)
        if rule is not Rule.NEVER and approval is not None:
            rule = Rule.ALWAYS if approval == "never" else None
        if rule is None:
            await to_thread(self._rounds.await_decision, reply.id, call.position)
        else:
            await to_thread(self._rounds.apply_rule, reply.id, call.position, rule is Rule.ALWAYS, FORBIDDEN)

    async def _decide(self, owner: str, round: ToolRound, call: RoundCall, decision: CallDecision) -> None:
        edited = decision.arguments
        if edited is not None and _same_json(edited, call.arguments):
            edited = None
        answer = SKIPPED if call.state is CallState.INTERRUPTED else DENIED
        if decision.reason:
            answer = f"{answer} {decision.reason}"
        decided = await to_thread(self._rounds.decide, round.reply_id, call.position, decision.allowed, edited, answer)
        if not decided or decision.remember is Remember.ONCE:
            return
        rule = Rule.ALWAYS if decision.allowed else Rule.NEVER
        for_tool = decision.remember is Remember.TOOL
        place = round.conversation_id if for_tool else ""
        name = call.name if for_tool else server_of(call.name)
        await to_thread(self._rules.save, owner, place, name, rule)

    def _start(self, owner: str, round: ToolRound, call: RoundCall) -> None:
        """Runs a call in a task, and goes on once it has ended, also where it is cancelled before its first step. The
        round fails if the store refuses what the call does: it would be started again at once."""

        def end(task: asyncio.Task[None]) -> None:
            del self._calls[round.reply_id, call.position]
            error = None if task.cancelled() else task.exception()
            if error is None:
                self._spawn(self.advance(round.reply_id))
            else:
                self._fail(round.reply_id, error)

        task = asyncio.create_task(self._run(owner, round, call))
        self._calls[round.reply_id, call.position] = task
        task.add_done_callback(end)

    async def _run(self, owner: str, round: ToolRound, call: RoundCall) -> None:
        """Runs one call: recorded as running before, with its result after."""
        key = (round.reply_id, call.position)
        lease = await self._begin(*key)
        if lease is None:
            return
        self._publish(owner, round)
        try:
            outcome = await self._call_tool(owner, call)
            self._returned.add(key)
            await self._record_outcome(lease, round, call, outcome)
            self._publish(owner, round)
        except asyncio.CancelledError:
            if self._closing:
                await to_thread(self._rounds.interrupt, lease, *key)
            raise
        except Exception:
            _log.exception("the result of a tool call was not recorded")
            await self._retry(lambda: asyncio.shield(to_thread(self._rounds.interrupt, lease, *key)), StoreError)
            self._publish(owner, round)
        finally:
            self._returned.discard(key)

    async def _begin(self, reply_id: str, position: int) -> Lease | None:
        """Records that a call runs. Returns the lease under which it does; None if it must not run.

        While the store fails, a commit may be made but not confirmed, and the lease may be replaced.
        """
        tried: list[str] = []

        def begin(lease: Lease) -> Lease | None:
            before = tuple(tried)
            tried.append(lease.id)
            return lease if self._rounds.begin(lease, reply_id, position, before) else None

        write = partial(self._service.turns.write_under_lease, begin)
        return await self._retry(write, limit=OUTAGE_SECONDS)

    async def _record(self, write: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
        return await self._retry(lambda: asyncio.shield(to_thread(write, *values, **named)))

    async def _retry(
        self,
        write: Callable[[], Awaitable[T]],
        errors: type[StoreError] | tuple[type[StoreError], ...] = PASSING_ERRORS,
        limit: float = math.inf,
    ) -> T:
        """Writes what a call does, and tries again while the disk is full, the database is locked, or it or the storage
        of media does not answer: a result must not be lost, and a call that can't be recorded must not run.

        `errors`: those after which it tries again. `limit`: the seconds after which it raises them.
        """
        begun, waits, pause = time.monotonic(), False, RETRY_SECONDS
        while True:
            try:
                written = await write()
            except errors as error:
                if time.monotonic() - begun > limit:
                    raise
                if not waits:
                    _log.warning("a tool call waits for the store: %s", error)
                waits = True
            else:
                if waits:
                    _log.warning("the store can be written again: a tool call goes on")
                return written
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def _call_tool(self, owner: str, call: RoundCall) -> ToolOutcome:
        try:
            arguments = _parse_arguments(call.edited or call.arguments or "{}", "arguments")
        except BadParameter:
            return ToolOutcome(BAD_ARGUMENTS, True)
        try:
            return await self.toolbox.call(owner, call.name, arguments)
        except PalaverError as error:
            return ToolOutcome(str(error), True)

    async def _record_outcome(self, lease: Lease, round: ToolRound, call: RoundCall, outcome: ToolOutcome) -> None:
        """Records what a tool returned: its text with that of its documents, and its media, which are stored before."""
        texts, media = await to_thread(self._read_files, outcome.files)
        stored = await self._record(store_media, media, self._service.store.blobs)
        text = "\n".join(one for one in (outcome.text, *texts) if one)
        if call.edited is not None:
            text = EDITED.format(arguments=call.edited, result=text)
        blobs = tuple(one for one in stored if isinstance(one, Blob))
        key = (round.reply_id, call.position)
        await self._record(self._rounds.record_result, lease, *key, text, outcome.is_error, blobs)

    def _read_files(self, files: Sequence[ToolFile]) -> tuple[list[str], list[Part]]:
        """Checks the files of a result: the texts of documents, and the media. A file that is neither is named in a
        text."""
        texts: list[str] = []
        media: list[Part] = []
        for file in files:
            try:
                part = AttachmentReader(self._service.media).read(file.data, name=file.name)
            except BadMedia as error:
                texts.append(f"[{error}]")
                continue
            if isinstance(part, MediaPart):
                media.append(part)
            elif isinstance(part, Text):
                texts.append(part.text.strip())
        return texts, media

    async def _use_results(self, owner: str, reply: StoredMessage, round: ToolRound) -> None:
        """Stores the results as messages, once, and starts the next reply, once."""
        store = self._service.store
        parent = reply.id
        calls = [part for part in reply.parts if isinstance(part, ToolCall)]
        names = {part.id: part.name for part in calls}
        for call in round.calls:
            media = await to_thread(load_media, call.media, store.blobs)
            message = tool(call.call_id, call.result or "", names.get(call.call_id, call.name), media)
            key = f"{reply.id} result {call.position}"
            stored = await to_thread(store.messages.append, reply.conversation_id, parent, message, key=key)
            parent = stored.id
            self._service.changes.publish(owner, ConversationChange(reply.conversation_id, "message", parent))
        if len(calls) > len(round.calls):  # the client runs the others, and goes on after their results
            await to_thread(self._rounds.close, reply.id, None)
            return
        await self._check_limits(reply)
        following = await self._start_next(owner, reply, parent)
        await to_thread(self._rounds.close, reply.id, following.id)

    async def _start_next(self, owner: str, reply: StoredMessage, parent: str) -> StoredMessage:
        assert reply.reply is not None
        service, loop = self._service, reply.reply.settings.options[LOOP]
        model = await service.models.for_reply(reply.reply.settings.model)
        conversation = await to_thread(service.store.conversations.get, reply.conversation_id, owner)
        own = [one for one in reply.reply.settings.tools if one.name not in loop["tools"]]
        given = {**loop["parameters"], "tool_servers": loop["servers"], "tools": own}
        parameters = await self.offer_tools(owner, conversation.parameters, given)
        path = await to_thread(service.store.messages.path, parent)
        prepared = await to_thread(service.requests.build, model, conversation, path, (), parameters)
        new_turn = NewTurn(
            conversation.id,
            parent,
            prepared.request,
            prepared.settings,
            key=f"{reply.id} next",
            prompt=prepared.prompt,
        )
        return await service.turns.start(model, new_turn)

    async def offer_tools(
        self, owner: str, defaults: Mapping[str, Any], parameters: Mapping[str, Any], connect: bool = True
    ) -> Mapping[str, Any]:
        """The parameters of a turn with the tools of its servers, if it names any. `connect`: whether to connect to
        servers that are not connected."""
        merged = {**defaults, **parameters}
        if not merged.get("tool_servers"):
            return parameters
        own = list(merged.get("tools") or ())
        listed, failed = await self.toolbox.tools(owner, merged["tool_servers"], connect)
        policies = {name: parse_policy(one) for name, one in (merged.get("tool_policies") or {}).items()}
        offered = [one for one in listed if policies.get(one.server, NO_POLICY).allows(one)]
        approvals = {one.name: policies[one.server].approval(one) for one in offered if one.server in policies}
        names = _short_names(offered, {_client_tool_name(one) for one in own})
        tools = [*own, *(replace(one.to_tool(), name=short) for short, one in names.items())]
        full_names = {short: one.name for short, one in names.items()}
        cards = self.toolbox.cards(owner, merged["tool_servers"])
        notices = {card.name: list(card.notices[:MAX_NOTICES]) for card in cards if card.notices}
        offer = {"tools": full_names, "approvals": approvals, "failed": failed, "notices": notices}
        forced = _forced_tools(merged.get("must_call"), names)
        return {**parameters, **forced, "tools": tools, OFFER: offer}

    async def _check_limits(self, reply: StoredMessage) -> None:
        """Raises LoopLimitReached if the loop has used what it may since the user's message or continuation."""
        path = await to_thread(self._service.store.messages.path, reply.id)
        rounds, seconds, tokens = 0, 0.0, 0
        for stored in reversed(path):
            if stored.role is Role.USER:
                break
            if stored.reply is None:
                continue
            round = await to_thread(self._rounds.get, stored.id)
            if round is not None and round.continued and stored.id == reply.id:
                return
            if round is not None and round.continued:
                break
            rounds += 1
            seconds += stored.reply.timings.get("seconds", 0.0)
            tokens += stored.reply.usage.reply_tokens if stored.reply.usage is not None else 0
            seconds += sum(map(_seconds, round.calls)) if round is not None else 0.0
        if rounds >= self._limits.rounds:
            raise LoopLimitReached(f"{rounds} rounds of tool calls")
        if seconds >= self._limits.seconds:
            raise LoopLimitReached(f"{seconds:.0f} s of replies and tool calls")
        if tokens >= self._limits.tokens:
            raise LoopLimitReached(f"{tokens:,} tokens")

    async def _owner(self, reply: StoredMessage) -> str:
        store = self._service.store
        return (await to_thread(store.conversations.get, reply.conversation_id, None, True)).owner_id

    async def _get(self, reply_id: str) -> ToolRound:
        round = await to_thread(self._rounds.get, reply_id)
        if round is None:
            raise BadParameter("id", reply_id, "this reply has no tool calls that run here")
        return round

    def _publish(self, owner: str, round: ToolRound) -> None:
        self._service.changes.publish(owner, ConversationChange(round.conversation_id, "tools", round.reply_id))

    def _spawn(self, work: Any) -> None:
        if self._closing:
            work.close()
            return
        self._create_task(work)

    def _create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class LoopLimitReached(PalaverError):
    def __init__(self, what: str) -> None:
        super().__init__(f"The loop stopped after {what}: continue it if it should go on.")


def _short_names(tools: Sequence[ServerTool], taken: Collection[str]) -> dict[str, ServerTool]:
    """The tools by the name that the model uses: the server's own name where it is plain and unique, which small models
    copy best; else the full one."""
    own_names = Counter(one.tool for one in tools)
    return {
        one.tool if own_names[one.tool] == 1 and one.tool not in taken and _PLAIN.fullmatch(one.tool) else one.name: one
        for one in tools
    }


def _forced_tools(must_call: Any, names: Mapping[str, ServerTool]) -> dict[str, Any]:
    """The parameter `must_call` by the names that the model uses, where it has full names or ANY."""
    if not isinstance(must_call, list | tuple):
        return {}
    found: list[str] = []
    for name in must_call:
        servers_tools = [
            short
            for short, one in names.items()
            if name in (ANY, one.name, short) or name == f"{one.server}{SEPARATOR}{ANY}"
        ]
        found += servers_tools or [name]
    return {"must_call": list(dict.fromkeys(found))}


def _client_tool_name(tool: Any) -> str:
    if isinstance(tool, Mapping):
        return str(tool.get("function", tool).get("name", ""))
    return str(getattr(tool, "name", ""))


def _parse_arguments(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadParameter(name, text[:200], "must be a JSON object")
    return value


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def _seconds(call: RoundCall) -> float:
    if call.started_at is None or call.ended_at is None:
        return 0.0
    return (call.ended_at - call.started_at).total_seconds()
