"""Turns: replies that run for the system, not for whoever asked; begun, stopped, gone on with, put aside.

Every token is committed before it is told, and so is the end. A turn is named by the id of its reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from palaver.chat.change_feed import ChangeFeed
from palaver.chat.interface import ConversationChange
from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest, ReplyStream, TurnTimer
from palaver.chat.turn_log import TokenRecorder, TurnLog
from palaver.errors import EngineError, PalaverError, ShuttingDown
from palaver.events import Event, Failed, Finished, ReadEvent, Started
from palaver.generation import Finish, Prompt, Step
from palaver.messages import Message
from palaver.phases import Phase
from palaver.store import Lease, LeaseLost, ReplyEnding, ReplySettings, ReplyStatus, Store, StoredMessage
from palaver.store.leases import SECONDS
from palaver.store.token_codec import given_tokens

REMEMBERED = 64
"""Turns whose events stay in memory after their end, for readers that come back soon."""
PARK_SECONDS = 10.0
"""How long a turn that was told to stop may take before it is cancelled."""
PARKED = "The model was put aside: the reply can be continued."
LEFT = "The server ended: the reply goes on when it is back."
LOST = "Another process has taken over this reply."
NOT_BEGUN = "The reply was stored but could not be started: it can be continued."
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
    """A reply to be begun: where it hangs, and all that decides it."""

    conversation_id: str
    parent_id: str | None
    request: ReplyRequest
    settings: ReplySettings
    goes_on_from: tuple[Step, ...] = ()
    key: str | None = None
    expected_head: str | None = None
    begun: Message | None = None
    """Its first words, where only their text is known."""
    prompt: Prompt | None = None
    """All of it, where it is rendered already."""


@dataclass(eq=False)
class Turn:
    """A reply that runs, or ran not long ago."""

    reply: StoredMessage
    owner: str
    utterance: ReplyStream
    clock: TurnTimer
    log: TurnLog = field(default_factory=TurnLog)
    parked: bool = False
    left: bool = False
    """Whether it stays open in the store, for the next process to go on with."""
    lost: bool = False
    """Whether another process has taken it over, so that nothing of it may be written here."""
    error: PalaverError | None = None
    """Why it failed, where that is known."""
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.reply.id


class Turns:
    """The turns of this process. Enter it to hold a lease, leave it to put aside what still runs."""

    def __init__(self, store: Store, changes: ChangeFeed) -> None:
        self._store = store
        self._changes = changes
        self._turns: dict[str, Turn] = {}
        self._unsettled: dict[str, ReplyEnding] = {}
        """Endings that could not be written when they came."""
        self._recovering: set[str] = set()
        """Replies of dead processes that this one holds and has not started yet."""
        self._beginning = asyncio.Lock()
        """Held while a reply is stored but not among the turns yet, and while the lease changes."""
        self._starts: set[asyncio.Task[StoredMessage]] = set()
        self.closing = False
        """Whether nothing new is begun any more."""
        self.heard: Callable[[Turn, Event], None] | None = None
        """Hears of every event of every turn: for whoever counts."""
        self._lease: Lease
        self._recorder: TokenRecorder
        self._renewing: asyncio.Task[None]

    async def __aenter__(self) -> Turns:
        self._lease = await asyncio.to_thread(self._store.leases.open)
        self._recorder = TokenRecorder(self._store, self._lease)
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closing = True
        await asyncio.gather(*self._starts, return_exceptions=True)
        await self.park()
        self._renewing.cancel()
        with suppress(asyncio.CancelledError):
            await self._renewing
        await asyncio.to_thread(self._recorder.close)
        await self._write_endings()
        try:
            await asyncio.to_thread(self._lease.close)
        except Exception as failure:  # the next process finds it by its file, or by its time
            _log.warning("the lease could not be closed: %s", failure)

    def get(self, reply_id: str) -> Turn | None:
        return self._turns.get(reply_id)

    def is_unsettled(self, reply_id: str) -> bool:
        """Whether its end could not be written yet, or not for certain."""
        return reply_id in self._unsettled

    @property
    def running(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self._turns.values() if not turn.log.ended)

    async def begin(self, model: Model, beginning: NewTurn) -> StoredMessage:
        """A new reply, running. With a key that was used before: the one that was begun then.

        A caller that is cancelled meanwhile does not leave a reply that is stored and never runs.
        """
        self.check_open()
        utterance, reply_id = await asyncio.to_thread(
            self._utterance,
            model,
            beginning.request,
            _ids(beginning.goes_on_from),
            beginning.begun,
            beginning.prompt,
        )
        if not beginning.goes_on_from:  # first words that were asked for
            beginning = replace(beginning, goes_on_from=given_tokens(utterance.prompt.reply_ids))
        return await self._shielded(self._begin(beginning, utterance, reply_id))

    async def _begin(
        self, beginning: NewTurn, utterance: ReplyStream, reply_id: Callable[[str], None]
    ) -> StoredMessage:
        async with self._beginning:
            self.check_open()
            reply, ours = await self._under_lease(lambda lease: self._start(lease, beginning))
            if ours:
                reply_id(reply.id)
                self._run(reply, beginning.request.owner, utterance, TurnTimer())
        return reply

    async def resume(
        self, model: Model, reply: StoredMessage, request: ReplyRequest, steps: Sequence[Step], key: str | None = None
    ) -> StoredMessage:
        """The same reply runs on, on top of its tokens. Conflict where it can't: see `Replies.resume`."""
        self.check_open()
        utterance, reply_id = await asyncio.to_thread(self._utterance, model, request, _ids(steps))
        fingerprint = model.engine.info.fingerprint
        return await self._shielded(self._resume(reply, request.owner, utterance, reply_id, key, fingerprint))

    async def _resume(
        self,
        reply: StoredMessage,
        owner: str,
        utterance: ReplyStream,
        reply_id: Callable[[str], None],
        key: str | None,
        fingerprint: str,
    ) -> StoredMessage:
        assert reply.reply is not None
        async with self._beginning:
            self.check_open()
            await self._write_ending(reply.id)
            resumed = await self._under_lease(
                lambda lease: self._store.replies.resume(lease, reply.id, key, fingerprint)
            )
            reply_id(reply.id)
            previous = self._turns.get(reply.id)
            if previous is not None and previous.utterance.answers_now:
                utterance.answer_now()
            self._run(resumed, owner, utterance, TurnTimer(reply.reply.timings))
        return resumed

    async def take_over(self, model: Model, reply: StoredMessage, request: ReplyRequest, steps: Sequence[Step]) -> None:
        """Goes on with a reply of a dead process, which this one holds already."""
        utterance, reply_id = await asyncio.to_thread(self._utterance, model, request, _ids(steps))
        reply_id(reply.id)
        fingerprint = model.engine.info.fingerprint
        reply = await asyncio.to_thread(self._store.replies.computed_by, reply.id, fingerprint)
        self._run(reply, request.owner, utterance, TurnTimer(reply.reply.timings if reply.reply else None))
        self._recovering.discard(reply.id)

    async def orphans(self, resume: bool) -> tuple[str, ...]:
        """The running replies of dead processes: held by this one now, or marked as interrupted."""
        async with self._beginning:
            if not resume:
                return await asyncio.to_thread(self._store.replies.interrupt_orphans, self._lease)
            found = await self._under_lease(self._store.replies.take_over)
            self._recovering.update(found)
            return found

    async def give_up(self, reply_id: str, ending: ReplyEnding) -> None:
        """Ends a reply that this process holds and can't go on with."""
        self._unsettled[reply_id] = ending
        self._recovering.discard(reply_id)
        await self.settle()

    async def finish(self, seconds: float) -> None:
        """Begins nothing more, and waits for what runs, for so long at most."""
        self.closing = True
        if tasks := [turn.task for turn in self.running if turn.task is not None]:
            await asyncio.wait(tasks, timeout=seconds)

    def check_open(self) -> None:
        """ShuttingDown where nothing is begun any more."""
        if self.closing:
            raise ShuttingDown

    async def park(self, leave: bool = False) -> None:
        """Ends what runs so that it can be continued: for a model that goes, or a program that ends.

        `leave`: nothing is written of an end, as if this process had died, and the next one goes on by itself.
        """
        running = self.running
        for turn in running:
            turn.parked, turn.left = True, leave
            turn.utterance.stop()
        tasks = [turn.task for turn in running if turn.task is not None]
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=PARK_SECONDS)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self) -> None:
        """Writes the endings that could not be written when they came, and ends replies that this process holds and
        that no turn of it runs. What still can't be written is tried again later."""
        async with self._beginning:
            try:
                held = await asyncio.to_thread(self._store.replies.held, self._lease)
            except Exception as error:
                _log.warning("the replies of this process could not be read: %s", error)
                held = ()
            for id in held:
                if id not in self._turns and id not in self._recovering:
                    self._unsettled.setdefault(id, ReplyEnding(ReplyStatus.FAILED, None, error=NOT_BEGUN))
            await self._write_endings()

    async def _write_endings(self) -> None:
        for id in list(self._unsettled):
            try:
                await self._write_ending(id)
            except Exception as error:
                _log.warning("the end of a reply could not be written: %s", error)

    async def _write_ending(self, id: str) -> None:
        ending = self._unsettled.get(id)
        if ending is None:
            return
        with suppress(LeaseLost):  # whoever has taken the reply over writes its end
            await asyncio.to_thread(self._store.replies.finish, self._lease, id, ending)
        if self._unsettled.get(id) is ending:
            del self._unsettled[id]
        if (turn := self._turns.get(id)) is not None and turn.log.ended:
            del self._turns[id]  # it told that its end was not written: from now on it is read from the store

    async def _shielded(self, starting: Coroutine[None, None, StoredMessage]) -> StoredMessage:
        """Not cancelled with its caller: what is stored is also run."""
        task = asyncio.create_task(starting)
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)
        return await asyncio.shield(task)

    async def _under_lease(self, write: Callable[[Lease], T]) -> T:
        """Writes under the lease of this process, or under a new one where that was lost. Needs the lock."""
        lease = self._lease
        try:
            return await asyncio.to_thread(write, lease)
        except LeaseLost:
            await self._replace_lease(lease)
            return await asyncio.to_thread(write, self._lease)

    async def _replace_lease(self, lost: Lease) -> None:
        """Another process took over all that this one held: those turns end here, new ones get a new lease."""
        if self._lease is not lost:
            return
        _log.warning("the lease ran out and was taken over: %d replies go on elsewhere", len(self.running))
        self._lease = self._recorder.lease = await asyncio.to_thread(self._store.leases.open)
        lost.let_go()
        for turn in self.running:
            turn.lost = True
            turn.utterance.stop()

    def _utterance(
        self,
        model: Model,
        request: ReplyRequest,
        said: tuple[int, ...],
        begun: Message | None = None,
        prompt: Prompt | None = None,
    ) -> tuple[ReplyStream, Callable[[str], None]]:
        """The reply's id is known only once it is in the store: the second value takes it."""
        known: list[str] = []

        async def keep(step: Step) -> Step:
            place = utterance.said
            self._turns[known[0]].clock.token(utterance.phase is Phase.THINKING)
            return await self._recorder.keep(known[0], place, step)

        async def keep_answer_at(position: int) -> None:
            await asyncio.to_thread(self._store.replies.record_answer_at, self._lease, known[0], position)

        utterance = model.utterance(request, said, begun, keep, prompt=prompt)
        utterance.keep_answer_at = keep_answer_at
        return utterance, known.append

    def _start(self, lease: Lease, beginning: NewTurn) -> tuple[StoredMessage, bool]:
        """The reply, and whether it is ours to run: one that the key found runs already or is over."""
        reply = self._store.replies.start(
            lease,
            beginning.conversation_id,
            beginning.parent_id,
            beginning.settings,
            goes_on_from=beginning.goes_on_from,
            key=beginning.key,
            expected_head=beginning.expected_head,
        )
        if beginning.key is None:
            return reply, True
        runs = reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING and reply.id not in self._turns
        return reply, runs and reply.id in self._store.replies.held(lease)

    def _run(self, reply: StoredMessage, owner: str, utterance: ReplyStream, clock: TurnTimer) -> None:
        if reply.reply is not None:
            utterance.notice = engine_notice(reply.reply.settings, utterance.said)
        turn = Turn(reply, owner, utterance, clock)
        self._turns.pop(reply.id, None)
        self._turns[reply.id] = turn
        turn.task = asyncio.create_task(self._play(turn))
        self._tell(turn, "turn")

    async def _play(self, turn: Turn) -> None:
        """Whatever happens, the log gets an end: somebody may be waiting for it."""
        ending: Finished | Failed = Failed(LEFT)
        try:
            ending = await self._heard(turn)
            if not (isinstance(ending, Failed) and ending.error in (LOST, LEFT)):
                ending = await self._finish(turn, ending)
        except asyncio.CancelledError as error:
            if turn.parked and not turn.left:  # it did not stop when it was told to
                ending = Failed(PARKED)
            elif not _is_cancelled():
                ending = Failed(_internal(error))
            else:
                raise
            self._unsettled[turn.id] = ReplyEnding(ReplyStatus.INTERRUPTED, None, error=ending.error)
        finally:
            turn.log.tell(ending)
            self._hear(turn, ending)
            if isinstance(ending, Failed) and ending.error == LOST and self._turns.get(turn.id) is turn:
                del self._turns[turn.id]  # from now on it is read from the store
            self._tell(turn, "ended")
            self._forget()

    async def _heard(self, turn: Turn) -> Finished | Failed:
        """Runs the reply to its end, telling what it says."""
        utterance = turn.utterance
        try:
            async with utterance:
                async for event in utterance:
                    if isinstance(event, Finished):
                        return _cut(turn, event)
                    if isinstance(event, Started):
                        turn.clock.prefilled()
                    turn.log.tell(event)
                    self._hear(turn, event)
            raise EngineError("The engine ended the reply without a word.")
        except LeaseLost:
            return Failed(LOST)
        except PalaverError as error:
            turn.error = error
            return Failed(str(error), _tail(utterance))
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            return Failed(_internal(error), _tail(utterance))  # something that the turn waited for was cancelled
        except Exception as error:
            return Failed(_internal(error), _tail(utterance))

    async def _finish(self, turn: Turn, ending: Finished | Failed) -> Finished | Failed:
        """Writes the end. Where that fails it is written later; the tokens are safe already."""
        try:
            stored = _stored(turn, ending)
        except Exception as error:  # the text can't be folded: the tokens are the record
            ending = Failed(_internal(error))
            stored = ReplyEnding(ReplyStatus.FAILED, None, error=ending.error)
        try:
            await asyncio.to_thread(self._store.replies.finish, self._lease, turn.id, stored)
        except LeaseLost:
            return Failed(LOST)
        except Exception as error:
            self._unsettled[turn.id] = stored
            return Failed(str(error) if isinstance(error, PalaverError) else _internal(error), ending.tail)
        return ending

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(SECONDS / 3)
            try:
                lease = self._lease
                if not await asyncio.to_thread(lease.renew):
                    async with self._beginning:
                        await self._replace_lease(lease)
                await self.settle()
            except Exception as error:  # a full disk or a locked database: there is another time
                _log.warning("the lease could not be renewed: %s", error)

    def _hear(self, turn: Turn, event: Event) -> None:
        if self.heard is None:
            return
        try:
            self.heard(turn, event)
        except Exception:  # whoever counts must not end a reply
            _log.exception("an event was not counted")

    def _tell(self, turn: Turn, what: str) -> None:
        self._changes.tell(turn.owner, ConversationChange(turn.reply.conversation_id, what, turn.id))

    def _forget(self) -> None:
        over = [
            id for id, turn in self._turns.items() if turn.log.ended and not turn.left and id not in self._unsettled
        ]
        for id in over[: max(0, len(over) - REMEMBERED)]:
            del self._turns[id]


