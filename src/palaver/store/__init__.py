"""Conversations that are not lost: trees of messages, replies with their tokens, blobs, search, backups."""

from palaver.store.blobs import Blob
from palaver.store.cursors import Cursor
from palaver.store.errors import Conflict, DiskFull, LeaseLost, Locked, NotFound, StoreError
from palaver.store.leases import Lease
from palaver.store.prompts import merged, prompt
from palaver.store.replies import Ending, Piece
from palaver.store.search import Hit
from palaver.store.settings import Settings
from palaver.store.store import Store, open_store
from palaver.store.values import Conversation, Node, Preset, Status, Stored, StoredReply, User

__all__ = [
    "Blob",
    "Conflict",
    "Conversation",
    "Cursor",
    "DiskFull",
    "Ending",
    "Hit",
    "Lease",
    "LeaseLost",
    "Locked",
    "Node",
    "NotFound",
    "Piece",
    "Preset",
    "Settings",
    "Status",
    "Store",
    "StoreError",
    "Stored",
    "StoredReply",
    "User",
    "merged",
    "open_store",
    "prompt",
]
