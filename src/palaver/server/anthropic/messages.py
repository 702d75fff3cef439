"""Messages as Anthropic's clients send them, and ours."""

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

BETWEEN = "\n\n"
"""Parts one block of text from the next, where a person or the system speaks."""


@dataclass(frozen=True, slots=True)
class AnthropicTurn:
    """A message, and of a reply the ids that its thoughts' signatures tell: of its beginning, to the last thought."""

    message: Message
    ids: tuple[int, ...] = ()

    def joined(self, other: AnthropicTurn) -> AnthropicTurn:
        between = (Text(BETWEEN),) if self.message.role is not Role.ASSISTANT else ()
        parts = _merged((*self.message.parts, *between, *other.message.parts))
        return AnthropicTurn(Message(self.message.role, parts), self.ids + other.ids)


def parse_turns(request: CountRequest, tokenizer: str, most: int) -> list[AnthropicTurn]:
    """The conversation; what the same side says twice in a row is one turn. `tokenizer` is the one in use."""
    if len(request.messages) > most:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {most} are taken")
    system = request.system if isinstance(request.system, str) else _text(request.system or ())
    found = [AnthropicTurn(Message(Role.SYSTEM, (Text(system),)))] if system else []
    for place, given in enumerate(request.messages):
        for turn in _turns(given, f"messages[{place}]", tokenizer):
            if found and found[-1].message.role is turn.message.role is not Role.TOOL:
                found[-1] = found[-1].joined(turn)
            else:
                found.append(turn)
    return _named(found)


def _turns(given: InputMessage, where: str, tokenizer: str) -> list[AnthropicTurn]:
    blocks = [TextBlock(type="text", text=given.content)] if isinstance(given.content, str) else given.content
    if given.role == "assistant":
        return [_reply(blocks, where, tokenizer)]
    role = Role.USER if given.role == "user" else Role.SYSTEM
    return list(_spoken(role, blocks, where))


def _spoken(role: Role, blocks: Sequence[Block], where: str) -> Iterator[AnthropicTurn]:
    """Results of tools are messages of their own, in their place."""
    texts: list[TextBlock] = []
    for place, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock() if role is Role.USER:
                if texts:
                    yield AnthropicTurn(Message(role, (Text(_text(texts)),)))
                    texts = []
                yield AnthropicTurn(Message(Role.TOOL, (_result(block, f"{where}.content[{place}]"),)))
            case _:
                raise _refused(block, f"{where}.content[{place}]", role)
    if texts or not blocks:
        yield AnthropicTurn(Message(role, (Text(_text(texts)),)))


def _reply(blocks: Sequence[Block], where: str, tokenizer: str) -> AnthropicTurn:
    parts: list[Part] = []
    ids: list[tuple[int, ...] | None] = []
    for place, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                parts.append(Text(text))
            case ThinkingBlock():
                thought, made_of = _thought(block, f"{where}.content[{place}]", tokenizer)
                parts += thought
                ids.append(made_of)
            case RedactedThinkingBlock():
                ids.append(None)
            case ToolUseBlock(id=id, name=name, input=input):
                parts.append(ToolCall(id, name, json.dumps(input, ensure_ascii=False)))
            case _:
                raise _refused(block, f"{where}.content[{place}]", Role.ASSISTANT)
    known = [one for one in ids if one is not None]
    whole = tuple(id for one in known for id in one) if len(known) == len(ids) else ()
    return AnthropicTurn(Message(Role.ASSISTANT, _merged(parts)), whole)


def _thought(block: ThinkingBlock, where: str, tokenizer: str) -> tuple[tuple[Thinking, ...], tuple[int, ...] | None]:
    """A thought whose words are neither here nor in its signature is left out."""
    try:
        known = parse_signature(block.signature or "", block.thinking)
    except InvalidSignature as error:
        raise BadParameter(f"{where}.signature", "...", str(error)) from None
    if known is None:
        return ((Thinking(block.thinking),) if block.thinking else ()), None
    return (Thinking(known.text),), known.ids if known.tokenizer == tokenizer else None


def _result(block: ToolResultBlock, where: str) -> ToolResult:
    content = block.content if isinstance(block.content, str) else _text(_texts(block.content or (), where))
    told = f"Error: {content}" if block.is_error and not content.lower().startswith("error") else content
    return ToolResult(block.tool_use_id, told)


def _texts(blocks: Sequence[ResultBlock], where: str) -> Iterator[TextBlock]:
    for place, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _refused(block, f"{where}.content[{place}]", Role.TOOL)
        yield block


def _text(blocks: Sequence[TextBlock] | Iterator[TextBlock]) -> str:
    return BETWEEN.join(block.text for block in blocks)


def _refused(block: Block | ResultBlock, where: str, role: Role) -> BadParameter:
    if isinstance(block, OtherBlock):
        why = "blocks of this type are not supported: the model takes text, and no images or documents"
        return BadParameter(f"{where}.type", block.type[:80], why)
    return BadParameter(f"{where}.type", block.type, f"has no place in what the {role} says")


def _merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Texts that follow each other are one, and so are thoughts; an empty text is none."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text | Thinking) and type(last) is type(part):
            assert isinstance(last, Text | Thinking)
            found[-1] = replace(last, text=last.text + part.text)
        elif part != Text(""):
            found.append(part)
    return tuple(found)


def _named(turns: Sequence[AnthropicTurn]) -> list[AnthropicTurn]:
    """Some templates want the name of the tool whose result this is, which clients do not send."""
    names = {call.id: call.name for turn in turns for call in turn.message.tool_calls}
    return [replace(turn, message=_with_names(turn.message, names)) for turn in turns]


def _with_names(message: Message, names: dict[str, str]) -> Message:
    parts = (
        replace(part, name=names.get(part.call_id, "")) if isinstance(part, ToolResult) else part
        for part in message.parts
    )
    return Message(message.role, tuple(parts))
