"""The store: conversations as trees of messages, replies with their tokens, blobs, users, search, backups."""

from palaver.store.blobs import Blob
from palaver.store.conversations import Cursor
from palaver.store.encoding import ReplySettings
from palaver.store.errors import (
    Conflict,
    Disconnected,
    DiskFull,
    LeaseLost,
    Locked,
    NotFound,
    StorageDisconnected,
    StoreError,
    TokenCountMismatch,
)
from palaver.store.leases import Lease
from palaver.store.messages import merge_user_messages, prompt_messages
from palaver.store.records import Conversation, Preset, ReplyStatus, StoredMessage, StoredReply, TreeNode, User
from palaver.store.replies import ReplyEnding
from palaver.store.reply_statements import TokenFrame
from palaver.store.search import SearchHit
from palaver.store.store import Store, open_store

__all__ = [
    "Blob",
    "Conflict",
    "Conversation",
    "Cursor",
    "Disconnected",
    "DiskFull",
    "Lease",
    "LeaseLost",
    "Locked",
    "NotFound",
    "Preset",
    "ReplyEnding",
    "ReplySettings",
    "ReplyStatus",
    "SearchHit",
    "StorageDisconnected",
    "Store",
    "StoreError",
    "StoredMessage",
    "StoredReply",
    "TokenCountMismatch",
    "TokenFrame",
    "TreeNode",
    "User",
    "merge_user_messages",
    "open_store",
    "prompt_messages",
]
