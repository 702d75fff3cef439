"""The session loop: reads a line, runs it as a message or a command, shows the reply."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from rich.text import Text

from palaver.chat.interface import Chat, ModelCard, ModelState
from palaver.errors import ContextOverflow, ModelError, PalaverError, RequestError
from palaver.events import Failed
from palaver.messages import Message, Part, Role
from palaver.messages import Text as TextPart
from palaver.repl import strings
from palaver.repl.command_table import CommandLine, CommandTable, MessageLine, escape_message, parse_line
from palaver.repl.cursor import ConversationCursor, ConversationSettings, find_conversation
from palaver.repl.input import KeyActions, LastMessage, LineSource, ReplyDropped, StreamLineSource, TypedLine
from palaver.repl.plain import PlainPrinter, PlainView
from palaver.repl.reply_view import ReplyView, TurnView
from palaver.repl.screen import Screen, console, has_cursor
from palaver.repl.settings import SessionSettings, ThinkingDisplay
from palaver.repl.signals import handle_interrupt
from palaver.repl.status import (
    fills_context,
    first_screen,
    loading_line,
    offer_context_choices,
    ready_lines,
    statistics_line,
    waiting_line,
    warn_context,
)
from palaver.repl.terminal_variable import add_terminal_variable
from palaver.repl.turn_follower import TurnFollower
from palaver.store import Blob, Conflict, Conversation, NotFound, StoredMessage

if TYPE_CHECKING:
    from palaver.media import MediaDecoder
    from palaver.repl.commands.compare import CompareMode
    from palaver.repl.voice import SessionVoice, SpokenReply

T = TypeVar("T")
_LAST_MESSAGE_SECONDS = 2.0
"""How long the prompt waits for the message that the Up key edits, if the server is away."""
_DISCARD_SECONDS = 2.0
"""How long a message that is not sent waits until its empty conversation is deleted."""
_SHORTEN = {"overflow": "shorten"}
_CONVERSATION_KINDS = ("conversation", "message", "reply", "turn")
"""What is not found once its conversation is deleted."""


class Interrupted(Exception):
    """Ctrl+C cancelled the awaited operation."""


class Session:
    """The state that all commands share: the chat, the current conversation, the screen and the input."""

    def __init__(self, chat: Chat, settings: SessionSettings, screen: Screen, table: CommandTable) -> None:
        self.chat = chat
        self.settings = settings
        self.screen = screen
        self.table = table
        self.cursor = ConversationCursor(
            chat, settings.client, ConversationSettings(settings.system or "", settings.parameters)
        )
        self.thinking_display = settings.thinking_display
        self.attachments: list[Part] = []
        """Parts that are sent with the next message."""
        self._decoder: MediaDecoder | None = None
        """Decodes the pictures that are drawn."""
        self.lines: LineSource = StreamLineSource(sys.stdin)
        self.initial_line: TypedLine | None = None
        """The initial text of the next prompt."""
        self.listed_ids: list[str] = []
        """The conversations listed last, in order: `/open NUMBER` refers to them."""
        self.compare_mode: CompareMode | None = None
        """The columns that messages are sent to; None: messages get one reply."""
        self._voice: SessionVoice | None = None
        self.succeeded = True
        self.stopped_at = float("-inf")
        self.should_exit = False
        self._interrupted = False
        """Whether Ctrl+C was pressed between two awaited operations of a turn."""

    # the loop

    async def run(self) -> None:
        """Runs until the input ends or `/quit`. Errors are shown and do not end the session."""
        with handle_interrupt(self._defer_interrupt):  # between a prompt and its message too
            while not self.should_exit:
                try:
                    await self._run_once()
                except EOFError:
                    return

    async def _run_once(self) -> None:
        try:
            initial, self.initial_line = self.initial_line, None
            self._interrupted = False
            typed = await self.lines.read(initial, await self._last_user_message())
            await self.stop_speech()
            await self.handle_line(typed)
        except ReplyDropped:
            await self._report_errors(self.drop_reply)
        except PalaverError as error:  # a line that can't be read
            self.succeeded = False
            self.screen.error(error)
        except (KeyboardInterrupt, Interrupted):
            await self.stop_speech()
            self.screen.note(strings.INTERRUPTED)

    async def handle_line(self, typed: TypedLine) -> None:
        """Runs one line: a message or a command."""
        if typed.text.strip():
            await self._report_errors(lambda: self._dispatch(typed))

    async def _dispatch(self, typed: TypedLine) -> None:
        from palaver.repl.commands.attachments import attach_file, parse_files, split_media

        takes_files = self.lines.is_interactive and typed.edited_id is None and not typed.text.startswith("//")
        if takes_files and (files := parse_files(typed.text)):
            for path in files:
                await attach_file(self, path)
            return
        match parse_line(typed.text, self.table):
            case MessageLine(text) if typed.edited_id is not None:
                await self.edit_message(typed.edited_id, text)
            case MessageLine(text):
                files, text = split_media(text) if takes_files else ([], text)
                for path in files:
                    await attach_file(self, path)
                await self.send_text(text)
            case CommandLine(command, arguments):
                await self._run_command(command.run(self, arguments))

    async def _run_command(self, command: Awaitable[None]) -> None:
        """Ctrl+C cancels the command, unless it handles the key itself."""
        task = asyncio.ensure_future(command)
        try:
            with handle_interrupt(task.cancel):
                if self._interrupted:
                    task.cancel()
                await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise Interrupted
        task.result()

    async def _report_errors(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
        except PalaverError as error:
            self.succeeded = False
            self.screen.error(await self._explain(error))
        except OSError as error:
            self.succeeded = False
            self.screen.error(f"{error.filename}: {error.strerror}" if error.filename else error)
        except (EOFError, Interrupted, asyncio.CancelledError):
            raise
        except Exception as error:  # a bug must not end the conversation
            self.succeeded = False
            self.screen.error(strings.INTERNAL_ERROR.format(error=f"{type(error).__name__}: {error}"))

    async def _explain(self, error: PalaverError) -> PalaverError | str:
        """The error, or what to do if its cause is that the current conversation was deleted elsewhere."""
        id = self.cursor.conversation_id
        if not isinstance(error, NotFound) or error.kind not in _CONVERSATION_KINDS:
            return error
        if error.kind == "conversation" and error.id != id:
            return error
        with suppress(PalaverError):
            return strings.DELETED_ELSEWHERE.format(id=id) if await self.cursor.is_deleted() else error
        return error

    async def _last_user_message(self) -> LastMessage | None:
        """The message that the Up key edits."""
        if not self.lines.is_interactive:
            return None
        with suppress(PalaverError, TimeoutError):
            message = await asyncio.wait_for(self.cursor.last_message(Role.USER), _LAST_MESSAGE_SECONDS)
            return LastMessage(message.id, message.text) if message and message.text else None
        return None

    # turns

    async def send_text(self, text: str, shorten: bool = False) -> None:
        message = Message(Role.USER, (*self.attachments, TextPart(text)))
        try:
            await self.send_message(message, shorten, text)
        except ContextOverflow as error:
            await offer_context_choices(self, text, error)

    async def send_message(self, message: Message, shorten: bool = False, text: str | None = None) -> None:
        """Appends the message to the branch and shows the reply, or those of all columns.

        `text` goes back to the prompt if the message is not sent."""
        if self.compare_mode is not None:
            await self._compare(message, None, shorten, text)
            return
        with self.deferred_interrupts():
            reply = await self._send_message(message, shorten, text)
        await self.follow_tools(reply)

    async def _send_message(self, message: Message, shorten: bool, text: str | None) -> StoredMessage:
        async with self._sending(text):
            conversation = await self.wait_for(self.cursor.ensure_conversation(), strings.WAITING_FOR_SERVER)
            parent_id = (await self.wait_for(self.cursor.position(), strings.WAITING_FOR_SERVER)).message_id
            parameters = await self.turn_parameters(conversation, parent_id, _SHORTEN if shorten else {})
            sent = await self.wait_for(
                self.chat.send_message(conversation.id, parent_id, message, parameters=parameters, key=uuid4().hex),
                strings.WAITING_FOR_MODEL,
            )
        self.attachments.clear()
        await self.cursor.move(sent.reply.id)
        await self.follow(sent.reply)
        return sent.reply

    async def _compare(
        self, message: Message | None, parent_id: str | None, shorten: bool = False, text: str | None = None
    ) -> None:
        """Sends the message after the current one, or replies to `parent_id` again."""
        from palaver.repl.commands.compare import send_compared, show_compared

        async with self._sending(text):
            after = parent_id
            if message is not None:
                after = (await self.wait_for(self.cursor.position(), strings.WAITING_FOR_SERVER)).message_id
            comparison = await send_compared(self, message, after, _SHORTEN if shorten else {})
        self.attachments.clear()
        await self.cursor.move(comparison.replies[0].reply_id)
        await show_compared(self, comparison)

    @asynccontextmanager
    async def _sending(self, text: str | None) -> AsyncIterator[None]:
        """A message that is not sent leaves no empty conversation, and its text goes back to the prompt."""
        is_new = self.cursor.conversation_id is None
        try:
            yield
        except BaseException as error:
            if text is not None and _is_unsent(error):
                self.initial_line = TypedLine(escape_message(text))
            if is_new and self.cursor.conversation_id is not None:
                with suppress(PalaverError, TimeoutError):
                    await asyncio.wait_for(self.cursor.discard_empty(), _DISCARD_SECONDS)
            raise

    async def edit_message(self, message_id: str, text: str) -> None:
        """Stores an edited message as a new branch, and replies to it if it is a user message."""
        try:
            message = await self.wait_for(self.chat.message(message_id), strings.WAITING_FOR_SERVER)
            media = [part for part in message.parts if isinstance(part, Blob)]
            editing = self.chat.edit_message(message_id, (*media, TextPart(text)))
            edited = await self.wait_for(editing, strings.WAITING_FOR_SERVER)
        except (PalaverError, Interrupted) as error:
            if _is_unsent(error):
                self.initial_line = TypedLine(escape_message(text), message_id)
            raise
        await self.cursor.move(edited.id)
        if edited.role is Role.USER:
            await self.generate_reply(edited.id)

    async def generate_reply(self, parent_id: str) -> None:
        """Generates a new reply to a message, or those of all columns."""
        if self.compare_mode is not None:
            await self._compare(None, parent_id)
            return
        with self.deferred_interrupts():
            conversation = await self.wait_for(self.cursor.ensure_conversation(), strings.WAITING_FOR_SERVER)
            parameters = await self.turn_parameters(conversation, parent_id)
            reply = await self.wait_for(
                self.chat.start_reply(conversation.id, parent_id, parameters=parameters, key=uuid4().hex),
                strings.WAITING_FOR_MODEL,
            )
            await self.cursor.move(reply.id)
            await self.follow(reply)
        await self.follow_tools(reply)

    async def turn_parameters(
        self, conversation: Conversation, parent_id: str | None, overrides: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """The parameters of a turn after `parent_id`: the overrides, and that the user is at a terminal."""
        added = add_terminal_variable(self.chat, parent_id, conversation.parameters, overrides)
        return await self.wait_for(added, strings.WAITING_FOR_MODEL)

    async def follow_tools(self, reply: StoredMessage, is_shown: bool = True) -> None:
        """Asks about the tool calls of a reply, and follows the replies to their results. `is_shown`: the calls are."""
        from palaver.repl.tool_calls import follow_round

        following = await follow_round(self, reply, is_shown)
        while following is not None:
            with self.deferred_interrupts():
                await self.follow(following)
            following = await follow_round(self, following)

    @contextmanager
    def deferred_interrupts(self) -> Iterator[None]:
        """Inside the context, Ctrl+C between two awaited operations acts on the next one. It never ends the program."""
        with self.lines.watch_keys(KeyActions(self._defer_interrupt)):
            try:
                yield
            finally:
                self._interrupted = False

    def _defer_interrupt(self) -> None:
        self._interrupted = True

    async def follow(self, reply: StoredMessage, last_event: int = 0) -> None:
        """Shows the reply while it streams, from the event after `last_event`."""
        speech = await self._start_speech(reply.id, last_event)
        view = self.create_view(last_event)
        follower = TurnFollower(self.chat, view, self.lines, speech, self.screen.clear)
        ending = await follower.follow(reply.id, stop=self._interrupted)
        self.stopped_at = follower.stopped_at
        self.thinking_display = (
            follower.view.thinking_display if isinstance(follower.view, ReplyView) else self.thinking_display
        )
        self.succeeded = self.succeeded and not isinstance(ending, Failed)
        after = None if ending is None else (await self.chat.message(reply.id)).reply
        is_full = await fills_context(self.chat, after)
        if ending is not None and self.screen.is_live:
            before, first = reply.reply if last_event else None, follower.view.time_to_first_token
            line = statistics_line(ending, first, before, after, self.screen.width, is_full)
            self.screen.show(Text(line, style="error" if isinstance(ending, Failed) else "note"), Text())
        if follower.dropped:
            await self.drop_reply()
        elif is_full:
            if not self.screen.is_live:
                self.screen.note(strings.CONTEXT_FULL)
        elif ending is not None:
            await warn_context(self, ending)

    async def _start_speech(self, reply_id: str, last_event: int) -> SpokenReply | None:
        """A voice that fails takes nothing from the text."""
        try:
            return await self._voice.speak_reply(reply_id, last_event) if self._voice is not None else None
        except PalaverError as error:
            self.screen.note(strings.VOICE_FAILED.format(reason=error))
            return None

    @property
    def voice(self) -> SessionVoice:
        """Created on first use: most sessions do not speak, and the import is expensive."""
        from palaver.repl.voice import SessionVoice

        if self._voice is None:
            self._voice = SessionVoice(self.settings.folder, self.screen.note)
        return self._voice

    async def stop_speech(self) -> None:
        """Stops the sound of an interactive session; a pipe waits until the sound ends."""
        if self._voice is not None:
            if not self.lines.is_interactive:
                await self._voice.wait()
            self._voice.stop()

    async def show_picture(self, data: bytes) -> None:
        """Draws a picture where the terminal can."""
        from palaver.media import MediaDecoder
        from palaver.repl.pictures import encode_picture, picture_protocol

        protocol = picture_protocol(os.environ)
        if protocol is None or not self.screen.is_live:
            return
        if self._decoder is None:
            self._decoder = MediaDecoder()
        pixels = await asyncio.to_thread(self._decoder.picture, data)
        self.screen.console.file.write(encode_picture(pixels, protocol) + "\n")
        self.screen.console.file.flush()

    async def close(self) -> None:
        if self._decoder is not None:
            await asyncio.to_thread(self._decoder.close)
        await self.stop_speech()
        if self._voice is not None:
            await self._voice.close()

    def create_view(self, last_event: int = 0) -> TurnView:
        if self.screen.is_live:
            return ReplyView(self.screen, self.thinking_display, last_event=last_event)
        hidden = self.thinking_display is ThinkingDisplay.HIDDEN
        return PlainView(PlainPrinter(sys.stdout, None if hidden else sys.stderr), last_event)

    async def drop_reply(self) -> None:
        """Moves back to the user's message. The reply stays in the tree."""
        self.stopped_at = float("-inf")
        reply = await self.cursor.last_message(Role.ASSISTANT)
        path = await self.cursor.path()
        if reply is None or path[-1].id != reply.id or reply.parent_id is None:
            return
        await self.cursor.move(reply.parent_id)
        self.screen.note(strings.DROPPED)

    async def wait_for(self, awaitable: Awaitable[T], description: str) -> T:
        """Awaits the result and shows a status line meanwhile. Ctrl+C cancels and raises Interrupted."""
        task = asyncio.ensure_future(awaitable)
        started_at = time.monotonic()
        loading: asyncio.Task[str] | None = None
        note = ""
        try:
            with self.lines.watch_keys(KeyActions(task.cancel, on_clear=self.screen.clear)):
                if self._interrupted:
                    task.cancel()
                while not (await asyncio.wait([task], timeout=0.25))[0]:
                    loading = loading or asyncio.ensure_future(self._loading_status())
                    await asyncio.wait([task, loading], timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                    if loading.done():  # it is not while the server is away
                        note, loading = loading.result(), None
                    self.screen.update((), [waiting_line(note or description, time.monotonic() - started_at)])
        finally:
            if loading is not None:
                loading.cancel()
        self.screen.update(())
        if task.cancelled():
            raise Interrupted
        return task.result()

    async def _loading_status(self) -> str:
        """The first model of those that the next turn uses which is being loaded."""
        columns = () if self.compare_mode is None else self.compare_mode.columns
        try:
            own = (await self.cursor.settings()).parameters
        except PalaverError:  # the awaited operation reports it
            return ""
        named = [own, *(column.parameters for column in columns)]
        for name in dict.fromkeys(("", *(parameters.get("model") or "" for parameters in named))):
            with suppress(PalaverError):  # the turn reports it
                card = await self.chat.model(name)
                if card.state is ModelState.LOADING:
                    return loading_line(card)
        return ""

    # opening

    async def open_initial(self) -> None:
        """Opens the conversation that the command line names. A conversation that does not exist is an error."""
        if self.settings.conversation is not None:
            conversation = await find_conversation(self.chat, self.settings.conversation)
            await self._report_errors(lambda: self.open(conversation.id))
        elif self.settings.resume:
            newest = await self.chat.conversations(limit=1)
            if newest:
                await self._report_errors(lambda: self.open(newest[0].id))
            else:
                self.screen.note(strings.FIRST_CONVERSATION)
        if self.cursor.conversation_id is not None and self.settings.system is not None:
            await self.cursor.set_system(self.settings.system)
        if self.cursor.conversation_id is not None and self.settings.parameters:
            await self.cursor.set_parameters(**self.settings.parameters)

    async def open(self, id: str) -> None:
        """Opens a conversation, shows its end, and follows a reply that is still running."""
        from palaver.repl.commands.branches import show_end

        await self.cursor.open(id)
        running = await self.cursor.running_reply()
        await show_end(self, without_last=running is not None)
        if running is not None:
            await self.follow(running)
            await self.follow_tools(running)


def _is_unsent(error: BaseException) -> bool:
    """Whether a message that failed with this error could be sent as it is. Where the model fails, a command comes
    first: its line must be empty. A prompt that is too long has choices."""
    if isinstance(error, RequestError):
        return isinstance(error, NotFound | Conflict)
    return isinstance(error, Interrupted) or (isinstance(error, PalaverError) and not isinstance(error, ModelError))


async def run(chat: Chat, settings: SessionSettings) -> bool:
    """Runs a session on stdin and stdout, interactive or piped. Returns whether every line succeeded."""
    from palaver.repl.commands import table

    input_is_tty, output_has_cursor = sys.stdin.isatty(), has_cursor(sys.stdout)
    live = input_is_tty and output_has_cursor and not settings.plain
    screen = Screen(console(sys.stdout if live else sys.stderr), live)
    session = Session(chat, settings, screen, table())
    try:
        if input_is_tty and has_cursor(sys.stdout if output_has_cursor else sys.stderr):
            from palaver.repl.interactive import run_interactive

            await run_interactive(session)
        else:
            session.lines = StreamLineSource(sys.stdin, sys.stderr if input_is_tty else None)
            await _run_streamed(session)
    finally:
        await session.close()
    return session.succeeded


async def _run_streamed(session: Session) -> None:
    card: ModelCard = await session.chat.wait_until_ready()
    if session.lines.is_interactive:
        session.screen.show(*first_screen(card, session.settings.is_attached), *ready_lines(card))
    await session.open_initial()
    await session.run()
