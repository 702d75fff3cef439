"""The store put together: one object that front-ends and turns are given."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from platformdirs import user_data_path
from sqlalchemy import URL, text

from palaver.store.blobs import Blobs, make_folder, restrict, restrict_tree
from palaver.store.conversations import Conversations
from palaver.store.cursors import Cursors
from palaver.store.database import Database
from palaver.store.errors import translated
from palaver.store.leases import Leases
from palaver.store.messages import Messages
from palaver.store.migrations import migrate
from palaver.store.replies import Replies
from palaver.store.search import MessageSearch
from palaver.store.users import Keys, Presets, Users

DATABASE = "palaver.db"
_SUBFOLDERS = ("blobs", "holders", "servers")
_FILES = (f"{DATABASE}*", "token", "history*", "*.zip", "*.backup", "*.log")
"""What may be in a data folder besides: backups and logs, too."""


class Store:
    """Conversations in a database and their media in a folder. Safe to use from many threads and processes."""

    def __init__(self, database: Database, folder: Path) -> None:
        """Brings the schema up to date. `folder` holds the blobs. The database is the store's to close."""
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        self.database = database
        self.folder = folder
        self.blobs = Blobs(folder / "blobs")
        self.users = Users(database)
        self.keys = Keys(database)
        self.presets = Presets(database)
        self.conversations = Conversations(database, self.blobs)
        self.messages = Messages(database, self.blobs)
        self.leases = Leases(database, folder / "holders")
        self.replies = Replies(database, self.blobs, self.leases)
        self.cursors = Cursors(database)
        self.search = MessageSearch(database)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Raises StoreError where the database can't be read."""
        with self.database.reading() as connection:
            connection.execute(text("SELECT 1 FROM alembic_version"))

    def close(self) -> None:
        """Replies that still run under a lease of this store can be taken over from now on."""
        self.leases.let_go()
        self.database.close()


def open_store(folder: Path | None = None, database: str | URL | None = None, wait: float = 5.0) -> Store:
    """The store in `folder` (by default the user's data folder), in a database of its own or at a URL.

    `wait`: for how many seconds another program's lock is waited for.
    """
    place = data_folder(folder)
    return Store(Database(database_url(place, database), wait), place)


def data_folder(folder: Path | None = None) -> Path:
    """The folder, or the user's own for this program; made where it isn't there, and out of reach of other users."""
    place = user_data_path("palaver", appauthor=False) if folder is None else folder
    with translated():
        make_folder(place)
        _restrict(place)
    return place


def _restrict(folder: Path) -> None:
    """Earlier versions left the permissions to the umask."""
    restrict(folder)
    for name in _SUBFOLDERS:
        restrict_tree(folder / name)
    for pattern in _FILES:
        for path in folder.glob(pattern):
            restrict(path)


def database_url(folder: Path, database: str | URL | None = None) -> str | URL:
    return URL.create("sqlite", database=str(folder / DATABASE)) if database is None else database
