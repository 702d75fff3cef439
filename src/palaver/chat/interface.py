"""`Chat`: the interface of all front-ends, the same in-process (`LocalChat`) and over HTTP (`HttpChat`).

Writes name their parent and may have an idempotency key. A turn is identified by the id of its reply. It runs
independently of its subscribers, who may reconnect with the number of the last event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from palaver.chat.turn_log import LogEntry
from palaver.encoding import Logprob
from palaver.formats.facts import Switch
from palaver.messages import Message, Part
from palaver.sampling import Sampling
from palaver.store import Blob, Conversation, Cursor, Preset, SearchHit, StoredMessage, TreeNode
from palaver.store.comparisons import Comparison, TallyRow
from palaver.store.records import ConversationDefaults
from palaver.store.share_links import Share
from palaver.store.tool_rounds import ToolRound
from palaver.store.tool_rules import ToolRule
from palaver.tools.config import ServerConfig
from palaver.tools.servers import ServerCard, ServerResource
from palaver.transcripts.transcript import SkippedConversation

if TYPE_CHECKING:
    from palaver.chat.reply_request import PartialReply
    from palaver.chat.subscription import FollowedReply
    from palaver.transcripts.preferences import PreferenceFile


class ModelState(StrEnum):
    NONE = "none"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    AVAILABLE = "available"
    """Not in memory; it is loaded when a reply needs it."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model: the one in use, one being loaded, or one that can be asked for. Fields that only a loaded model has are
    empty until then."""

    name: str
    state: ModelState
    progress: float | None = None
    """From 0 to 1 while it loads; None if it is not known."""
    note: str = ""
    """The current step while it loads, or the reason why loading failed. On the card of a model in use: why another
    one could not replace it."""
    context_length: int = 0
    device: str = ""
    dtype: str = ""
    reuse: str = ""
    """How the prefix cache works for this model."""
    exactness: str = ""
    """What the exact logits of a reply depend on."""
    steps: str = ""
    """The code that computes decoding steps, and why it is not compiled code."""
    fingerprint: str = ""
    """The fingerprint of the engine, which is stored with each reply."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What the engine can't do (`engines.base.Capability`), and why."""
    block_length: int | None = None
    """Diffusion models: the tokens of a block. None: the model writes token by token."""
    defaults: Sampling = field(default_factory=Sampling)
    thinks: bool = False
    """Whether the chat format has a thinking phase."""
    switches: tuple[Switch, ...] = ()
    """The variables that the chat template really uses."""
    takes_tools: bool = False
    media: tuple[str, ...] = ()
    """The media that it accepts besides text: image, audio, video."""
    notices: tuple[str, ...] = ()
    """Notices for the user, such as a chat template that could not be learned completely."""


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    token_id: int
    text: str
    logprob: Logprob


