"""Every value of the HTTP API survives a round trip through JSON text."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from palaver import errors, events, messages, store
from palaver.chat import interface
from palaver.chat.turn_log import LogEntry
from palaver.constraints import Constraint
from palaver.encoding import adapter
from palaver.errors import BadParameter, ContextOverflow, EngineError, PalaverError, QueueFull
from palaver.formats.facts import Switch, SwitchKind
from palaver.sampling import Sampling
from palaver.server.errors import error_value
from palaver.store import Blob
from palaver.store.encoding import StoredPart
from palaver.store.errors import NotFound
from palaver.wire import (
    EditMessageRequest,
    ErrorBody,
    MessageSchema,
    StreamChange,
    StreamClosing,
    StreamItem,
    StreamOpened,
    TurnEvent,
)

TEXT = st.text(max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**53)
LOGPROB = st.floats(max_value=0, allow_nan=False)
TIME = st.datetimes(min_value=datetime(1971, 1, 1), timezones=st.just(UTC))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


PLAIN = (
    st.builds(messages.Text, TEXT)
    | st.builds(messages.Thinking, TEXT)
    | st.builds(messages.ToolCall, TEXT, TEXT, TEXT, st.booleans())
    | st.builds(messages.ToolResult, TEXT, TEXT, TEXT)
)
MEDIA = st.one_of(*(st.builds(kind, TEXT, st.binary()) for kind in (messages.Image, messages.Audio, messages.Video)))
BLOB = st.builds(Blob, st.sampled_from(["image", "audio", "video"]), TEXT, TEXT, COUNT)
MESSAGE = st.builds(messages.Message, st.sampled_from(messages.Role), several(PLAIN | MEDIA))
SAMPLING = st.builds(
    Sampling,
    temperature=FINITE,
    top_p=FINITE,
    min_p=FINITE,
    repetition_penalty=FINITE,
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    end_penalty=FINITE,
    logit_bias=several(st.tuples(COUNT, FINITE)),
    banned_strings=several(TEXT),
    stop=several(TEXT),
    seed=st.integers(0, 2**63 - 1),
    constraint=maybe(st.builds(Constraint, text=TEXT)),
)
SETTINGS = st.builds(
    store.ReplySettings,
    model=TEXT,
    sampling=SAMPLING,
    tokenizer=TEXT,
    options=OBJECT,
    tools=several(st.builds(messages.Tool, TEXT, TEXT, OBJECT)),
    choice=COUNT,
)
USAGE = st.builds(events.Usage, COUNT, COUNT, COUNT, COUNT)
REPLY = st.builds(
    store.StoredReply,
    status=st.sampled_from(store.ReplyStatus),
    settings=SETTINGS,
    usage=maybe(USAGE),
    timings=st.dictionaries(TEXT, FINITE, max_size=3),
    error=maybe(TEXT),
    started_at=maybe(TIME),
    ended_at=maybe(TIME),
)
STORED = st.builds(
    store.StoredMessage,
    TEXT,
    TEXT,
    maybe(TEXT),
    st.sampled_from(messages.Role),
    several(PLAIN | BLOB),
    TIME,
    maybe(TEXT),
    maybe(REPLY),
)
READ = (
    st.builds(events.PhaseOpened)
    | st.builds(events.ThinkingDelta, TEXT)
    | st.builds(events.AnswerDelta, TEXT)
    | st.builds(events.ToolCallOpened, COUNT, TEXT, TEXT, st.booleans())
    | st.builds(events.ToolCallDelta, COUNT, TEXT)
    | st.builds(events.Notice, TEXT)
)
EVENT = (
    READ
    | st.builds(events.Waiting, COUNT, maybe(FINITE))
    | st.builds(events.Started, COUNT, COUNT)
    | st.builds(events.Snapshot, MESSAGE)
    | st.builds(events.Finished, usage=USAGE, stop=maybe(TEXT), tail=several(READ))
    | st.builds(events.Failed, TEXT, several(READ))
)
CONVERSATION = st.builds(
    store.Conversation, TEXT, TEXT, TEXT, st.booleans(), TEXT, OBJECT, several(TEXT), maybe(TEXT), TIME, TIME,
    maybe(TIME),
)  # fmt: skip
SWITCH = st.builds(
    Switch,
    TEXT,
    st.sampled_from(SwitchKind),
    st.sampled_from(["boolean", "text", "any"]),
    several(JSON),
    st.booleans(),
    JSON,
    JSON,
    JSON,
    TEXT,
    TEXT,
)
CARD = st.builds(
    interface.ModelCard,
    name=TEXT,
    progress=maybe(FINITE),
    note=TEXT,
    defaults=SAMPLING,
    switches=several(SWITCH),
    media=several(TEXT),
    notices=several(TEXT),
)
TOKEN = st.builds(
    interface.ReplyToken,
    COUNT,
    TEXT,
    maybe(LOGPROB),
    several(st.builds(interface.TokenAlternative, COUNT, TEXT, LOGPROB)),
)
HIT = st.builds(store.SearchHit, TEXT, TEXT, TEXT, st.sampled_from(messages.Role), TIME, TEXT, st.booleans())
CHANGE = st.builds(interface.ConversationChange, TEXT, TEXT, maybe(TEXT))
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    messages.Message: MESSAGE,
    Sampling: SAMPLING,
    store.ReplySettings: SETTINGS,
    LogEntry: st.builds(LogEntry, COUNT, EVENT),
    StreamItem: st.builds(StreamOpened)
    | st.builds(TurnEvent, TEXT, COUNT, EVENT)
    | st.builds(StreamChange, CHANGE)
    | st.builds(StreamClosing),
    store.Conversation: CONVERSATION,
    store.Preset: st.builds(store.Preset, TEXT, TEXT, OBJECT),
    store.StoredMessage: STORED,
    interface.SentMessage: st.builds(interface.SentMessage, STORED, STORED),
    store.TreeNode: st.builds(store.TreeNode, TEXT, maybe(TEXT), st.sampled_from(messages.Role), TIME),
    store.SearchHit: HIT,
    store.Cursor: st.builds(store.Cursor, maybe(TEXT), st.booleans(), st.booleans()),
    interface.ModelCard: CARD,
    interface.ReplyToken: TOKEN,
    interface.ContextUsage: st.builds(interface.ContextUsage, COUNT, COUNT, COUNT),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "StreamItem"))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_value_survives_a_round_trip(kind: Any, data: st.DataObject) -> None:
    value = data.draw(KINDS[kind])
    text = adapter(kind).dump_json(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert adapter(kind).validate_json(text) == value
    assert adapter(kind).validate_python(json.loads(text)) == value  # as the server's framework reads it


@settings(deadline=None, max_examples=60)
@given(parts=st.lists(PLAIN | MEDIA | BLOB, max_size=3))
def test_the_parts_of_a_request_survive_a_round_trip(parts: list[Any]) -> None:
    body = EditMessageRequest(parts=parts)
    assert EditMessageRequest.model_validate_json(body.model_dump_json(exclude_unset=True)) == body
    assert EditMessageRequest.model_validate(json.loads(body.model_dump_json())).parts == parts


MEMBERS = [
    kind
    for union in (messages.Part, StoredPart, events.Event, get_args(StreamItem)[0])
    for kind in get_args(union)
    if is_dataclass(kind)
]


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_the_tag_of_a_union_comes_first_and_is_no_argument(kind: Any) -> None:
    assert fields(kind)[0].name == "type"
    assert "type" not in kind.__match_args__


def test_media_is_base64() -> None:
    image = messages.Image("image/png", b"\xfb\xff\xfe")
    message = messages.Message(messages.Role.USER, (image,))
    assert json.loads(adapter(messages.Message).dump_json(message))["parts"] == [
        {
            "type": "image",
            "media_type": "image/png",
            "data": "+//+",
            "name": "",
            "width": 0,
            "height": 0,
            "seconds": 0.0,
        }
    ]
    assert adapter(messages.Message).validate_python(message) is message


@pytest.mark.parametrize("missing", ["in_thought", "name", "id"])
def test_requests_name_every_field_of_a_part(missing: str) -> None:
    call = {"type": "tool_call", "id": "1", "name": "add", "arguments": "{}", "in_thought": False}
    assert MessageSchema.model_validate({"role": "user", "parts": [{**call, "more": 1}]}).parts
    del call[missing]
    with pytest.raises(ValidationError, match="Field required") as caught:
        EditMessageRequest.model_validate({"parts": [call]})
    assert caught.value.errors()[0]["loc"] == ("parts", 0, "tool_call", missing)


def test_readers_ignore_unknown_fields() -> None:
    text = '{"number": 1, "more": 2, "event": {"type": "answer_delta", "text": "a", "more": 3}}'
    assert adapter(LogEntry).validate_json(text) == LogEntry(1, events.AnswerDelta("a"))


@pytest.mark.parametrize("data", ["not base64!", "abc"])
def test_invalid_base64_is_refused(data: str) -> None:
    part = {"type": "image", "media_type": "image/png", "data": data}
    with pytest.raises(BadParameter, match="base64"):
        adapter(messages.Message).validate_python({"role": "user", "parts": [part]})


@pytest.mark.parametrize(
    "error",
    [
        BadParameter("top_p", 1.7, "must be at most 1"),
        BadParameter("x", object(), "is no value that JSON knows"),
        ContextOverflow(5000, 4096),
        QueueFull(7),
        NotFound("message", "abc"),
        EngineError("It broke."),
        errors.NoModel(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_round_trip(error: PalaverError) -> None:
    told = ErrorBody.model_validate_json(json.dumps(error_value(error))).error
    again = told.to_value()
    assert type(again) is type(error)
    assert str(again) == str(error)
    same = {name: value for name, value in vars(error).items() if type(value) is not object}
    assert vars(again) == same


def test_an_unknown_error_is_none() -> None:
    body = {"error": {"message": "no", "type": "x", "param": None, "code": None, "name": "of_a_newer_server"}}
    assert ErrorBody.model_validate(body).error.to_value() is None
