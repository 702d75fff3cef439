"""A session: reads what a person types, shows what comes of it, until the person leaves."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from rich.text import Text

from palaver.chat.interface import Chat, ModelCard, ModelState
from palaver.errors import ContextOverflow, PalaverError
from palaver.events import Failed
from palaver.messages import Message, Part, Role
from palaver.messages import Text as TextPart
from palaver.repl.command_table import CommandLine, CommandTable, MessageLine, parse_line
from palaver.repl.cursor import ConversationCursor, ConversationDraft, find_conversation
from palaver.repl.input import KeyActions, LastMessage, LineSource, ReplyDropped, StreamLineSource, TypedLine
from palaver.repl.plain import PlainPrinter, PlainView
from palaver.repl.reply_view import ReplyView, TurnFollower, TurnView
from palaver.repl.screen import Screen, console, has_cursor
from palaver.repl.settings import SessionSettings, ThinkingDisplay
from palaver.repl.status import banner, loading_line, offer_context_choices, statistics_line, waiting_line, warn_context
from palaver.store import StoredMessage

if TYPE_CHECKING:
    from palaver.repl.voice import SessionVoice

T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl+C ended what was waited for."""


class Session:
    """What every command works on."""

    def __init__(self, chat: Chat, settings: SessionSettings, screen: Screen, table: CommandTable) -> None:
        self.chat = chat
        self.settings = settings
        self.screen = screen
        self.table = table
        self.place = ConversationCursor(
            chat, settings.client, ConversationDraft(settings.system or "", settings.parameters)
        )
        self.thoughts = settings.thoughts
        self.attached: list[Part] = []
        """What goes with the next message."""
        self.lines: LineSource = StreamLineSource(sys.stdin)
        self.begun: TypedLine | None = None
        """What the next prompt begins with."""
        self.offered: list[str] = []
        """The ids of the conversations that were listed last: a number means one of them."""
        self._voice: SessionVoice | None = None
        self.went_well = True
        self.stopped_at = float("-inf")
        self.leaving = False

    # the loop

    async def run(self) -> None:
        """Until the person leaves. What goes wrong is told, and ends nothing."""
        while not self.leaving:
            try:
                await self._next()
            except EOFError:
                return

    async def _next(self) -> None:
        try:
            begun, self.begun = self.begun, None
            typed = await self.lines.read(begun, await self._last())
            await self.hush()
            await self.take(typed)
        except ReplyDropped:
            await self._told(self.drop)
        except (KeyboardInterrupt, Interrupted):
            await self.hush()
            self.screen.note("Interrupted.")

    async def take(self, typed: TypedLine) -> None:
        """A message or a command."""
        if typed.text.strip():
            await self._told(lambda: self._take(typed))

    async def _take(self, typed: TypedLine) -> None:
        match parse_line(typed.text, self.table):
            case MessageLine(text) if typed.edited is not None:
                await self.reword(typed.edited, text)
            case MessageLine(text):
                await self.say(text)
            case CommandLine(command, arguments):
                await command.run(self, arguments)

    async def _told(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except PalaverError as error:
            self.went_well = False
            self.screen.error(error)
        except OSError as error:
            self.went_well = False
            self.screen.error(f"{error.filename}: {error.strerror}" if error.filename else error)
        except (EOFError, Interrupted, asyncio.CancelledError):
            raise
        except Exception as error:  # a mistake of ours must not take the conversation away
            self.went_well = False
            self.screen.error(f"This went wrong inside of Palaver: {type(error).__name__}: {error}")

    async def _last(self) -> LastMessage | None:
        """What the Up key edits."""
        if not self.lines.is_person:
            return None
        with suppress(PalaverError):
            message = await self.place.last(Role.USER)
            return LastMessage(message.id, message.text) if message and message.text else None
        return None

    # turns

    async def say(self, text: str, shorten: bool = False) -> None:
        message = Message(Role.USER, (*self.attached, TextPart(text)))
        try:
            await self.send(message, shorten)
        except ContextOverflow as error:
            await offer_context_choices(self, text, error)
        except Interrupted:
            self.begun = TypedLine(text)  # nothing was sent: it stands at the prompt again
            raise

    async def send(self, message: Message, shorten: bool = False) -> None:
        """Puts the message behind the branch and shows the reply."""
        conversation = await self.place.made()
        at = (await self.place.cursor()).message_id
        once = {"overflow": "shorten"} if shorten else None
        said = await self.waited(
            self.chat.say(conversation.id, at, message, parameters=once, key=uuid4().hex), "waiting for the model"
        )
        self.attached.clear()
        await self.place.move(said.reply.id)
        await self.follow(said.reply)

    async def reword(self, message_id: str, text: str) -> None:
        """Another wording of a message, on a branch of its own."""
        edited = await self.chat.edit(message_id, (TextPart(text),))
        await self.place.move(edited.id)
        if edited.role is Role.USER:
            await self.answer(edited.id)

    async def answer(self, parent: str) -> None:
        """A new reply under a message."""
        conversation = await self.place.made()
        reply = await self.waited(self.chat.reply(conversation.id, parent, key=uuid4().hex), "waiting for the model")
        await self.place.move(reply.id)
        await self.follow(reply)

    async def follow(self, reply: StoredMessage, known: int = 0) -> None:
        """Shows the reply while it comes, from the event after `known`."""
        reading = await self._voice.read(reply.id, known) if self._voice is not None else None
        follower = TurnFollower(self.chat, self.view(known), self.lines, reading)
        ending = await follower.follow(reply.id)
        self.stopped_at = follower.stopped_at
        self.thoughts = follower.view.thoughts if isinstance(follower.view, ReplyView) else self.thoughts
        self.went_well = self.went_well and not isinstance(ending, Failed)
        if ending is not None and self.screen.is_live:
            after = (await self.chat.message(reply.id)).reply
            before = reply.reply if known else None
            line = statistics_line(ending, follower.view.first, before, after)
            self.screen.show(Text(line, style="error" if isinstance(ending, Failed) else "note"), Text())
        if follower.dropped:
            await self.drop()
        elif ending is not None:
            await warn_context(self, ending)

    @property
    def voice(self) -> SessionVoice:
        """Made when it is first asked for: most sessions have none, and it brings much with it."""
        from palaver.repl.voice import SessionVoice

        if self._voice is None:
            self._voice = SessionVoice(self.settings.folder, self.screen.note)
        return self._voice

    async def hush(self) -> None:
        """Stops the sound, where a person listens; a pipe waits for its end."""
        if self._voice is not None:
            if not self.lines.is_person:
                await self._voice.heard()
            self._voice.stop()

    async def close(self) -> None:
        await self.hush()
        if self._voice is not None:
            await self._voice.close()

    def view(self, known: int = 0) -> TurnView:
        if self.screen.is_live:
            return ReplyView(self.screen, self.thoughts, known=known)
        hidden = self.thoughts is ThinkingDisplay.HIDDEN
        return PlainView(PlainPrinter(sys.stdout, None if hidden else sys.stderr), known)

    async def drop(self) -> None:
        """Back to the user's message. The reply stays in the tree."""
        self.stopped_at = float("-inf")
        reply = await self.place.last(Role.ASSISTANT)
        path = await self.place.path()
        if reply is None or path[-1].id != reply.id or reply.parent_id is None:
            return
        await self.place.move(reply.parent_id)
        self.screen.note("The reply was dropped, your message kept. /retry asks again, /undo brings the reply back.")

    async def waited(self, wanted: Awaitable[T], what: str) -> T:
        """The result; Ctrl+C ends the waiting. What takes long is told."""
        task = asyncio.ensure_future(wanted)
        begun = time.monotonic()
        with self.lines.watching(KeyActions(task.cancel)):
            while not (await asyncio.wait([task], timeout=0.25))[0]:
                note = await self._loading() or what
                self.screen.update((), [waiting_line(note, time.monotonic() - begun)])
        self.screen.update(())
        if task.cancelled():
            raise Interrupted
        return task.result()

    async def _loading(self) -> str:
        card = await self.chat.model()
        return loading_line(card) if card.state is ModelState.LOADING else ""

    # opening

    async def begin(self) -> None:
        """Opens what was asked for at the start. What is not there is an error; what can't be shown is told."""
        if self.settings.conversation is not None:
            conversation = await find_conversation(self.chat, self.settings.conversation)
            await self._told(lambda: self.open(conversation.id))
        elif self.settings.resume:
            newest = await self.chat.conversations(limit=1)
            if newest:
                await self._told(lambda: self.open(newest[0].id))
            else:
                self.screen.note("There is no conversation yet: this is the first.")
        if self.place.id is not None and self.settings.system is not None:
            await self.place.set_system(self.settings.system)
        if self.place.id is not None and self.settings.parameters:
            await self.place.set(**self.settings.parameters)

    async def open(self, id: str) -> None:
        """Goes to a conversation, shows its end, and follows a reply that is being written."""
        from palaver.repl.commands.branches import show_end

        await self.place.open(id)
        running = await self.place.running()
        await show_end(self, without_last=running is not None)
        if running is not None:
            await self.follow(running)


async def run(chat: Chat, settings: SessionSettings) -> bool:
    """Talks with whoever is at the terminal, or at the other end of a pipe. Whether all of it went well."""
    from palaver.repl.commands import table

    typed, shown = sys.stdin.isatty(), has_cursor(sys.stdout)
    live = typed and shown and not settings.plain
    screen = Screen(console(sys.stdout if live else sys.stderr), live)
    session = Session(chat, settings, screen, table())
    try:
        if typed and has_cursor(sys.stdout if shown else sys.stderr):
            from palaver.repl.interactive import run_interactive

            await run_interactive(session)
        else:
            session.lines = StreamLineSource(sys.stdin, sys.stderr if typed else None)
            await _streamed(session)
    finally:
        await session.close()
    return session.went_well


async def _streamed(session: Session) -> None:
    card: ModelCard = await session.chat.ready()
    if session.lines.is_person:
        session.screen.show(*banner(card))
    await session.begin()
    await session.run()
