"""Turns: replies that run independently of the connection that requested them.

Every token is committed before its events are sent, and so is the end of the reply. A turn is identified by the id of
its reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

from palaver.chat.interface import ConversationChange
from palaver.chat.model import Model
from palaver.chat.reply_stream import GeneratedReply, ReplyRequest, TurnTimer, first_generated
from palaver.chat.turn_log import TokenRecorder, TurnLog, outlast
from palaver.errors import EngineError, PalaverError, ShuttingDown
from palaver.events import Event, Failed, Finished, ReadEvent, ReplyBatch, Started, fold
from palaver.generation import Finish, Prompt, Step, prefill_steps
from palaver.messages import Part, ToolCall
from palaver.phases import Phase
from palaver.store import (
    Disconnected,
    Lease,
    LeaseLost,
    ReplyEnding,
    ReplySettings,
    ReplyStatus,
    Store,
    StoredMessage,
    StoreError,
    TokenCountMismatch,
)
from palaver.store.leases import LEASE_SECONDS
from palaver.store.replies import TurnCommand

MAX_ENDED_TURNS = 64
"""Ended turns whose events stay in memory, for subscribers that reconnect soon."""
PARK_SECONDS = 10.0
"""The time that a parked turn has to stop before it is cancelled."""
MAX_ENDING_WRITES = 8
"""How often the ending of a reply is written while the database restarts, before it is left for later."""
PARKED = "The model was unloaded. The reply can be continued."
LEFT = "The server is shutting down. The reply continues when it is back."
LOST = "Another process has taken over this reply."
NOT_BEGUN = "The reply was stored but could not be started. It can be continued."
_STATUS = {
    Finish.END: ReplyStatus.DONE,
    Finish.STOP_STRING: ReplyStatus.DONE,
    Finish.LENGTH: ReplyStatus.LENGTH,
    Finish.STOPPED: ReplyStatus.STOPPED,
}
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A reply to start: its place in the tree, its request and its settings."""

    conversation_id: str
    parent_id: str | None
    request: ReplyRequest
    settings: ReplySettings
    initial_steps: tuple[Step, ...] = ()
    """The tokens that the reply starts with."""
    key: str | None = None
    expected_head: str | None = None
    prompt: Prompt | None = None
    """The rendered request, if it is rendered already."""


class NewStream(NamedTuple):
    """The stream of a turn, and a function that sets the reply's id: it is known only once the reply is stored."""

    stream: GeneratedReply
    set_reply_id: Callable[[str], None]


@dataclass(eq=False)
class Turn:
    """A reply that runs, or has ended recently."""

    reply: StoredMessage
    owner: str
    reply_stream: GeneratedReply
    timer: TurnTimer
    log: TurnLog = field(default_factory=TurnLog)
    parked: bool = False
    left_open: bool = False
    """Whether it stays running in the store, for the next process to resume."""
    lease_lost: bool = False
    """Whether another process has taken it over: this process must not write any more of it."""
    error: PalaverError | None = None
    """The error that ended it, if it is one of Palaver's."""
    task: asyncio.Task[None] | None = None
    has_calls: bool = False
    """Whether it ended with calls that Palaver runs, and this is stored."""
    is_ending: bool = False
    """Whether its ending is being written, or was."""
    ended_at: datetime | None = None
    """When it ended, as it is stored."""
    synced: asyncio.Task[None] | None = None
    """Waits until it survives the death of the database server that the reply goes on. No token is stored before."""

    @property
    def id(self) -> str:
        return self.reply.id


