"""The store: one object that gives access to conversations, messages, replies, users and search."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from platformdirs import user_data_path
from sqlalchemy import URL, text

from palaver.store.blobs import make_folder, open_blobs, restrict, restrict_tree
from palaver.store.comparisons import Comparisons
from palaver.store.conversations import Conversations, Cursors
from palaver.store.database import Database
from palaver.store.errors import translate_errors
from palaver.store.leases import Leases
from palaver.store.messages import Messages
from palaver.store.migrations import migrate
from palaver.store.notifications import Notifications
from palaver.store.replies import Replies
from palaver.store.search import MessageSearch
from palaver.store.share_links import Shares
from palaver.store.tool_rounds import ToolRounds
from palaver.store.tool_rules import ToolRules
from palaver.store.users import Defaults, Keys, Presets, RateLimits, Users

DATABASE = "palaver.db"
BLOBS = "blobs"
_SUBFOLDERS = (BLOBS, "holders", "servers")
_FILES = (f"{DATABASE}*", "token", "history*", "*.zip", "*.backup", "*.log")
"""Other files of a data folder whose permissions are restricted."""


class Store:
    """Conversations in a database and their media in a folder. Thread-safe and multi-process safe."""

    def __init__(self, database: Database, folder: Path, blobs: str | None = None) -> None:
        """Migrates the schema. `blobs`: where media are, if not in `folder`: see `open_blobs`. The store owns the
        database and closes it."""
        try:
            self.blobs = open_blobs(folder / BLOBS, blobs)
            migrate(database)
        except BaseException:
            database.close()
            raise
        self.database = database
        self.folder = folder
        self.users = Users(database)
        self.keys = Keys(database)
        self.presets = Presets(database)
        self.defaults = Defaults(database)
        self.rate_limits = RateLimits(database)
        self.conversations = Conversations(database, self.blobs)
        self.messages = Messages(database, self.blobs)
        self.notifications = Notifications(database)
        self.leases = Leases(database, folder / "holders", self.notifications)
        self.replies = Replies(database, self.blobs, self.leases)
        self.cursors = Cursors(database)
        self.tool_rounds = ToolRounds(database, self.leases)
        self.tool_rules = ToolRules(database)
        self.comparisons = Comparisons(database)
        self.shares = Shares(database)
        self.search = MessageSearch(database)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Raises StoreError if the database cannot be read."""
        with self.database.read_transaction() as connection:
            connection.execute(text("SELECT 1 FROM alembic_version"))

    def close(self) -> None:
        """Releases this store's leases: their running replies can be claimed by other processes."""
        self.leases.release()
        self.notifications.close()
        self.database.close()


def open_store(
    folder: Path | None = None,
    database: str | URL | None = None,
    lock_timeout: float = 5.0,
    blobs: str | None = None,
) -> Store:
    """Opens the store in `folder` (default: the user's data folder), with its own SQLite file or the database at a URL.

    `lock_timeout`: seconds to wait for a lock of another process. `blobs`: another folder for the media, or a URL.
    """
    place = data_folder(folder)
    return Store(Database(database_url(place, database), lock_timeout), place, blobs)


def has_store(folder: Path | None = None, database: str | URL | None = None) -> bool:
    """Whether there is a store to open. Creates nothing. A database at a URL counts as there, and so does a path that
    can't be read: opening it says why."""
    if database is not None:
        return True
    try:
        (_data_path(folder) / DATABASE).stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def data_folder(folder: Path | None = None) -> Path:
    """The data folder, by default the user's own. Created if missing, with permissions for its owner alone."""
    place = _data_path(folder)
    with translate_errors():
        make_folder(place)
        _restrict(place)
    return place


def _data_path(folder: Path | None) -> Path:
    return user_data_path("palaver", appauthor=False) if folder is None else folder


def _restrict(folder: Path) -> None:
    """Files of earlier versions have the permissions that the umask left."""
    restrict(folder)
    for name in _SUBFOLDERS:
        restrict_tree(folder / name)
    for pattern in _FILES:
        for path in folder.glob(pattern):
            restrict(path)


def database_url(folder: Path, database: str | URL | None = None) -> str | URL:
    return URL.create("sqlite", database=str(folder / DATABASE)) if database is None else database