def engine_notice(made_by: ReplySettings, tokens: int) -> str:
    """What a reader should know where another engine than before goes on with a reply after so many tokens."""
    if len(made_by.fingerprints) < 2:
        return ""
    (_, before), (start, now) = made_by.fingerprints[-2:]
    if start != tokens:
        return ""
    return (
        f"The first {tokens} tokens were computed by {before}, which isn't in use; {now} goes on, "
        "and may round otherwise."
    )


def _ids(steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(step.token_id for step in steps)


def _cut(turn: Turn, event: Finished) -> Finished | Failed:
    """A stop that nobody asked for, but that the turn was put aside or taken away by, is told as that."""
    if event.finish is not Finish.STOPPED or not (turn.lost or turn.parked):
        return event
    if turn.lost:
        return Failed(LOST)
    return Failed(LEFT if turn.left else PARKED, event.tail)


def _is_cancelled() -> bool:
    """Whether this task was cancelled, and not only something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _tail(utterance: ReplyStream) -> tuple[ReadEvent, ...]:
    """What the reader held back; nothing where it was the reader that failed."""
    try:
        return utterance.tail()
    except Exception:
        _log.exception("the end of a reply could not be read")
        return ()


def _internal(error: BaseException) -> str:
    _log.error("a turn failed", exc_info=error)
    return f"An internal error ended the reply ({type(error).__name__}): the log has the details. It can be continued."


def _stored(turn: Turn, ending: Finished | Failed) -> ReplyEnding:
    return ReplyEnding(
        _status(turn, ending),
        turn.log.folded(ending).message.parts,
        turn.utterance.usage,
        turn.clock.timings(),
        ending.error if isinstance(ending, Failed) else None,
    )


def _status(turn: Turn, ending: Finished | Failed) -> ReplyStatus:
    if isinstance(ending, Finished):
        return _STATUS[ending.finish]
    return ReplyStatus.INTERRUPTED if turn.parked else ReplyStatus.FAILED
