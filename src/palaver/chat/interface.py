"""Chat: the one interface that front-ends use, the same in-process and over HTTP.

Writes name their parent and may carry a key that makes them happen once. A turn is named by the id of its reply; it
belongs to the system, and whoever reads it may leave and come back by number.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from palaver.chat.turn_log import LogEntry
from palaver.formats.switches import Switch
from palaver.messages import Message, Part
from palaver.sampling import Sampling
from palaver.store import Blob, Conversation, Cursor, Preset, SearchHit, StoredMessage, TreeNode


class ModelState(StrEnum):
    NONE = "none"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model in use, or on its way. What is known only of a loaded model is empty until then."""

    name: str
    state: ModelState
    progress: float | None = None
    """From 0 to 1 while it loads, where that is known."""
    note: str = ""
    """What it is doing while it loads, or why it could not be loaded."""
    context_length: int = 0
    device: str = ""
    dtype: str = ""
    reuse: str = ""
    """What is reused of what was computed before."""
    exactness: str = ""
    """What the bits of a reply depend on."""
    steps: str = ""
    """Whose code computes the next tokens, and why not compiled code."""
    fingerprint: str = ""
    """What computes its replies: stored with each of them."""
    defaults: Sampling = field(default_factory=Sampling)
    thinks: bool = False
    """Whether the format knows thoughts."""
    switches: tuple[Switch, ...] = ()
    """What the template really lets one choose."""
    takes_tools: bool = False
    media: tuple[str, ...] = ()
    """What it takes besides text: image, audio, video."""
    notices: tuple[str, ...] = ()
    """What a person should know, such as a template that teaches too little."""


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class ReplyToken:
    """One token of a reply as a person sees it. `logprob` is None for words that nobody drew."""

    token_id: int
    text: str
    logprob: float | None
    alternatives: tuple[TokenAlternative, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextUsage:
    """How full the context is: what the next turn's prompt would hold, and what the model can take."""

    used: int
    limit: int
    cached: int = 0
    """Of the last turn's prompt, how much had been computed before."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message and the reply that was begun to it."""

    message: StoredMessage
    reply: StoredMessage


@dataclass(frozen=True, slots=True)
class ConversationChange:
    """Something happened in a conversation: whoever shows it may look again."""

    conversation_id: str
    what: str
    """created, changed, deleted, message, turn (begun or gone on), ended; or missed, of no conversation in particular:
    what happened in a while is not known, look at everything again."""
    message_id: str | None = None


class Chat(Protocol):
    """One user's conversations and the model they are held with. Every method may raise a PalaverError."""

    # the model
    async def model(self) -> ModelCard: ...

    async def models(self) -> tuple[str, ...]:
        """The names of models that are at hand."""
        ...

    async def load(self, name: str) -> ModelCard:
        """Puts another model into use; running turns are parked and can be continued. Returns at once, loading."""
        ...

    async def unload(self) -> ModelCard: ...

    async def ready(self) -> ModelCard:
        """Waits until the model can be talked to; raises what loading raised."""
        ...

    # conversations
    async def create(
        self,
        *,
        title: str = "",
        system: str = "",
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        key: str | None = None,
    ) -> Conversation: ...

    async def conversation(self, id: str) -> Conversation: ...

    async def conversations(
        self,
        *,
        limit: int = 50,
        before: str | None = None,
        tag: str | None = None,
        title: str = "",
        deleted: bool = False,
    ) -> tuple[Conversation, ...]:
        """The newest first; `before` is the id of the last one of the page before."""
        ...

    async def change(
        self,
        id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
    ) -> Conversation:
        """Sets what is given. The parameters are set as a whole: see `palaver.chat.parameters` for their names."""
        ...

    async def delete(self, id: str) -> None: ...

    async def undelete(self, id: str) -> Conversation: ...

    async def forget(self, id: str) -> None:
        """Frees what the model keeps of the conversation to go on quickly; the conversation itself stays as it is.

        What other conversations share with it, and a reply that is running, are left alone.
        """
        ...

    async def tags(self) -> tuple[str, ...]: ...

    async def search(self, query: str, limit: int = 20) -> tuple[SearchHit, ...]: ...

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[ConversationChange]]:
        """What happens from now on in the user's conversations, whoever does it."""
        ...

    # what a user likes to set
    async def presets(self) -> tuple[Preset, ...]: ...

    async def save_preset(self, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        """In place of one of that name. An empty `system` says nothing of the system prompt."""
        ...

    async def delete_preset(self, name: str) -> None: ...

    # the tree
    async def message(self, id: str) -> StoredMessage: ...

    async def path(self, leaf: str) -> tuple[StoredMessage, ...]:
        """A branch: from the root to this message."""
        ...

    async def siblings(self, id: str) -> tuple[StoredMessage, ...]: ...

    async def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]: ...

    async def newest_leaf(self, conversation_id: str, start: str | None = None) -> str | None: ...

    async def append(
        self, conversation_id: str, parent: str | None, message: Message, *, key: str | None = None
    ) -> StoredMessage:
        """Puts a message into the tree without asking for a reply."""
        ...

    async def edit(self, message_id: str, parts: Iterable[Part | Blob], *, key: str | None = None) -> StoredMessage:
        """Another wording, as a sibling. An edited reply can be continued."""
        ...

    # where a client stands
    async def cursor(self, conversation_id: str, client: str) -> Cursor: ...

    async def move(self, conversation_id: str, client: str, to: str | None) -> Cursor: ...

    async def undo(self, conversation_id: str, client: str) -> Cursor: ...

    async def redo(self, conversation_id: str, client: str) -> Cursor: ...

    # turns
    async def say(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> SentMessage:
        """Puts a message into the tree, durably, and begins the reply to it. What can't be answered (a full context,
        a parameter out of bounds) is refused before anything is written."""
        ...

    async def reply(
        self,
        conversation_id: str,
        parent: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> StoredMessage:
        """Begins a reply under a message: a retry is a second one under the same."""
        ...

    async def go_on(self, reply_id: str, *, key: str | None = None) -> StoredMessage:
        """Continues a reply that was stopped, cut, interrupted, failed, edited or imported.

        The same message runs on, where nothing hangs on it and its tokens are known; else a sibling that begins with
        all it said.
        """
        ...

    async def fork(
        self, reply_id: str, tokens: int, instead: int | None = None, *, key: str | None = None
    ) -> StoredMessage:
        """A sibling that begins with the reply's first tokens, then `instead`, and goes on from there: the model is
        the same and so are its dice. Without `instead` the rest is drawn anew."""
        ...

    def events(self, reply_id: str, after: int = 0) -> AbstractAsyncContextManager[AsyncIterator[LogEntry]]:
        """The turn's events after that number, as they come, to its end. Of an ended turn: all there were."""
        ...

    async def stop(self, reply_id: str) -> None:
        """Keeps everything so far. The turn's last event tells when it has ended. A turn that is over stays so."""
        ...

    async def answer_now(self, reply_id: str) -> None: ...

    async def tokens(self, reply_id: str) -> tuple[ReplyToken, ...]: ...

    async def raw(self, reply_id: str) -> str:
        """The reply as the model wrote it, markers and all."""
        ...

    async def gauge(
        self, conversation_id: str, leaf: str | None, parameters: Mapping[str, Any] | None = None
    ) -> ContextUsage: ...

    # in and out
    async def export(self, conversation_id: str, form: str, leaf: str | None = None) -> str:
        """jsonl, branches, tree, markdown or sharegpt."""
        ...

    async def take_in(self, text: str) -> tuple[Conversation, ...]:
        """Imports a file's text, whichever of the known forms it has; the same text twice only once."""
        ...

    async def put_blob(self, data: bytes) -> str: ...

    async def blob(self, digest: str) -> bytes: ...