class SharedLock:
    """Is held by many at once, or by one exclusively; in the order in which they ask for it."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()
        self._shares = 0
        self._free = asyncio.Event()
        self._free.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._gate:
            self._shares += 1
            self._free.clear()
        try:
            yield
        finally:
            self._shares -= 1
            if not self._shares:
                self._free.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._gate:
            await self._free.wait()
            yield


class Turns:
    """The turns of this process. Entering opens a lease; leaving parks the running turns and closes the lease."""

    def __init__(self, store: Store, changes: ChangeFeed) -> None:
        self._store = store
        self._changes = changes
        self._turns: dict[str, Turn] = {}
        self._pending_endings: dict[str, ReplyEnding] = {}
        """Endings that could not be written yet, by reply id."""
        self._recovering: set[str] = set()
        """Replies of dead processes that this one has claimed and not started yet."""
        self._start_lock = SharedLock()
        """Shared while a reply is stored and not yet in `_turns`; exclusive while replies change hands."""
        self._key_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By conversation and idempotency key: of two requests with one key, the second finds the turn of the first."""
        self._lease_lock = asyncio.Lock()
        self._starts: set[asyncio.Task[Any]] = set()
        self._started = asyncio.Event()
        self.closing = False
        """Whether new turns are refused."""
        self._leave = False
        """Whether turns are left for the next process."""
        self.on_event: Callable[[Turn, Event], None] | None = None
        """A callback for every event of every turn, for metrics."""
        self.calls_of: Callable[[ReplySettings, Sequence[Part]], tuple[ToolCall, ...]] | None = None
        """The calls of a complete reply that Palaver runs."""
        self.on_calls: Callable[[str], None] | None = None
        """A callback for a reply that ended with such calls."""
        self.on_end: Callable[[Turn], None] | None = None
        """A callback for every turn that ended."""
        self._lease: Lease
        self._recorder: TokenRecorder
        self._renewing: asyncio.Task[None]

    async def __aenter__(self) -> Turns:
        self._lease = await asyncio.to_thread(self._store.leases.open)
        self._recorder = TokenRecorder(self._store, self._lease, lambda: len(self.running))
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closing = True
        await asyncio.gather(*self._starts, return_exceptions=True)
        await self.park(self._leave)
        self._renewing.cancel()
        with suppress(asyncio.CancelledError):
            await self._renewing
        await asyncio.to_thread(self._recorder.close)
        await self._write_endings()
        try:
            await asyncio.to_thread(self._lease.close)
        except Exception as failure:  # the next process detects it by its file or its expiry
            _log.warning("the lease could not be closed: %s", failure)

    @property
    def lease(self) -> Lease:
        return self._lease

    def get(self, reply_id: str) -> Turn | None:
        return self._turns.get(reply_id)

    async def find(self, reply: StoredMessage) -> Turn | None:
        """The turn of this reply. Not one that ended here and that another process has continued since."""
        turn = self._turns.get(reply.id)
        if turn is None or turn.ended_at is None or turn.ended_at == _ended_at(reply):
            return turn
        latest = await asyncio.to_thread(self._store.messages.get, reply.id)  # it may have ended since it was read
        turn = self._turns.get(reply.id)
        if turn is None or turn.ended_at is None or turn.ended_at == _ended_at(latest):
            return turn
        del self._turns[reply.id]
        return None

    async def wait_ended(self, reply_id: str) -> None:
        """Waits for a turn that has ended in the store but not here yet, as while the disk is synced: another process
        may have continued the reply already."""
        turn = self._turns.get(reply_id)
        if turn is None or turn.task is None or turn.log.ended or not turn.is_ending:
            return
        with suppress(StoreError):
            if await asyncio.to_thread(self._store.replies.holder, reply_id) != self._lease.id:
                await asyncio.wait({turn.task})

    def has_pending_ending(self, reply_id: str) -> bool:
        """Whether the ending of the reply has not been written for certain."""
        return reply_id in self._pending_endings

    @property
    def running(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self._turns.values() if not turn.log.ended)

    async def wait_running(self) -> None:
        """Returns at once if a turn runs, otherwise when the next one starts."""
        while not self.running:
            self._started.clear()
            await self._started.wait()

    async def start(self, model: Model, new_turn: NewTurn) -> StoredMessage:
        """Starts a reply. With a key that was used before, returns the reply of the first request.

        If the caller is cancelled, a reply that is stored still runs.
        """
        self.check_open()
        stream, set_reply_id = await asyncio.to_thread(
            self.stream_reply,
            model,
            new_turn.request,
            new_turn.initial_steps,
            new_turn.prompt,
        )
        if not new_turn.initial_steps:  # the text that the request starts the reply with
            new_turn = replace(new_turn, initial_steps=prefill_steps(stream.prompt.reply_ids))
        return await self._shielded(self._start(new_turn, stream, set_reply_id))

    async def _start(
        self, new_turn: NewTurn, stream: GeneratedReply, set_reply_id: Callable[[str], None]
    ) -> StoredMessage:
        async with self._key_lock(new_turn), self._start_lock.shared():
            self.check_open()
            reply, is_new = await self._under_lease(lambda lease: self._store_reply(lease, new_turn))
            if is_new:
                set_reply_id(reply.id)
                self._launch(reply, new_turn.request.owner, stream, _timer(reply, stream))
        return reply

    async def resume(self, model: Model, reply: StoredMessage, new: NewStream, key: str | None = None) -> StoredMessage:
        """Continues the same reply after its tokens. Raises Conflict if it can't: see `Replies.resume`."""
        self.check_open()
        return await self._shielded(self._resume(reply, new, key, model.engine.info.fingerprint))

    async def _resume(self, reply: StoredMessage, new: NewStream, key: str | None, fingerprint: str) -> StoredMessage:
        assert reply.reply is not None
        stream, set_reply_id = new
        async with self._start_lock.shared():
            self.check_open()
            await self._write_ending(reply.id)
            read = reply, stream.token_count
            resumed = await self._under_lease(
                lambda lease: self._store.replies.resume(lease, reply.id, key, fingerprint, read)
            )
            set_reply_id(reply.id)
            previous = self._turns.get(reply.id)
            if previous is not None and previous.reply_stream.answer_requested:
                stream.answer_now()
            turn = self._launch(resumed, stream.request.owner, stream, _timer(reply, stream))
            synced = turn.synced = asyncio.create_task(asyncio.to_thread(self._store.replies.sync))
        await synced
        return resumed

    async def take_over(self, model: Model, reply: StoredMessage, request: ReplyRequest, steps: Sequence[Step]) -> None:
        """Resumes a reply of a dead process that this one has claimed."""
        stream, set_reply_id = await asyncio.to_thread(self.stream_reply, model, request, steps)
        set_reply_id(reply.id)
        fingerprint = model.engine.info.fingerprint
        reply = await asyncio.to_thread(self._store.replies.record_engine, self._lease, reply.id, fingerprint)
        self._launch(reply, request.owner, stream, _timer(reply, stream))
        self._recovering.discard(reply.id)
        with suppress(Disconnected):  # commands are looked for again
            await self.run_commands()

    async def run_commands(self) -> None:
        """Runs the commands that other processes stored for turns of this one."""
        for command in await asyncio.to_thread(self._store.replies.commands, self._lease):
            self.run_command(command)

    def run_command(self, command: TurnCommand) -> None:
        """Does nothing if the turn does not run here."""
        turn = self._turns.get(command.reply_id)
        if turn is None or turn.log.ended:
            return
        if command.answer and not turn.reply_stream.answer_requested:
            turn.reply_stream.answer_now()
        if command.stop:
            turn.reply_stream.stop()

    async def interrupt_orphans(self) -> tuple[str, ...]:
        """The running replies of dead processes, which are now marked interrupted."""
        async with self._start_lock.exclusive():
            return await asyncio.to_thread(self._store.replies.interrupt_orphans, self._lease)

    async def list_orphans(self) -> Mapping[str, str]:
        """The running replies of dead processes: the name of the model by the reply's id."""
        return await asyncio.to_thread(self._store.replies.list_orphans, self._lease)

    async def claim_orphans(self, ids: Collection[str]) -> tuple[str, ...]:
        """Those of the replies that are still of dead processes, which are now claimed by this one."""
        async with self._start_lock.exclusive():
            self._recovering.update(ids)
            claimed: tuple[str, ...] = ()
            try:
                claimed = await self._under_lease(lambda lease: self._store.replies.claim_orphans(lease, ids))
            except Disconnected:  # the commit may not have been confirmed
                held = await outlast(self._store.replies.running_ids, self._lease)
                claimed = tuple(id for id in ids if id in held and id not in self._turns)
            finally:
                self._recovering.difference_update(set(ids) - set(claimed))
            return claimed

    async def interrupt_abandoned(self, reply_id: str) -> bool:
        """Marks a reply of a dead process as interrupted. Returns False if its process lives."""
        if reply_id not in await self.claim_orphans([reply_id]):
            return False
        await self.end_recovering(reply_id, ReplyEnding(ReplyStatus.INTERRUPTED, None))
        return True

    async def end_recovering(self, reply_id: str, ending: ReplyEnding) -> None:
        """Ends a reply that this process has claimed and can't resume."""
        self._pending_endings[reply_id] = ending
        self._recovering.discard(reply_id)
        await self.write_pending_endings()

    async def drain(self, seconds: float) -> None:
        """Refuses new turns and waits for the running ones, up to that time."""
        self.closing = True
        if tasks := [turn.task for turn in self.running if turn.task is not None]:
            await asyncio.wait(tasks, timeout=seconds)

    def check_open(self) -> None:
        """Raises ShuttingDown if new turns are refused."""
        if self.closing:
            raise ShuttingDown

    async def park(self, leave: bool = False) -> None:
        """Stops the running turns so that they can be continued: the model is unloaded, or the program ends.

        `leave`: no ending is written, as if this process had died, and the next process resumes them. That also holds
        for turns that were being started meanwhile, which are parked when this process ends.
        """
        self._leave = self._leave or leave
        running = self.running
        for turn in running:
            turn.parked, turn.left_open = True, leave
            turn.error = ShuttingDown() if self.closing else turn.error
            turn.reply_stream.stop()
        tasks = [turn.task for turn in running if turn.task is not None]
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=PARK_SECONDS)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def write_pending_endings(self) -> None:
        """Writes the endings that could not be written before, and ends claimed replies that have no turn.

        Endings that fail again are retried later.
        """
        async with self._start_lock.exclusive():
            try:
                claimed = await asyncio.to_thread(self._store.replies.running_ids, self._lease)
            except Exception as error:
                _log.warning("the replies of this process could not be read: %s", error)
                claimed = ()
            for id in claimed:
                if id not in self._turns and id not in self._recovering:
                    self._pending_endings.setdefault(id, ReplyEnding(ReplyStatus.FAILED, None, error=NOT_BEGUN))
            await self._write_endings()

    async def _write_endings(self) -> None:
        for id in list(self._pending_endings):
            try:
                await self._write_ending(id)
            except Exception as error:
                _log.warning("the end of a reply could not be written: %s", error)

    async def _write_ending(self, id: str) -> None:
        ending = self._pending_endings.get(id)
        if ending is None:
            return
        end = self._store.replies.end
        with suppress(LeaseLost):  # the process that has taken the reply over writes its ending
            try:
                await asyncio.to_thread(end, self._lease, id, ending)
            except TokenCountMismatch:  # the database has lost its last tokens: they are generated again
                await asyncio.to_thread(end, self._lease, id, ReplyEnding(ReplyStatus.INTERRUPTED, None))
        if self._pending_endings.get(id) is ending:
            del self._pending_endings[id]
        if (turn := self._turns.get(id)) is not None and turn.log.ended:
            del self._turns[id]  # its log ends with the failed write: from now on the store is read

    async def write_under_lease(self, write: Callable[[Lease], T]) -> T:
        """Writes under the lease of this process, or under a new one if it was lost."""

        async def under_lease() -> T:
            async with self._start_lock.shared():
                return await self._under_lease(write)

        return await self._shielded(under_lease())

    async def _shielded(self, work: Coroutine[None, None, T]) -> T:
        """Runs to its end even if the caller is cancelled: a reply that is stored also runs."""
        task = asyncio.create_task(work)
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)
        return await asyncio.shield(task)

    async def _under_lease(self, write: Callable[[Lease], T]) -> T:
        """Writes under the lease of this process, or under a new one if it was lost. Call with the lock shared."""
        lease = self._lease
        try:
            return await asyncio.to_thread(write, lease)
        except LeaseLost:
            await self._replace_lease(lease)
            return await asyncio.to_thread(write, self._lease)

    async def _replace_lease(self, lost: Lease) -> None:
        """Another process has taken over the replies of this one: their turns end here, new turns get a new lease."""
        async with self._lease_lock:
            if self._lease is not lost:
                return
            running = self.running
            _log.warning("the lease ran out and was taken over: %d replies go on elsewhere", len(running))
            self._lease = self._recorder.lease = await asyncio.to_thread(self._store.leases.open)
            lost.release()
            for turn in running:
                turn.lease_lost = True
                turn.reply_stream.stop()

    def _key_lock(self, new_turn: NewTurn) -> asyncio.Lock:
        if new_turn.key is None:
            return asyncio.Lock()
        return self._key_locks.setdefault((new_turn.conversation_id, new_turn.key), asyncio.Lock())

    def stream_reply(
        self,
        model: Model,
        request: ReplyRequest,
        initial_steps: Sequence[Step],
        prompt: Prompt | None = None,
    ) -> NewStream:
        """The stream of a turn. Renders its prompt: call in a thread."""
        reply_id: list[str] = []

        async def record_steps(steps: Sequence[Step], phases: Sequence[Phase]) -> None:
            turn = self._turns[reply_id[0]]
            timer = turn.timer
            for phase in phases:
                timer.token(phase is Phase.THINKING)
            if turn.synced is not None:
                await asyncio.shield(turn.synced)
                turn.synced = None
            await self._recorder.record(reply_id[0], stream.token_count, steps, timer.timings(), stream.steps)

        async def record_answer_at(position: int) -> None:
            await outlast(self._store.replies.record_answer_at, self._lease, reply_id[0], position)

        ids = tuple(step.token_id for step in initial_steps)
        earlier = initial_steps[first_generated(initial_steps) :]
        stream = model.stream_reply(request, ids, None, record_steps, prompt=prompt, earlier=earlier)
        stream.record_answer_at = record_answer_at

        def set_reply_id(id: str) -> None:
            reply_id.append(id)
            stream.prompt = replace(stream.prompt, turn=id)

        return NewStream(stream, set_reply_id)

    def _store_reply(self, lease: Lease, new_turn: NewTurn) -> tuple[StoredMessage, bool]:
        """The reply, and whether to run it: a reply that was found by its key runs already or has ended."""
        reply = self._store.replies.start(
            lease,
            new_turn.conversation_id,
            new_turn.parent_id,
            new_turn.settings,
            prefix=new_turn.initial_steps,
            key=new_turn.key,
            expected_head=new_turn.expected_head,
        )
        if new_turn.key is None:
            return reply, True
        is_running = (
            reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING and reply.id not in self._turns
        )
        return reply, is_running and reply.id in self._store.replies.running_ids(lease)

    def _launch(self, reply: StoredMessage, owner: str, stream: GeneratedReply, timer: TurnTimer) -> Turn:
        if reply.reply is not None:
            stream.notice = engine_notice(reply.reply.settings, stream.token_count)
        turn = Turn(reply, owner, stream, timer)
        self._turns.pop(reply.id, None)
        self._turns[reply.id] = turn
        self._started.set()
        turn.task = asyncio.create_task(self._run(turn))
        self._publish(turn, "turn")
        return turn

    async def _run(self, turn: Turn) -> None:
        """Runs a turn. The log always gets an ending: subscribers wait for it."""
        ending: Finished | Failed = Failed(LEFT)
        last = ReplyBatch(())
        try:
            ending, last = await self._generate(turn)
            if not (isinstance(ending, Failed) and ending.error in (LOST, LEFT)):
                ending = await self._finish(turn, ending)
        except asyncio.CancelledError as error:
            if turn.parked and not turn.left_open:  # it did not stop in time
                ending = Failed(PARKED)
            elif not _is_cancelled():
                ending = Failed(_internal(error))
            else:
                raise
            self._pending_endings[turn.id] = ReplyEnding(ReplyStatus.INTERRUPTED, None, error=ending.error)
        finally:
            turn.log.add(replace(last, events=(ending,)))
            self._emit(turn, ending)
            if isinstance(ending, Failed) and ending.error == LOST and self._turns.get(turn.id) is turn:
                del self._turns[turn.id]  # from now on the store is read
            self._publish(turn, "ended")
            self._evict_ended()
            if turn.has_calls and self.on_calls is not None:
                self.on_calls(turn.id)
            if self.on_end is not None:
                self.on_end(turn)

    async def _generate(self, turn: Turn) -> tuple[Finished | Failed, ReplyBatch]:
        """Generates the reply and appends its batches to the log. Returns its ending, with the last batch."""
        stream = turn.reply_stream
        try:
            async with stream:
                async for batch in stream.batches():
                    if isinstance(first := batch.events[0], Finished):
                        return _ending(turn, first), batch
                    if isinstance(first, Started):
                        turn.timer.prefilled()
                    turn.log.add(batch)
                    for event in batch.events:
                        self._emit(turn, event)
            raise EngineError("The engine ended the reply without a result.")
        except LeaseLost:
            return Failed(LOST), ReplyBatch(())
        except PalaverError as error:
            turn.error = error
            return _failed(stream, str(error))
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            return _failed(stream, _internal(error))  # a task that the turn awaited was cancelled
        except Exception as error:
            return _failed(stream, _internal(error))

    async def _finish(self, turn: Turn, ending: Finished | Failed) -> Finished | Failed:
        """Writes the ending. If that fails it is written later; the tokens are committed already."""
        turn.is_ending = True
        try:
            stored = self._with_calls(turn, _reply_ending(turn, ending))
        except Exception as error:  # the text can't be folded: only the tokens are stored
            ending = Failed(_internal(error))
            stored = ReplyEnding(ReplyStatus.FAILED, None, error=ending.error)
        try:
            ended_at = await self._store_ending(turn, stored)
        except LeaseLost:
            return Failed(LOST)
        except Exception as error:
            self._pending_endings[turn.id] = stored
            return Failed(str(error) if isinstance(error, PalaverError) else _internal(error), ending.tail)
        turn.has_calls, turn.ended_at = bool(stored.tool_calls), ended_at
        return ending

    async def _store_ending(self, turn: Turn, ending: ReplyEnding) -> datetime | None:
        """Writes the ending once the database answers, and returns when that was. If the database has lost tokens of
        the reply, they are stored first."""
        stream = turn.reply_stream
        for _ in range(MAX_ENDING_WRITES):
            try:
                return await asyncio.to_thread(self._store.replies.end, self._lease, turn.id, ending)
            except TokenCountMismatch:
                await self._recorder.record(turn.id, stream.token_count, (), turn.timer.timings(), stream.steps)
            except Disconnected:
                reply = await outlast(self._store.messages.get, turn.id)
                if reply.reply is not None and reply.reply.status is ending.status:  # the commit was not confirmed
                    return reply.reply.ended_at
        return await asyncio.to_thread(self._store.replies.end, self._lease, turn.id, ending)

    def _with_calls(self, turn: Turn, ending: ReplyEnding) -> ReplyEnding:
        if self.calls_of is None or ending.status is not ReplyStatus.DONE or turn.reply.reply is None:
            return ending
        parts = tuple(part for part in ending.parts or () if isinstance(part, ToolCall))
        return replace(ending, tool_calls=self.calls_of(turn.reply.reply.settings, parts))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                lease = self._lease
                if not await asyncio.to_thread(lease.renew):
                    async with self._start_lock.exclusive():
                        await self._replace_lease(lease)
                await self.write_pending_endings()
            except Exception as error:  # a full disk or a locked database: retried later
                _log.warning("the lease could not be renewed: %s", error)

    def _emit(self, turn: Turn, event: Event) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(turn, event)
        except Exception:  # an error in the metrics must not end a reply
            _log.exception("an event was not counted")

    def _publish(self, turn: Turn, what: str) -> None:
        self._changes.publish(turn.owner, ConversationChange(turn.reply.conversation_id, what, turn.id))

    def _evict_ended(self) -> None:
        ended = [
            id
            for id, turn in self._turns.items()
            if turn.log.ended and not turn.left_open and id not in self._pending_endings
        ]
        for id in ended[: max(0, len(ended) - MAX_ENDED_TURNS)]:
            del self._turns[id]


