"""An answer that is JSON, without the code fence that models like to put around it."""

from __future__ import annotations

import re

_START = re.compile(r"\s*```[a-zA-Z]*[ \t]*\n")
_MAY_START = re.compile(r"\s*(`{0,3}|```[a-zA-Z]*[ \t]*)\Z")
_END = re.compile(r"\s*(`{1,3}\s*)?\Z")


class Unfenced:
    """Lets text through but for a fence around all of it."""

    def __init__(self) -> None:
        self._text = ""
        self._decided = False
        self._fenced = False

    def feed(self, text: str) -> str:
        self._text += text
        if not self._decided and not self._decide():
            return ""
        if not self._fenced:
            out, self._text = self._text, ""
            return out
        match = _END.search(self._text)
        at = match.start() if match else len(self._text)
        out, self._text = self._text[:at], self._text[at:]
        return out

    def end(self) -> str:
        """What was held back and is no fence."""
        rest, self._text = self._text, ""
        return "" if self._fenced and re.fullmatch(r"\s*```\s*", rest) else rest

    def _decide(self) -> bool:
        if match := _START.match(self._text):
            self._fenced, self._text = True, self._text[match.end() :]
        elif _MAY_START.match(self._text):
            return False
        self._decided = True
        return True