@dataclass(frozen=True, slots=True)
class ReplyToken:
    """One token of a reply as text. `logprob` is None for a token that was not sampled."""

    token_id: int
    text: str
    logprob: Logprob | None
    alternatives: tuple[TokenAlternative, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextUsage:
    """How full the context is: the tokens of the next turn's prompt, and the model's limit."""

    used: int
    limit: int
    cached: int = 0
    """The tokens of the last turn's prompt that were in the cache."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message, and the reply that was started to it."""

    message: StoredMessage
    reply: StoredMessage


@dataclass(frozen=True, slots=True)
class StartedReplies:
    """Replies that were started to one message, and the messages that were stored before them."""

    conversation_id: str
    messages: tuple[StoredMessage, ...]
    replies: tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One reply of a comparison to start."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of its turn, which override those of the conversation."""
    name: str = ""
    """What it is called; empty: the model and the parameters."""


@dataclass(frozen=True, slots=True)
class ConversationChange:
    """A change in a conversation, for clients that show it."""

    conversation_id: str
    what: str
    """created, changed, deleted, message, turn (started or continued), ended, tools (the tool calls of a reply),
    comparison (replies are compared, or one was chosen); or missed, without a conversation: some changes were lost, so
    reload everything."""
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class ImportReport:
    conversations: tuple[Conversation, ...]
    skipped: tuple[SkippedConversation, ...] = ()
    """What could not be imported, and why."""


class Remember(StrEnum):
    ONCE = "once"
    TOOL = "tool"
    """The tool, in this conversation."""
    SERVER = "server"
    """All tools of the server."""


@dataclass(frozen=True, slots=True)
class CallDecision:
    """What the user decided about a call that waits."""

    position: int
    allowed: bool
    arguments: str | None = None
    """The arguments to run it with, as a JSON object, instead of those that the model wrote."""
    remember: Remember = Remember.ONCE
    reason: str = ""
    """Why it was denied, for the model."""


class Chat(Protocol):
    """The conversations of one user, and the model. Every method may raise a PalaverError."""

    # the model
    async def model(self, name: str = "") -> ModelCard:
        """The model of that name or alias; without one, the model that is being loaded or in use."""
        ...

    async def models(self) -> tuple[str, ...]:
        """The names of the models that can be asked for, by the parameter `model` of a turn or a conversation."""
        ...

    async def model_cards(self) -> tuple[ModelCard, ...]:
        """A card for each of them. Those that were never loaded say what can be read from their files."""
        ...

    async def load_model(self, name: str) -> ModelCard:
        """Starts loading another model and returns at once. It is then the model in use; the turns of the others go on.
        If it can't be loaded the current model stays, and the card's note says why."""
        ...

    async def unload_model(self) -> ModelCard: ...

    async def wait_until_ready(self) -> ModelCard:
        """Waits until no model is being loaded. Raises the error of the load if no model is in use then."""
        ...

    # conversations
    async def create_conversation(
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
        pinned: bool | None = None,
    ) -> tuple[Conversation, ...]:
        """The newest first; `before` is the id of the last conversation of the previous page. `pinned` selects the
        pinned ones, or the others."""
        ...

    async def update_conversation(
        self,
        id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
        pinned: bool | None = None,
    ) -> Conversation:
        """Sets the given fields. `parameters` replaces all parameters; `palaver.chat.parameters` has their names."""
        ...

    async def delete_conversation(self, id: str) -> None: ...

    async def restore_conversation(self, id: str) -> Conversation: ...

    async def clear_cache(self, id: str) -> None:
        """Frees the conversation's part of the KV cache. The conversation itself stays.

        Cache that other conversations share, and that of a running reply, stays too.
        """
        ...

    async def tags(self) -> tuple[str, ...]: ...

    async def search(self, query: str, limit: int = 20) -> tuple[SearchHit, ...]: ...

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[ConversationChange]]:
        """The changes of the user's conversations from now on, by any client."""
        ...

    # presets
    async def presets(self) -> tuple[Preset, ...]: ...

    async def save_preset(self, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        """Replaces a preset of that name. With an empty `system`, the preset leaves the system prompt as it is."""
        ...

    async def delete_preset(self, name: str) -> None: ...

    async def defaults(self) -> ConversationDefaults:
        """The settings that new conversations begin with on the page."""
        ...

    async def save_defaults(self, system: str, parameters: Mapping[str, Any]) -> ConversationDefaults: ...

    # the tree
    async def message(self, id: str) -> StoredMessage: ...

    async def path(self, leaf: str) -> tuple[StoredMessage, ...]:
        """The branch from the root to this message."""
        ...

    async def siblings(self, id: str) -> tuple[StoredMessage, ...]: ...

    async def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]: ...

    async def previews(self, conversation_id: str) -> Mapping[str, str]:
        """The beginning of every message, by its id."""
        ...

    async def newest_leaf(self, conversation_id: str, start: str | None = None) -> str | None: ...

    async def append_message(
        self, conversation_id: str, parent: str | None, message: Message, *, key: str | None = None
    ) -> StoredMessage:
        """Adds a message to the tree without starting a reply."""
        ...

    async def edit_message(
        self, message_id: str, parts: Iterable[Part | Blob], *, key: str | None = None
    ) -> StoredMessage:
        """Adds an edited copy of the message as a sibling. An edited reply can be continued."""
        ...

    # cursors
    async def cursor(self, conversation_id: str, client: str) -> Cursor: ...

    async def move_cursor(self, conversation_id: str, client: str, to: str | None) -> Cursor: ...

    async def undo(self, conversation_id: str, client: str) -> Cursor: ...

    async def redo(self, conversation_id: str, client: str) -> Cursor: ...

    # turns
    async def send_message(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> SentMessage:
        """Stores a message and starts the reply to it.

        Nothing is written if the request is refused, such as for a full context or a parameter out of bounds.
        """
        ...

    async def start_reply(
        self,
        conversation_id: str,
        parent: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> StoredMessage:
        """Starts a reply to a message. Another reply to the same message is a retry."""
        ...

    async def continue_reply(self, reply_id: str, *, key: str | None = None) -> StoredMessage:
        """Continues a reply that was stopped, cut, interrupted, failed, edited or imported, or its tool calls.

        Continues the same message if it has no children and its tokens are known; else starts a sibling with the same
        beginning.
        """
        ...

    async def fork_reply(
        self, reply_id: str, tokens: int, instead: int | None = None, *, key: str | None = None
    ) -> StoredMessage:
        """Starts a sibling with the reply's first tokens, then the token `instead`. The seed stays the same. Without
        `instead` the rest is sampled again with another seed."""
        ...

    def events(self, reply_id: str, after: int = 0) -> AbstractAsyncContextManager[AsyncIterator[LogEntry]]:
        """Subscribes to the turn's events after that number, up to its end. An ended turn gives all its events."""
        ...

    async def stop_reply(self, reply_id: str) -> None:
        """Stops the reply and keeps its text, or stops its tool calls. Does nothing for a turn that is complete."""
        ...

    async def answer_now(self, reply_id: str) -> None:
        """Closes an open thought, so that the answer comes next."""
        ...

    # comparisons
    async def compare(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message | None,
        columns: Sequence[Column],
        *,
        blind: bool = False,
        key: str | None = None,
    ) -> Comparison:
        """Stores a message and starts a reply to it for each column; without a message, replies to `parent`.

        Nothing is written if one of the requests is refused. `blind`: the order of the columns is random, and their
        names are empty until the choice.
        """
        ...

    async def comparison(self, id: str) -> Comparison: ...

    async def comparisons(self, conversation_id: str) -> tuple[Comparison, ...]:
        """The oldest first."""
        ...

    async def choose_reply(self, comparison_id: str, reply_id: str | None) -> Comparison:
        """Records which reply is preferred, or that none is, and makes its branch the head. It may be changed."""
        ...

    async def tally(self) -> tuple[TallyRow, ...]:
        """How often the replies of each name were compared and chosen."""
        ...

    async def export_preferences(self, conversation_id: str | None = None) -> PreferenceFile:
        """The choices as JSONL for preference training, of one conversation or of all."""
        ...

    # tools
    async def tool_servers(self, connect: bool = True) -> tuple[ServerCard, ...]:
        """The tool servers of this user. `connect`: connects to those that are not connected, and waits for it."""
        ...

    async def add_tool_server(self, config: ServerConfig) -> ServerCard:
        """Adds a tool server. Over HTTP only one with a URL, at a public address: a command is code that runs."""
        ...

    async def remove_tool_server(self, name: str) -> None: ...

    async def start_sign_in(self, server: str, redirect_uri: str) -> str:
        """Begins to sign this user in to a tool server (OAuth). Returns the URL to open in a browser, which comes back
        to `redirect_uri` with a state and a code, for `finish_sign_in`."""
        ...

    async def finish_sign_in(self, state: str, code: str, issuer: str | None = None) -> ServerCard: ...

    async def tool_rules(self) -> tuple[ToolRule, ...]:
        """What this user decided about tools and servers for the future."""
        ...

    async def forget_tool_rules(self, name: str | None = None, conversation_id: str | None = None) -> int:
        """Takes decisions back: all, those about a tool or server, or those in a conversation. Returns how many."""
        ...

    async def tool_resources(self, server: str) -> tuple[ServerResource, ...]:
        """The resources and prompts of a tool server, to be attached to a message."""
        ...

    async def read_tool_resource(self, server: str, name: str, arguments: Mapping[str, str] | None = None) -> bytes:
        """The contents of a resource, by its URI, or the text of a prompt, by its name: a file to be attached."""
        ...

    async def tool_round(self, reply_id: str) -> ToolRound | None:
        """The tool calls of a reply that run here, and their results. None if it has none."""
        ...

    async def decide_calls(self, reply_id: str, decisions: Sequence[CallDecision]) -> ToolRound:
        """Approves or denies calls that wait. Approved calls run; once all have a result, the next reply starts."""
        ...

    async def tokens(self, reply_id: str) -> tuple[ReplyToken, ...]: ...

    async def raw_text(self, reply_id: str) -> str:
        """The reply's text as generated, including special tokens."""
        ...

    async def context_usage(
        self, conversation_id: str, leaf: str | None, parameters: Mapping[str, Any] | None = None
    ) -> ContextUsage: ...

    # files
    async def export_conversation(self, conversation_id: str, form: str, leaf: str | None = None) -> str:
        """jsonl, branches, tree, markdown or sharegpt."""
        ...

    async def import_conversations(self, file: bytes) -> ImportReport:
        """Imports conversations from a file of any supported format. Importing the same file again adds nothing."""
        ...

    async def put_blob(self, data: bytes, name: str = "") -> Blob:
        """Stores media for a message. Raises BadMedia."""
        ...

    async def blob(self, digest: str) -> bytes: ...

    async def read_document(self, data: bytes, name: str) -> str:
        """The text of a PDF, DOCX, HTML or text file, as it is attached to a message. Raises BadMedia."""
        ...

    async def transcribe(self, data: bytes, name: str = "", language: str = "") -> str:
        """The words of sound, or of a video's sound. Raises BadMedia, or NoTranscriber."""
        ...


class ServerChat(Chat, Protocol):
    """A `Chat` in the process of the model, for the APIs of a server: tokens and requests do not go over HTTP."""

    async def reply_stream(self, reply_id: str, *, raw: bool = False, wait: bool = True) -> FollowedReply:
        """The turn as a reply stream from its beginning. Closing the stream does not stop the turn.

        `raw`: thinking and its markers are part of the text. `wait`: first waits until a reply that a dead process left
        is resumed. A reply of another tokenizer is a snapshot.
        """
        ...

    async def start_replies(
        self,
        conversation: Conversation | None,
        parent: str | None,
        messages: Sequence[Message],
        choices: Sequence[Mapping[str, Any]],
        *,
        system: str = "",
        partial: PartialReply | None = None,
        key: str | None = None,
    ) -> StartedReplies:
        """Stores the messages and starts a reply to the last one for each of the `choices`, which are parameters.

        Nothing is written if the request is refused. Without a conversation, one is created with the prompt `system`.
        `partial` is a beginning that all replies continue. The first choice becomes the head.
        """
        ...

    async def load_messages(self, path: Sequence[StoredMessage]) -> tuple[Message, ...]:
        """The messages with the contents of their files."""
        ...

    async def past_replies(self, path: Sequence[StoredMessage], model: str = "") -> tuple[tuple[int, ...] | None, ...]:
        """The token ids of the replies on the path; None for those of another tokenizer than the model's."""
        ...

    async def all_messages(self, conversation_id: str) -> tuple[StoredMessage, ...]: ...

    async def annotate_reply(
        self, reply_id: str, note: Mapping[str, Any], next_parameters: Mapping[str, Any] | None = None
    ) -> StoredMessage:
        """Stores an API's note with a reply, and the parameters of the replies that follow its tool calls."""
        ...

    async def share_branch(
        self, leaf_id: str, seconds: int, *, thoughts: bool = False, tools: bool = False
    ) -> tuple[Share, str]:
        """Creates a link to a read-only page of the branch that ends with this message. Returns its secret, too."""
        ...

    async def shares(self, conversation_id: str) -> tuple[Share, ...]:
        """The links of a conversation that are valid, the oldest first."""
        ...

    async def revoke_share(self, id: str) -> None: ...

    async def lend_tool_server(self, config: ServerConfig, name: str = "") -> str:
        """Makes a server at a public URL usable for turns that name it, without storing it. Returns that name."""
        ...