def engine_notice(settings: ReplySettings, tokens: int) -> str:
    """The notice for a reply that another engine continues after that many tokens; empty if it is the same engine."""
    if len(settings.fingerprints) < 2:
        return ""
    (_, before), (start, now) = settings.fingerprints[-2:]
    if start != tokens:
        return ""
    return (
        f"The first {tokens:,} tokens were computed by {before}, which is not loaded. {now} continues the reply; "
        "its rounding may differ."
    )


def _timer(reply: StoredMessage, stream: GeneratedReply) -> TurnTimer:
    """The timer of a reply that may have tokens. Without stored timings it is not known how long those took."""
    before = reply.reply.timings if reply.reply is not None else {}
    return TurnTimer(before, is_complete=bool(before) or not stream.token_count)


def _ended_at(reply: StoredMessage) -> datetime | None:
    return None if reply.reply is None else reply.reply.ended_at


def _ending(turn: Turn, event: Finished) -> Finished | Failed:
    """The ending of a stopped turn: `Failed` if it was parked or its lease was lost, not stopped by a user."""
    if event.finish is not Finish.STOPPED or not (turn.lease_lost or turn.parked):
        return event
    if turn.lease_lost:
        return Failed(LOST)
    return Failed(LEFT if turn.left_open else PARKED, event.tail)


