"""A conversation line by line: what was said so far, and the few commands that a plain prompt needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TextIO

from palaver.chat import Chat, Reply, Request, Turn, draw_seed
from palaver.errors import NothingToContinue, PalaverError
from palaver.formats.options import Options
from palaver.messages import Message, user
from palaver.repl.plain import PlainPrinter, show_turn
from palaver.sampling import Sampling

HELP = """\
Ctrl+C stops a reply and keeps it; /continue goes on exactly where it stopped.
/retry asks for another reply, /new starts over, /quit leaves. A line //like this sends /like this."""


@dataclass
class Conversation:
    """The branch that is being talked on. `reply` is the last one, and not yet in `messages`."""

    chat: Chat
    sampling: Sampling
    options: Options
    system: tuple[Message, ...] = ()
    seeded: bool = False
    messages: list[Message] = field(default_factory=list)
    reply: Reply | None = None

    def say(self, text: str) -> Turn:
        if self.reply is not None:
            self.messages.append(self.reply.message)
            self.reply = None
        self.messages.append(user(text))
        return self._turn()

    def retry(self) -> Turn:
        if not self.messages:
            raise NothingToContinue("There is no reply to try again.")
        return self._turn()

    def go_on(self) -> Turn:
        if self.reply is None:
            raise NothingToContinue("There is no reply to continue.")
        return self.chat.continued(self.reply)

    def forget(self) -> None:
        self.messages.clear()
        self.reply = None

    def _turn(self) -> Turn:
        seed = self.sampling.seed if self.seeded else draw_seed()
        sampling = replace(self.sampling, seed=seed)
        return self.chat.turn(Request((*self.system, *self.messages), sampling, options=self.options))


class LineChat:
    """Reads a line a turn and prints the replies, until the lines end."""

    def __init__(self, conversation: Conversation, lines: Iterator[str], printer: PlainPrinter, notes: TextIO) -> None:
        self._conversation = conversation
        self._lines = lines
        self._printer = printer
        self._notes = notes
        self._failed = False

    async def run(self) -> bool:
        """Whether every turn went well."""
        for line in self._lines:
            if not line.strip():
                continue
            if line.strip() in ("/quit", "/exit", "/q"):
                break
            await self._take(line)
        return not self._failed

    async def _take(self, line: str) -> None:
        try:
            turn = self._turn_for(line)
            if turn is not None:
                self._conversation.reply = await show_turn(turn, self._printer)
        except PalaverError as error:
            self._failed = True
            self._drop_unanswered()
            print(f"palaver: {error}", file=self._notes)

    def _turn_for(self, line: str) -> Turn | None:
        if line.startswith("//"):
            return self._conversation.say(line[1:])
        command = COMMANDS.get(line.strip())
        if command is not None:
            return command(self._conversation, self._notes)
        return self._conversation.say(line)

    def _drop_unanswered(self) -> None:
        """A message that could not be answered is not part of what the next one follows on."""
        if self._conversation.reply is None and self._conversation.messages:
            self._conversation.messages.pop()


def _help(_: Conversation, notes: TextIO) -> None:
    print(HELP, file=notes)


def _new(conversation: Conversation, notes: TextIO) -> None:
    conversation.forget()
    print("A new conversation.", file=notes)


COMMANDS: dict[str, Callable[[Conversation, TextIO], Turn | None]] = {
    "/help": _help,
    "/new": _new,
    "/continue": lambda conversation, _: conversation.go_on(),
    "/retry": lambda conversation, _: conversation.retry(),
}


def typed_lines(prompt: str = "> ") -> Iterator[str]:
    """Lines from a person at a terminal; Ctrl+C clears the line, Ctrl+D ends."""
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def piped_lines(stream: TextIO) -> Iterator[str]:
    for line in stream:
        yield line.rstrip("\n")
