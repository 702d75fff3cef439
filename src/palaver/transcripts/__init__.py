"""Transcripts: export of conversations to files, and import from Palaver's and other programs' formats."""

from palaver.transcripts.import_export import (
    ImportResult,
    TranscriptFormat,
    read_conversation,
    read_file,
    store_transcript,
    write_transcript,
)
from palaver.transcripts.transcript import ReadResult, SkippedConversation, Transcript, TranscriptEntry

__all__ = [
    "ImportResult",
    "ReadResult",
    "SkippedConversation",
    "Transcript",
    "TranscriptEntry",
    "TranscriptFormat",
    "read_conversation",
    "read_file",
    "store_transcript",
    "write_transcript",
]
