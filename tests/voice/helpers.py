"""Splits texts into clauses, as streaming speech does."""

from __future__ import annotations

from palaver.voice.speech import Narration, SpokenClause


def split_clauses(text: str, pieces: list[str] | None = None, language: str = "en") -> list[SpokenClause]:
    narration = Narration(language)
    found = [clause for piece in pieces or [text] for clause in narration.feed(piece)]
    return found + narration.close()


def words(text: str, language: str = "en") -> list[str]:
    return [clause.words for clause in split_clauses(text, language=language) if clause.words]
