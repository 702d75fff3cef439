from __future__ import annotations

import base64
from typing import Any

import pytest

from palaver.chat.attachments import AttachmentReader
from palaver.chat.model import Model
from palaver.errors import BadParameter
from palaver.media import MediaDecoder
from palaver.messages import Message, Role, Text, Thinking, ToolCall, ToolResult
from palaver.server.anthropic.request import parse_request, parse_turns
from palaver.server.anthropic.schemas import CountRequest
from palaver.server.anthropic.signatures import sign
from palaver.server.settings import ServerSettings
from palaver.server.state import ReplyIndex
from tests.server.anthropic.client import QUESTION, WEATHER, assistant
from tests.server.live_server import LiveServer

ATTACHMENTS = AttachmentReader(MediaDecoder())
CALL = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}


def parse(*messages: Any, **fields: Any) -> list[Message]:
    request = CountRequest.model_validate({"messages": list(messages), **fields})
    return [turn.message for turn in parse_turns(request, "fp", 100, ATTACHMENTS)]


def test_blocks_become_parts_in_their_order() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = parse(*QUESTION, assistant([thought, {"type": "text", "text": "I look."}, CALL]), system="Be kind.")
    assert messages[0] == Message(Role.SYSTEM, (Text("Be kind."),))
    call = ToolCall("c1", "get_weather", '{"city": "Paris"}')
    assert messages[-1] == Message(Role.ASSISTANT, (Thinking("hm"), Text("I look."), call))


def test_results_are_messages_of_their_own() -> None:
    failed = {**RESULT, "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "net"}], "is_error": True}
    results = {"role": "user", "content": [RESULT, failed, {"type": "text", "text": "Well?"}]}
    _, _, first, second, question = parse(*QUESTION, assistant([CALL]), results, {"role": "user", "content": "Now?"})
    assert first == Message(Role.TOOL, (ToolResult("c1", "rain", "get_weather"),))
    assert second.parts == (ToolResult("c1", "Error: no\n\nnet", "get_weather"),)
    assert question == Message(Role.USER, (Text("Well?\n\nNow?"),))


def test_a_result_may_be_a_document() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Sunny."}
    page = {
        "type": "base64",
        "media_type": "text/html",
        "data": base64.b64encode(b"<!doctype html><p>Rain.</p>").decode(),
    }
    blocks = [
        {"type": "text", "text": "Two files."},
        {"type": "document", "source": plain, "title": "a.txt"},
        {"type": "document", "source": page, "title": "b.html", "context": "Of today."},
    ]
    said = {"role": "user", "content": [{**RESULT, "content": blocks}]}
    (result,) = parse(*QUESTION, assistant([CALL]), said)[-1].parts
    assert isinstance(result, ToolResult)
    assert result.content.split() == "Two files. File a.txt: Sunny. Of today. File b.html: Rain.".split()
    inside = {"type": "content", "content": [blocks[1]]}
    with pytest.raises(BadParameter, match="document"):
        parse({"role": "user", "content": [{"type": "document", "source": inside}]})


def test_a_reply_in_two_pieces_is_one() -> None:
    pieces = [{"type": "thinking", "thinking": "one "}, {"type": "thinking", "thinking": "two"}]
    (_, whole) = parse(*QUESTION, assistant(pieces[:1]), assistant([*pieces[1:], {"type": "text", "text": "Yes"}]))
    assert whole.parts == (Thinking("one two"), Text("Yes"))


@pytest.fixture
def model(live: LiveServer) -> Model:
    return live.service.models.current()


def test_a_signed_thought_is_its_own_tokens(model: Model) -> None:
    """One token per letter, unlike the encoded text."""
    control, spell = model.format.tokenizer.control, model.format.tokenizer.encode
    letters = [token for letter in "rain or sun" for token in spell([letter])]
    ids = [control["<think>"], *spell(["\n"]), *letters, *spell(["\n"]), control["</think>"]]
    assert letters != spell(["rain or sun"])
    for tokenizer, expected in ((model.tokenizer, True), ("another", False)):
        thought = {"type": "thinking", "thinking": "rain or sun"}
        thought["signature"] = sign(tokenizer, ids, "rain or sun", include_text=False)
        messages = [*QUESTION, assistant([thought, CALL]), {"role": "user", "content": [RESULT]}]
        request = CountRequest.model_validate({"messages": messages, "tools": [WEATHER]})
        call = parse_request(request, model, ServerSettings(), "me", ReplyIndex(), ATTACHMENTS)
        prompt = ",".join(map(str, model.prompt(call.request).context_ids))
        assert (",".join(map(str, letters)) in prompt) is expected


@pytest.mark.parametrize("letters", [True, False])
def test_a_begun_answer_goes_on_from_its_thought_s_tokens(model: Model, letters: bool) -> None:
    control, spell = model.format.tokenizer.control, model.format.tokenizer.encode
    words = [token for letter in "rain or sun" for token in spell([letter])] if letters else spell(["rain or sun"])
    ids = [control["<think>"], *spell(["\n"]), *words, *spell(["\n"]), control["</think>"]]
    thought = {
        "type": "thinking",
        "thinking": "rain or sun",
        "signature": sign(model.tokenizer, ids, "rain or sun", False),
    }
    request = CountRequest.model_validate(
        {"messages": [*QUESTION, assistant([thought, {"type": "text", "text": "It is"}])]}
    )
    call = parse_request(request, model, ServerSettings(), "me", ReplyIndex(), ATTACHMENTS)
    assert list(call.partial_ids[: len(ids)]) == ids
    rest = b"".join(model.vocabulary[token] for token in call.partial_ids[len(ids) :])
    assert rest == b"\n\nIt is"
