"""Turns: replies that run for the system, not for whoever asked; begun, stopped, gone on with, put aside.

Every token is committed before it is told, and so is the end. A turn is named by the id of its reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from palaver.chat.changes import Changes
from palaver.chat.clock import Clock
from palaver.chat.interface import Change
from palaver.chat.log import Log
from palaver.chat.model import Model
from palaver.chat.recorder import Recorder
from palaver.chat.utterance import Request, Utterance
from palaver.errors import EngineError, PalaverError, ShuttingDown
from palaver.events import Event, Failed, Finished, Started
from palaver.generation import Finish, Step
from palaver.messages import Message
from palaver.phases import Phase
from palaver.store import Ending, Lease, LeaseLost, Settings, Status, Store, Stored
from palaver.store.leases import SECONDS
from palaver.store.tokens import given

REMEMBERED = 64
"""Turns whose events stay in memory after their end, for readers that come back soon."""
PARKED = "The model was put aside: the reply can be continued."
LEFT = "The server ended: the reply goes on when it is back."
LOST = "Another process goes on with this reply."
_STATUS = {
    Finish.END: Status.DONE,
    Finish.STOP_STRING: Status.DONE,
    Finish.LENGTH: Status.LENGTH,
    Finish.STOPPED: Status.STOPPED,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A reply to be begun: where it hangs, and all that decides it."""

    conversation_id: str
    parent_id: str | None
    request: Request
    settings: Settings
    goes_on_from: tuple[Step, ...] = ()
    key: str | None = None
    expected_head: str | None = None
    begun: Message | None = None
    """Its first words, where only their text is known."""


@dataclass(eq=False)
class Turn:
    """A reply that runs, or ran not long ago."""

    reply: Stored
    owner: str
    utterance: Utterance
    clock: Clock
    log: Log = field(default_factory=Log)
    parked: bool = False
    left: bool = False
    """Whether it stays open in the store, for the next process to go on with."""
    error: PalaverError | None = None
    """Why it failed, where that is known."""
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.reply.id


