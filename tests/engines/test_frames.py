"""Every value that crosses between supervisor and engine process is the same on the other side."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.constraints import Constraint, MarkerConstraint
from palaver.engines.base import EngineInfo
from palaver.engines.host.frames import (
    EngineSpec,
    Frame,
    OutputFrame,
    decode_error_frame,
    decode_frame,
    encode_error,
    encode_frame,
    read_frame,
)
from palaver.errors import BadParameter, ContextOverflow, EngineClosed, EngineError, PalaverError
from palaver.generation import (
    Alternative,
    AnswerRequested,
    Ended,
    MediaContent,
    MediaItem,
    MediaSpan,
    Output,
    Prefilled,
    Prompt,
    Queued,
    Step,
)
from palaver.phases import Phases, RequiredGrammar, State, Trigger
from palaver.sampling import Sampling

TEXT = st.text(max_size=8)
COUNT = st.integers(0, 2**53)
LOGPROB = st.floats(max_value=0, allow_nan=False)
IDS = st.lists(st.integers(0, 300_000), max_size=5).map(tuple)
ALTERNATIVES = st.lists(st.builds(Alternative, COUNT, LOGPROB), max_size=2).map(tuple)
MARKER = st.builds(MarkerConstraint, text=TEXT, ids=IDS, about=TEXT)
STATE = st.builds(
    State,
    triggers=st.lists(st.builds(Trigger, COUNT | st.binary(max_size=4), COUNT, st.booleans()), max_size=3).map(tuple),
    closing=IDS,
    other=st.none() | COUNT,
    quotes=st.binary(max_size=2),
    slot=TEXT,
)
PHASES = st.builds(
    Phases,
    st.lists(STATE, max_size=3).map(tuple),
    COUNT,
    IDS.map(frozenset),
    IDS.map(frozenset),
    IDS.map(frozenset),
    st.none() | st.builds(RequiredGrammar, MARKER, MARKER),
)
OPTIONS = st.lists(st.tuples(TEXT, COUNT), max_size=2).map(tuple)
ITEM = st.builds(MediaItem, st.sampled_from(["image", "audio"]), TEXT, TEXT, OPTIONS)
SPANS = st.lists(st.builds(MediaSpan, ITEM, COUNT, COUNT), max_size=2).map(tuple)
CANVAS = st.lists(st.none() | st.integers(0, 300_000), max_size=5).map(tuple)
PROMPT = st.builds(
    Prompt,
    context_ids=IDS,
    reply_ids=IDS,
    phases=PHASES,
    owner=TEXT,
    adapter=TEXT,
    conversation=TEXT,
    healing=st.binary(max_size=4),
    healing_at=COUNT,
    canvas=CANVAS,
    answer_at=st.none() | COUNT,
    media=SPANS,
    turn=TEXT,
)
SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(allow_nan=False),
    logit_bias=st.lists(st.tuples(COUNT, st.floats(allow_nan=False)), max_size=2).map(tuple),
    stop=st.lists(TEXT, max_size=2).map(tuple),
    seed=st.integers(0, 2**63 - 1),
    constraint=st.none() | st.builds(Constraint, text=TEXT),
)
OUTPUT = (
    st.builds(Queued, COUNT, st.none() | st.floats(0, 1e6))
    | st.builds(Prefilled, COUNT, COUNT)
    | st.builds(Step, COUNT, LOGPROB, ALTERNATIVES, st.none() | LOGPROB, ALTERNATIVES)
    | st.builds(AnswerRequested, COUNT)
    | st.builds(Ended, stop=st.none() | TEXT)
)
INFO = st.builds(EngineInfo, TEXT, COUNT, COUNT, IDS.map(frozenset), SAMPLING, TEXT, TEXT)


def cross(frame: Frame) -> Frame:
    return decode_frame(encode_frame(frame)[8:])


@settings(deadline=None, max_examples=60)
@given(prompt=PROMPT, sampling=SAMPLING)
def test_requests_cross_unchanged(prompt: Prompt, sampling: Sampling) -> None:
    frame: Frame = {"do": "generate", "number": 1, "prompt": prompt, "sampling": sampling, "choice": 2}
    assert cross(frame) == frame


@settings(deadline=None, max_examples=60)
@given(outputs=st.lists(st.tuples(COUNT, OUTPUT), max_size=4))
def test_outputs_cross_unchanged(outputs: list[tuple[int, OutputFrame]]) -> None:
    assert cross({"outputs": outputs})["outputs"] == outputs


@settings(deadline=None, max_examples=30)
@given(info=INFO, vocabulary=st.lists(st.binary(max_size=6), max_size=4))
def test_the_description_of_an_engine_crosses_unchanged(info: EngineInfo, vocabulary: list[bytes]) -> None:
    spec = EngineSpec("torch", Path("/models/\udcff"), tuple(vocabulary))
    assert cross({"do": "load", "spec": spec, "ready": info}) == {"do": "load", "spec": spec, "ready": info}


async def test_the_data_of_media_follows_its_frame() -> None:
    content = MediaContent(b'\0"}\n' * 5, (4, 5), "uint8", 16_000)
    frames: list[Frame] = [{"do": "content", "number": 3, "key": "k", "content": content}, {"do": "close"}]
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(map(encode_frame, frames)))
    assert [await read_frame(reader), await read_frame(reader)] == frames


def test_prompts_cross_without_access_to_their_media() -> None:
    item = MediaItem("image", "digest", "<image>", load=lambda: MediaContent(b"", (0,), "uint8"))
    prompt = Prompt((1, 2, 3), media=(MediaSpan(item, 1, 2),)).without_content()
    crossed = cross({"do": "generate", "prompt": prompt})["prompt"].media[0].item
    assert (crossed.key, crossed.load) == (item.key, None)


def test_every_output_has_a_tag() -> None:
    assert len({kind.__dataclass_fields__["type"].default for kind in get_args(Output)}) == len(get_args(Output))


@pytest.mark.parametrize(
    "error",
    [BadParameter("top_p", 7, "must be less"), ContextOverflow(5, 4), EngineClosed()],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_with_their_type_and_attributes(error: PalaverError) -> None:
    again = decode_error_frame(cross({"failed": encode_error(error)})["failed"])
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_an_unknown_error_is_an_engine_error() -> None:
    error = decode_error_frame({"type": "error", "name": "of_another_version", "message": "No.", "details": {}})
    assert type(error) is EngineError
    assert str(error) == "No."


async def test_a_closed_connection_ends_the_frames() -> None:
    reader = asyncio.StreamReader()
    data = encode_frame({"do": "close"})
    reader.feed_data(data + data[:5])
    reader.feed_eof()
    assert await read_frame(reader) == {"do": "close"}
    assert await read_frame(reader) is None


def test_the_engine_itself_needs_no_pydantic() -> None:
    code = "import sys; sys.modules['pydantic'] = None; import palaver.engines.core.scheduler, palaver.engines.torch"
    subprocess.run([sys.executable, "-c", code], check=True)
