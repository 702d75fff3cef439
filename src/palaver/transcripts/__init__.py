"""Conversations as files: written for training, for reading and for other programs, and read from theirs."""

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