class Turns:
    """The turns of this process. Enter it to hold a lease, leave it to put aside what still runs."""

    def __init__(self, store: Store, changes: Changes) -> None:
        self._store = store
        self._changes = changes
        self._turns: dict[str, Turn] = {}
        self._unsettled: dict[str, Ending] = {}
        self._beginning = asyncio.Lock()
        self.closing = False
        """Whether nothing new is begun any more."""
        self.heard: Callable[[Turn, Event], None] | None = None
        """Hears of every event of every turn: for whoever counts."""
        self._lease: Lease
        self._recorder: Recorder
        self._renewing: asyncio.Task[None]

    async def __aenter__(self) -> Turns:
        self._lease = await asyncio.to_thread(self._store.leases.open)
        self._recorder = Recorder(self._store, self._lease)
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.park()
        self._renewing.cancel()
        with suppress(asyncio.CancelledError):
            await self._renewing
        self._recorder.close()
        with suppress(PalaverError):
            await self.settle()
            await asyncio.to_thread(self._lease.close)

    def get(self, reply_id: str) -> Turn | None:
        return self._turns.get(reply_id)

    @property
    def running(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self._turns.values() if not turn.log.ended)

    async def begin(self, model: Model, beginning: Beginning) -> Stored:
        """A new reply, running. With a key that was used before: the one that was begun then."""
        self.check_open()
        said = _ids(beginning.goes_on_from)
        utterance, reply_id = self._utterance(model, beginning.request, said, beginning.begun)
        if not said:  # first words that were asked for
            beginning = replace(beginning, goes_on_from=given(utterance.prompt.reply_ids))
        async with self._beginning:
            reply, ours = await asyncio.to_thread(self._start, beginning)
            if ours:
                reply_id(reply.id)
                self._run(reply, beginning.request.owner, utterance, Clock())
        return reply

    async def resume(
        self, model: Model, reply: Stored, request: Request, steps: Sequence[Step], key: str | None = None
    ) -> Stored:
        """The same reply runs on, on top of its tokens. Conflict where it can't: see `Replies.resume`."""
        assert reply.reply is not None
        self.check_open()
        utterance, reply_id = self._utterance(model, request, _ids(steps))
        async with self._beginning:
            await self.settle()
            resumed = await asyncio.to_thread(self._store.replies.resume, self._lease, reply.id, key)
            reply_id(reply.id)
            previous = self._turns.get(reply.id)
            if previous is not None and previous.utterance.answers_now:
                utterance.answer_now()
            self._run(resumed, request.owner, utterance, Clock(reply.reply.timings))
        return resumed

    async def take_over(self, model: Model, reply: Stored, request: Request, steps: Sequence[Step]) -> None:
        """Goes on with a reply of a dead process, which this one holds already."""
        utterance, reply_id = self._utterance(model, request, _ids(steps))
        reply_id(reply.id)
        self._run(reply, request.owner, utterance, Clock(reply.reply.timings if reply.reply else None))

    async def orphans(self, resume: bool) -> tuple[str, ...]:
        """The running replies of dead processes: held by this one now, or marked as interrupted."""
        if resume:
            return await asyncio.to_thread(self._store.replies.take_over, self._lease)
        return await asyncio.to_thread(self._store.replies.interrupt_orphans)

    async def give_up(self, reply_id: str, ending: Ending) -> None:
        """Ends a reply that this process holds and can't go on with."""
        await asyncio.to_thread(self._store.replies.finish, self._lease, reply_id, ending)

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
        await asyncio.gather(*(turn.task for turn in running if turn.task), return_exceptions=True)

    async def settle(self) -> None:
        """Writes the endings that could not be written when they came: the disk was full, the database locked."""
        for id, ending in list(self._unsettled.items()):
            with suppress(LeaseLost):
                await asyncio.to_thread(self._store.replies.finish, self._lease, id, ending)
            self._unsettled.pop(id, None)

    def _utterance(
        self, model: Model, request: Request, said: tuple[int, ...], begun: Message | None = None
    ) -> tuple[Utterance, Callable[[str], None]]:
        """The reply's id is known only once it is in the store: the second value takes it."""
        known: list[str] = []

        async def keep(step: Step) -> Step:
            place = utterance.said
            self._turns[known[0]].clock.token(utterance.phase is Phase.THINKING)
            return await self._recorder.keep(known[0], place, step)

        utterance = model.utterance(request, said, begun, keep)
        return utterance, known.append

    def _start(self, beginning: Beginning) -> tuple[Stored, bool]:
        """The reply, and whether it is ours to run: one that the key found runs already or is over."""
        reply = self._store.replies.start(
            self._lease,
            beginning.conversation_id,
            beginning.parent_id,
            beginning.settings,
            goes_on_from=beginning.goes_on_from,
            key=beginning.key,
            expected_head=beginning.expected_head,
        )
        if beginning.key is None:
            return reply, True
        runs = reply.reply is not None and reply.reply.status is Status.RUNNING and reply.id not in self._turns
        return reply, runs and reply.id in self._store.replies.held(self._lease)

    def _run(self, reply: Stored, owner: str, utterance: Utterance, clock: Clock) -> None:
        turn = Turn(reply, owner, utterance, clock)
        self._turns.pop(reply.id, None)
        self._turns[reply.id] = turn
        turn.task = asyncio.create_task(self._play(turn))
        self._tell(turn, "turn")

    async def _play(self, turn: Turn) -> None:
        ending = await self._heard(turn)
        if not (isinstance(ending, Failed) and ending.error in (LOST, LEFT)):
            ending = await self._finish(turn, ending)
        turn.log.tell(ending)
        if self.heard is not None:
            self.heard(turn, ending)
        self._tell(turn, "ended")
        self._forget()

    async def _heard(self, turn: Turn) -> Finished | Failed:
        """Runs the reply to its end, telling what it says."""
        utterance = turn.utterance
        try:
            async with utterance:
                async for event in utterance:
                    if isinstance(event, Finished):
                        if turn.parked and _is_cut(event):
                            return Failed(LEFT if turn.left else PARKED, event.tail)
                        return event
                    if isinstance(event, Started):
                        turn.clock.prefilled()
                    turn.log.tell(event)
                    if self.heard is not None:
                        self.heard(turn, event)
            raise EngineError("The engine ended the reply without a word.")
        except LeaseLost:
            return Failed(LOST)
        except PalaverError as error:
            turn.error = error
            return Failed(str(error), utterance.tail())
        except Exception:
            _log.exception("a turn failed")
            return Failed("Something went wrong inside of Palaver: the log has the details.", utterance.tail())

    async def _finish(self, turn: Turn, ending: Finished | Failed) -> Finished | Failed:
        """Writes the end. Where that fails it is written later; the tokens are safe already."""
        folded = turn.log.folded(ending)
        stored = Ending(
            _status(turn, ending),
            folded.message.parts,
            turn.utterance.usage,
            turn.clock.timings(),
            ending.error if isinstance(ending, Failed) else None,
        )
        try:
            await asyncio.to_thread(self._store.replies.finish, self._lease, turn.id, stored)
        except LeaseLost:
            return Failed(LOST)
        except PalaverError as error:
            self._unsettled[turn.id] = stored
            return Failed(str(error), ending.tail)
        return ending

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(SECONDS / 3)
            try:
                await asyncio.to_thread(self._lease.renew)
                await self.settle()
            except PalaverError as error:  # a full disk or a locked database: there is another time
                _log.warning("the lease could not be renewed: %s", error)

    def _tell(self, turn: Turn, what: str) -> None:
        self._changes.tell(turn.owner, Change(turn.reply.conversation_id, what, turn.id))

    def _forget(self) -> None:
        over = [id for id, turn in self._turns.items() if turn.log.ended]
        for id in over[: max(0, len(over) - REMEMBERED)]:
            del self._turns[id]


def _ids(steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(step.token_id for step in steps)


def _is_cut(event: Finished) -> bool:
    return event.finish is Finish.STOPPED


def _status(turn: Turn, ending: Finished | Failed) -> Status:
    if isinstance(ending, Finished):
        return _STATUS[ending.finish]
    return Status.INTERRUPTED if turn.parked else Status.FAILED