def _is_cancelled() -> bool:
    """Whether this task was cancelled, and not only a task that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(stream: GeneratedReply, error: str) -> tuple[Failed, ReplyBatch]:
    """The ending with the text that the reader held back; without it if the reader failed."""
    try:
        tail = stream.close()
    except Exception:
        _log.exception("the end of a reply could not be read")
        tail = ReplyBatch(())
    return Failed(error, cast("tuple[ReadEvent, ...]", tail.events)), tail


def _internal(error: BaseException) -> str:
    _log.error("a turn failed", exc_info=error)
    return f"An internal error ended the reply ({type(error).__name__}): the log has the details. It can be continued."


def _reply_ending(turn: Turn, ending: Finished | Failed) -> ReplyEnding:
    return ReplyEnding(
        _status(turn, ending),
        fold([*turn.log.events(), ending]).message.parts,
        turn.reply_stream.usage,
        turn.timer.timings(),
        ending.error if isinstance(ending, Failed) else None,
        turn.reply_stream.token_count,
    )


def _status(turn: Turn, ending: Finished | Failed) -> ReplyStatus:
    if isinstance(ending, Finished):
        return _STATUS[ending.finish]
    return ReplyStatus.INTERRUPTED if turn.parked else ReplyStatus.FAILED


MAX_QUEUED = 1000
"""Changes that wait for one subscriber. If there are more, they are replaced by one change of kind "missed"."""


class ChangeFeed:
    def __init__(self) -> None:
        self._subscribers: dict[asyncio.Queue[ConversationChange], str] = {}
        self.forward: Callable[[str, ConversationChange], None] | None = None
        """Sends a change to the other processes."""

    def publish(self, owner: str, change: ConversationChange) -> None:
        """Shows a change to the user's clients, in all processes."""
        self.deliver(owner, change)
        if self.forward is not None:
            self.forward(owner, change)

    def deliver(self, owner: str, change: ConversationChange) -> None:
        """Shows a change to the clients of this process."""
        for queue, subscriber in self._subscribers.items():
            if subscriber == owner and queue.qsize() >= MAX_QUEUED:
                _replace_all(queue, _MISSED)
            elif subscriber == owner:
                queue.put_nowait(change)

    def deliver_missed(self) -> None:
        """Tells all clients of this process that changes were lost."""
        for queue in self._subscribers:
            _replace_all(queue, _MISSED)

    @asynccontextmanager
    async def subscribe(self, owner: str) -> AsyncIterator[AsyncIterator[ConversationChange]]:
        """The changes that are published for this user from now on."""
        queue: asyncio.Queue[ConversationChange] = asyncio.Queue()
        self._subscribers[queue] = owner
        try:
            yield _drain(queue)
        finally:
            del self._subscribers[queue]


_MISSED = ConversationChange("", "missed")


def _replace_all(queue: asyncio.Queue[ConversationChange], change: ConversationChange) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(change)


async def _drain(queue: asyncio.Queue[ConversationChange]) -> AsyncIterator[ConversationChange]:
    while True:
        yield await queue.get()
