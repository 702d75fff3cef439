"""Converts the messages of a request into `Message` values, and restores token ids from thinking signatures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from palaver.errors import BadParameter
from palaver.messages import Message, Part, Role, Text, Thinking, ToolCall, ToolResult
from palaver.server.anthropic.schemas import (
    Block,
    CountRequest,
    InputMessage,
    OtherBlock,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from palaver.server.anthropic.signatures import InvalidSignature, parse_signature

BLOCK_SEPARATOR = "\n\n"
"""Joins the text blocks of a user or system message."""


@dataclass(frozen=True, slots=True)
class AnthropicTurn:
    """A message, and for a reply the token ids from its signatures: from its beginning to the last thinking block."""

    message: Message
    ids: tuple[int, ...] = ()

    def merge(self, other: AnthropicTurn) -> AnthropicTurn:
        separator = (Text(BLOCK_SEPARATOR),) if self.message.role is not Role.ASSISTANT else ()
        parts = _merge_parts((*self.message.parts, *separator, *other.message.parts))
        return AnthropicTurn(Message(self.message.role, parts), self.ids + other.ids)


def parse_turns(request: CountRequest, tokenizer: str, max_messages: int) -> list[AnthropicTurn]:
    """The conversation; consecutive messages of one role become one turn. `tokenizer` is the fingerprint in use."""
    if len(request.messages) > max_messages:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {max_messages} are taken")
    system = request.system if isinstance(request.system, str) else _text(request.system or ())
    turns = [AnthropicTurn(Message(Role.SYSTEM, (Text(system),)))] if system else []
    for index, message in enumerate(request.messages):
        for turn in _turns(message, f"messages[{index}]", tokenizer):
            if turns and turns[-1].message.role is turn.message.role is not Role.TOOL:
                turns[-1] = turns[-1].merge(turn)
            else:
                turns.append(turn)
    return _add_tool_names(turns)


def _turns(message: InputMessage, where: str, tokenizer: str) -> list[AnthropicTurn]:
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        return [_assistant_turn(blocks, where, tokenizer)]
    role = Role.USER if message.role == "user" else Role.SYSTEM
    return list(_input_turns(role, blocks, where))


def _input_turns(role: Role, blocks: Sequence[Block], where: str) -> Iterator[AnthropicTurn]:
    """Yields text as one message, and every tool result as a message of its own, in order."""
    texts: list[TextBlock] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock() if role is Role.USER:
                if texts:
                    yield AnthropicTurn(Message(role, (Text(_text(texts)),)))
                    texts = []
                yield AnthropicTurn(Message(Role.TOOL, (_result(block, f"{where}.content[{index}]"),)))
            case _:
                raise _unsupported_block(block, f"{where}.content[{index}]", role)
    if texts or not blocks:
        yield AnthropicTurn(Message(role, (Text(_text(texts)),)))


def _assistant_turn(blocks: Sequence[Block], where: str, tokenizer: str) -> AnthropicTurn:
    parts: list[Part] = []
    ids: list[tuple[int, ...] | None] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                parts.append(Text(text))
            case ThinkingBlock():
                thinking, token_ids = _signed_thinking(block, f"{where}.content[{index}]", tokenizer)
                parts += thinking
                ids.append(token_ids)
            case RedactedThinkingBlock():
                ids.append(None)
            case ToolUseBlock(id=id, name=name, input=input):
                parts.append(ToolCall(id, name, json.dumps(input, ensure_ascii=False)))
            case _:
                raise _unsupported_block(block, f"{where}.content[{index}]", Role.ASSISTANT)
    known = [block_ids for block_ids in ids if block_ids is not None]
    reply_ids = tuple(id for block_ids in known for id in block_ids) if len(known) == len(ids) else ()
    return AnthropicTurn(Message(Role.ASSISTANT, _merge_parts(parts)), reply_ids)


def _signed_thinking(
    block: ThinkingBlock, where: str, tokenizer: str
) -> tuple[tuple[Thinking, ...], tuple[int, ...] | None]:
    """The thinking and its token ids. A block with its text neither here nor in its signature is dropped."""
    try:
        signed = parse_signature(block.signature or "", block.thinking)
    except InvalidSignature as error:
        raise BadParameter(f"{where}.signature", "...", str(error)) from None
    if signed is None:
        return ((Thinking(block.thinking),) if block.thinking else ()), None
    return (Thinking(signed.text),), signed.ids if signed.tokenizer == tokenizer else None


def _result(block: ToolResultBlock, where: str) -> ToolResult:
    content = block.content if isinstance(block.content, str) else _text(_texts(block.content or (), where))
    text = f"Error: {content}" if block.is_error and not content.lower().startswith("error") else content
    return ToolResult(block.tool_use_id, text)


def _texts(blocks: Sequence[ResultBlock], where: str) -> Iterator[TextBlock]:
    for index, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _unsupported_block(block, f"{where}.content[{index}]", Role.TOOL)
        yield block


def _text(blocks: Sequence[TextBlock] | Iterator[TextBlock]) -> str:
    return BLOCK_SEPARATOR.join(block.text for block in blocks)


def _unsupported_block(block: Block | ResultBlock, where: str, role: Role) -> BadParameter:
    if isinstance(block, OtherBlock):
        reason = "blocks of this type are not supported: the model takes text, and no images or documents"
        return BadParameter(f"{where}.type", block.type[:80], reason)
    return BadParameter(f"{where}.type", block.type, f"has no place in what the {role} says")


def _merge_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Merges consecutive texts, and consecutive thinking parts. Drops empty texts."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text | Thinking) and type(last) is type(part):
            assert isinstance(last, Text | Thinking)
            merged[-1] = replace(last, text=last.text + part.text)
        elif part != Text(""):
            merged.append(part)
    return tuple(merged)


def _add_tool_names(turns: Sequence[AnthropicTurn]) -> list[AnthropicTurn]:
    """Adds the tool's name to its result: some templates need it, and clients do not send it."""
    names = {call.id: call.name for turn in turns for call in turn.message.tool_calls}
    return [replace(turn, message=_with_tool_names(turn.message, names)) for turn in turns]


def _with_tool_names(message: Message, names: dict[str, str]) -> Message:
    parts = (
        replace(part, name=names.get(part.call_id, "")) if isinstance(part, ToolResult) else part
        for part in message.parts
    )
    return Message(message.role, tuple(parts))
