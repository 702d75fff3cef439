"""Conversations as files: written for training, for reading and for other programs, and read from theirs."""

from palaver.transcripts.keeping import Kept, keep, take
from palaver.transcripts.reading import Format, read, write
from palaver.transcripts.transcript import Entry, Read, Skipped, Transcript

__all__ = ["Entry", "Format", "Kept", "Read", "Skipped", "Transcript", "keep", "read", "take", "write"]
