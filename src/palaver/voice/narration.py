"""An answer as it is read aloud: fed with text as it streams, it gives clauses in words.

Only the answer is fed to it. What a model thinks and the calls it makes are events of other kinds, so they can't be
spoken by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass

from palaver.voice.clauses import Piece, Splitter
from palaver.voice.languages import language_of
from palaver.voice.wording import words


@dataclass(frozen=True, slots=True)
class Clause:
    text: str
    """As the answer has it: the texts of all clauses joined are the answer."""
    words: str
    """What is said; empty where there is nothing to say, as of code."""
    language: str


class Narration:
    def __init__(self, language: str = "en") -> None:
        """`language`: what is assumed where the letters tell nothing."""
        self._language = language
        self._splitter = Splitter()

    def feed(self, text: str) -> list[Clause]:
        """The clauses that this text made whole."""
        return [self._clause(piece) for piece in self._splitter.feed(text)]

    def close(self) -> list[Clause]:
        return [self._clause(piece) for piece in self._splitter.close()]

    def _clause(self, piece: Piece) -> Clause:
        language = language_of(piece.text, self._language)
        said = "" if piece.is_code else words(piece.text, language, piece.begins_line)
        return Clause(piece.text, said, language)
