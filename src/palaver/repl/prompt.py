"""The line at which a person types."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import CompleteStyle

from palaver.repl.keys import Editing, bindings, watching
from palaver.repl.lines import Last, Typed, Watched

MARK = "› "


class Prompt:
    """A line editor with history and completion. Ctrl+D on an empty line ends it."""

    is_person = True

    def __init__(
        self,
        input: Input,
        output: Output,
        history: History,
        completer: Completer,
        stopped_at: Callable[[], float],
        toggled: Callable[[], None],
    ) -> None:
        self._input = input
        self._output = output
        self._editing = Editing()
        self._session: PromptSession[str] = PromptSession(
            self._message,
            input=input,
            output=output,
            history=history,
            completer=completer,
            complete_while_typing=Condition(self._is_command),
            complete_style=CompleteStyle.COLUMN,
            reserve_space_for_menu=6,
            key_bindings=bindings(self._editing, stopped_at, toggled),
            multiline=True,
            prompt_continuation="  ",
            enable_suspend=True,
        )
        self._asking: PromptSession[str] = PromptSession(input=input, output=output)

    async def read(self, begun: Typed | None = None, last: Last | None = None) -> Typed:
        self._editing.last = last
        self._editing.edited = begun.edited if begun else None
        text = await self._session.prompt_async(default=begun.text if begun else "", handle_sigint=False)
        return Typed(text, self._editing.edited)

    async def ask(self, question: str) -> str:
        try:
            return await self._asking.prompt_async(f"{question} ", handle_sigint=False)
        except KeyboardInterrupt:
            raise EOFError from None

    def tell(self, standing: str) -> None:
        """What goes on in the background, below the line; nothing takes it away."""
        self._session.bottom_toolbar = standing or None
        self._session.app.invalidate()

    def watching(self, watched: Watched) -> AbstractContextManager[None]:
        return watching(self._input, self._output, watched)

    def _message(self) -> StyleAndTextTuples:
        return [("bold", f"edit {MARK}" if self._editing.edited else MARK)]

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")
