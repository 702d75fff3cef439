"""What the database keeps is pinned: the JSON of records and the bytes of tokens, which later versions read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.constraints import Constraint, Grammar
from palaver.events import Usage
from palaver.generation import Alternative, Step
from palaver.messages import Audio, Image, Text, Thinking, Tool, ToolCall, ToolResult, Video
from palaver.sampling import Sampling
from palaver.store import Blob, ReplySettings, encoding
from palaver.store.database import json_text
from palaver.store.encoding import (
    as_stored,
    decode_parts,
    decode_settings,
    decode_usage,
    encode_parts,
    encode_settings,
    encode_usage,
    merge_tokens,
    pack_tokens,
    unpack_tokens,
)
from palaver.store.errors import Damaged
from tests.store.factories import steps

PARTS = [
    (Text("a"), '{"type":"text","text":"a"}'),
    (Thinking("b"), '{"type":"thinking","text":"b"}'),
    (ToolCall("1", "n", "{}"), '{"type":"tool_call","id":"1","name":"n","arguments":"{}"}'),
    (ToolCall("1", "n", "{", True), '{"type":"tool_call","id":"1","name":"n","arguments":"{","in_thought":true}'),
    (ToolResult("1", "c"), '{"type":"tool_result","call_id":"1","content":"c","name":""}'),
    (Blob("image", "image/png", "d", 3), '{"type":"image","media_type":"image/png","digest":"d","size":3}'),
    (Blob("audio", "audio/wav", "d", 3), '{"type":"audio","media_type":"audio/wav","digest":"d","size":3}'),
    (
        Blob("image", "image/png", "d", 3, "a.png", 2, 1, 0.5),
        '{"type":"image","media_type":"image/png","digest":"d","size":3,"name":"a.png","width":2,"height":1,"seconds":0.5}',
    ),
    (Blob("video", "video/mp4", "d", 3), '{"type":"video","media_type":"video/mp4","digest":"d","size":3}'),
]
SAMPLING = Sampling(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    end_penalty=1.2,
    logit_bias=((1, 2.0),),
    banned_ids=(4,),
    banned_strings=("x",),
    stop=("y",),
    stop_ids=(5,),
    min_tokens=6,
    max_tokens=7,
    thinking_budget=8,
    seed=9,
    logprobs=10,
    constraint=Constraint(Grammar.REGEX, "a+"),
    spoken=True,
)
TOOL = Tool("n", "d", {"type": "object"})
SETTINGS = [
    (ReplySettings("m", Sampling(), "t"), '{"sampling":{},"options":{},"tools":[],"choice":0}'),
    (
        ReplySettings("m", SAMPLING, "t", {"a": [1]}, (TOOL,), 2, ((0, "fp"),), 7),
        '{"sampling":{"temperature":0.5,"top_k":3,"top_p":0.9,"min_p":0.1,"repetition_penalty":1.1,'
        '"presence_penalty":0.2,"frequency_penalty":0.3,"end_penalty":1.2,"logit_bias":[[1,2.0]],"banned_ids":[4],'
        '"banned_strings":["x"],"stop":["y"],"stop_ids":[5],"min_tokens":6,"max_tokens":7,"thinking_budget":8,'
        '"seed":9,"logprobs":10,"constraint":{"grammar":"regex","text":"a+"},"spoken":true},"options":{"a":[1]},'
        '"tools":[{"name":"n","description":"d","parameters":{"type":"object"}}],"choice":2,"answer_at":7,'
        '"fingerprints":[[0,"fp"]]}',
    ),
]


@pytest.mark.parametrize(("part", "text"), PARTS, ids=lambda value: type(value).__name__)
def test_the_json_of_a_part_is_pinned(part: encoding.StoredPart, text: str) -> None:
    assert json_text(encode_parts([part])) == f"[{text}]"
    assert decode_parts([json.loads(text)]) == (part,)


@pytest.mark.parametrize(("value", "text"), SETTINGS, ids=["defaults", "all"])
def test_the_json_of_settings_is_pinned(value: ReplySettings, text: str) -> None:
    assert json_text(encode_settings(value)) == text
    assert decode_settings("m", "t", json.loads(text)) == value


def test_the_json_of_usage_is_pinned() -> None:
    text = '{"prompt_tokens":1,"cached_tokens":2,"reply_tokens":3,"thinking_tokens":4}'
    assert json_text(encode_usage(Usage(1, 2, 3, 4))) == text
    assert decode_usage(json.loads(text)) == Usage(1, 2, 3, 4)


def test_a_field_without_a_pinned_name_is_refused() -> None:
    @dataclass
    class Renamed:
        text: str
        wording: str

    with pytest.raises(LookupError, match="'wording' has no stored name"):
        encoding._encode(Renamed, [Renamed("a", "b")])


def test_a_renamed_field_keeps_its_stored_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Renamed:
        wording: str

    monkeypatch.setattr(encoding, "STORED_NAMES", {"wording": "text"})
    assert encoding._encode(Renamed, [Renamed("a")]) == [{"text": "a"}]
    assert encoding._decode(Renamed, [{"text": "a"}]) == (Renamed("a"),)


@pytest.mark.parametrize("value", [{"type": "hologram"}, {"type": "text"}, {"text": "a"}, {"type": "text", "text": 1}])
def test_a_part_that_is_not_understood_is_damaged(value: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="not understood"):
        decode_parts([value])


def test_a_number_is_stored_as_it_was_given() -> None:
    value = encode_settings(ReplySettings("m", Sampling(temperature=2, seed=1), "t"))
    assert json_text(value["sampling"]) == '{"temperature":2,"seed":1}'


TEXT = st.text(st.characters(), max_size=8)  # with lone surrogates
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
COUNT = st.integers(0, 2**53)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PART = (
    st.builds(Text, TEXT)
    | st.builds(Thinking, TEXT)
    | st.builds(ToolCall, TEXT, TEXT, TEXT, st.booleans())
    | st.builds(ToolResult, TEXT, TEXT, TEXT)
    | st.builds(Blob, st.sampled_from(["image", "audio", "video"]), TEXT, TEXT, COUNT)
)
ANY_SAMPLING = st.builds(
    Sampling,
    temperature=FINITE,
    logit_bias=st.lists(st.tuples(COUNT, FINITE), max_size=2).map(tuple),
    stop=st.lists(TEXT, max_size=2).map(tuple),
    max_tokens=st.none() | COUNT,
    seed=st.integers(0, 2**63 - 1),
    constraint=st.none() | st.builds(Constraint, text=TEXT),
    spoken=st.booleans(),
)
ANY_SETTINGS = st.builds(
    ReplySettings,
    TEXT,
    ANY_SAMPLING,
    TEXT,
    OBJECT,
    st.lists(st.builds(Tool, TEXT, TEXT, OBJECT), max_size=2).map(tuple),
    COUNT,
    st.lists(st.tuples(COUNT, TEXT), max_size=2).map(tuple),
    st.none() | COUNT,
)


@settings(deadline=None, max_examples=100)
@given(parts=st.lists(PART, max_size=4).map(tuple))
def test_parts_survive_a_round_trip(parts: tuple[encoding.StoredPart, ...]) -> None:
    assert decode_parts(json.loads(json_text(encode_parts(parts)))) == parts


@settings(deadline=None, max_examples=100)
@given(value=ANY_SETTINGS)
def test_settings_survive_a_round_trip(value: ReplySettings) -> None:
    assert decode_settings(value.model, value.tokenizer, json.loads(json_text(encode_settings(value)))) == value


@pytest.mark.parametrize(("kind", "tag"), [(Image, "image"), (Audio, "audio"), (Video, "video")])
def test_the_kind_of_a_blob_is_the_type_of_its_part(kind: Any, tag: str) -> None:
    assert kind("a/b", b"").type == tag
    assert type(encoding.media_part(Blob(tag, "a/b", "d", 0), b"")) is kind  # type: ignore[arg-type]


LOGPROB = st.floats(max_value=0)
SOME = st.lists(st.builds(Alternative, st.integers(0, 300_000), LOGPROB), max_size=7).map(tuple)
STEP = st.builds(Step, st.integers(0, 300_000), LOGPROB | st.just(float("nan")), SOME, st.none() | LOGPROB, SOME)


@settings(deadline=None, max_examples=100)
@given(step=STEP)
def test_a_step_is_known_as_it_will_be_read(step: Step) -> None:
    assert repr(as_stored(step)) == repr(unpack_tokens(pack_tokens((step,)))[0])


@settings(deadline=None, max_examples=100)
@given(frames=st.lists(st.lists(STEP | st.builds(Step, st.integers(0, 9), LOGPROB), max_size=4), max_size=4))
def test_merged_tokens_are_those_of_all_frames(frames: list[list[Step]]) -> None:
    packed = [pack_tokens(frame) for frame in frames]
    stored = [step for data in packed for step in unpack_tokens(data)]
    assert repr(list(unpack_tokens(merge_tokens(packed)))) == repr(stored)
    assert merge_tokens(packed) == pack_tokens(stored)


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_cut_tokens_are_damaged(cut: int) -> None:
    with pytest.raises(Damaged, match="restore a backup"):
        merge_tokens([pack_tokens(steps(1, 2))[:cut]])


def test_tokens_round_trip() -> None:
    few = Step(5, -0.1, (Alternative(1, -0.1),) * 7, -1e300, (Alternative(2, float("-inf")),))
    many = [Step(number, -number / 3, (Alternative(number, -0.5),)) for number in range(300)]
    for row in ([few], many, [*many, few], []):
        unpacked = unpack_tokens(pack_tokens(row))
        assert [step.token_id for step in unpacked] == [step.token_id for step in row]
        assert unpacked == tuple(as_stored(step) for step in unpacked)
    assert len(unpack_tokens(pack_tokens([few]))[0].alternatives) == 5
    assert unpack_tokens(pack_tokens(steps(1, 2))) == steps(1, 2)
    assert unpack_tokens(pack_tokens([many[0], few]))[0].drawn_logprob is None


@pytest.mark.parametrize("data", [b"", b"\x01", pack_tokens(steps(1, 2))[:-1], b"\x02\x00\x05\x00\x00\x00nonsense"])
def test_damaged_tokens_are_detected(data: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_tokens(data)
