"""From a request of the Messages API to a `ChatCall`: its messages, and its other fields as a `ChatRequest`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palaver.chat.attachments import PICTURE_FOLLOWS, AttachmentReader, format_document, named_in_errors
from palaver.chat.model import Model
from palaver.chat.reply_request import check_token_ids
from palaver.errors import BadParameter, EmptyMessage, NoMessages, PalaverError
from palaver.events import fold
from palaver.messages import Message, Part, Role, Text, Thinking, ToolCall, ToolResult
from palaver.phases import Vocabulary
from palaver.server.anthropic.schemas import (
    TOLERATED,
    Block,
    CountRequest,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    InputTool,
    MediaSource,
    MessagesRequest,
    OtherBlock,
    OutputConfig,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from palaver.server.anthropic.signatures import InvalidSignature, parse_signature
from palaver.server.errors import NotSupported
from palaver.server.openai.request import (
    ChatCall,
    ChatHistory,
    build_call,
    check_nested_fields,
    ignored_fields,
    with_tool_names,
)
from palaver.server.openai.sampling_params import ignores_effort
from palaver.server.openai.schemas import ChatRequest
from palaver.server.settings import ServerSettings
from palaver.server.state import ReplyIndex, canonical_arguments

_SHARED_FIELDS = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "steps",
    "block_length",
    "remasking",
    "max_tokens",
    "metadata",
)
FIELD_NAMES = {
    "stop": "stop_sequences",
    "think": "thinking.type",
    "thinking_budget": "thinking.budget_tokens",
    "budget": "thinking.budget_tokens",
    "effort": "output_config.effort",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "constraint (json_schema)": "output_config.format",
    "constraint": "output_config.format",
}
"""Field names of the Messages API by the names that errors of the chat completion path use."""


def recall_ids(call: ChatCall, partial: AnthropicTurn, reply_index: ReplyIndex) -> tuple[int, ...]:
    """The token ids of a partial reply; none if only its text is known."""
    request = call.request
    replies = sum(message.role is Role.ASSISTANT for message in request.messages) + 1
    indexed = reply_index.lookup(request.owner, (*request.messages, partial.message), [None] * replies)[-1]
    prompt = call.model.prompt(request, (), partial.message)
    for ids in (indexed, _splice_signed(call.model.vocabulary, prompt.reply_ids, partial)):
        reply_ids = _without_end(ids or (), prompt.phases.ends)
        if reply_ids and _matches(call, reply_ids, partial.message):
            return reply_ids
    return ()


def _splice_signed(vocabulary: Vocabulary, rendered: tuple[int, ...], partial: AnthropicTurn) -> tuple[int, ...]:
    """The signed ids, then the rest of the rendered ones; none if there is no token boundary between them."""
    if not partial.ids or not all(token_id < len(vocabulary) for token_id in partial.ids):
        return ()
    signed = b"".join(vocabulary[token_id] for token_id in partial.ids)
    text = b"".join(vocabulary[token_id] for token_id in rendered)
    if not text.startswith(signed):
        return partial.ids if signed.startswith(text) else ()
    size, count = 0, 0
    while size < len(signed):
        size, count = size + len(vocabulary[rendered[count]]), count + 1
    return (*partial.ids, *rendered[count:]) if size == len(signed) else ()


def _without_end(ids: tuple[int, ...], ends: Collection[int]) -> tuple[int, ...]:
    """Drops the end-of-turn token, so that the reply can be continued."""
    return ids[:-1] if ids and ids[-1] in ends else ids


def _matches(call: ChatCall, ids: tuple[int, ...], message: Message) -> bool:
    """Whether these ids are valid in a reply and decode to this message."""
    try:
        reply_ids = check_token_ids(ids, call.model, call.request)
        reader = call.model.reader(call.request, call.model.prompt(call.request, reply_ids))
        decoded = fold([*reader.open(), *reader.close()]).message
    except PalaverError:
        return False
    return _comparable(decoded) == _comparable(message)


def _comparable(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
    return message.thinking.rstrip(), message.text, calls


class ThreadUnsupportedRequest(NotSupported):
    """Anthropic's clients recognise this error's name and send the whole conversation instead."""

    def __init__(self) -> None:
        super().__init__("thread is not supported: send all messages, or use metadata.conversation.")


def parse_request(
    request: CountRequest,
    model: Model,
    settings: ServerSettings,
    owner: str,
    reply_index: ReplyIndex,
    attachments: AttachmentReader,
) -> ChatCall:
    """Blocking: call it in a thread. Raises the error that makes the reply impossible."""
    turns, partial = parse_conversation(request, model, settings, attachments)
    messages = tuple(turn.message for turn in turns)
    signed = [turn.ids or None for turn in turns if turn.message.role is Role.ASSISTANT]
    indexed = reply_index.lookup(owner, messages, [None] * len(signed))
    past = tuple(ids or signed_ids for ids, signed_ids in zip(indexed, signed, strict=True))
    call = build_call(to_chat_request(request, model, partial), ChatHistory(messages, past), model, settings, owner)
    return call if partial is None else _continue_partial(call, partial, reply_index)


def parse_conversation(
    request: CountRequest, model: Model, settings: ServerSettings, attachments: AttachmentReader
) -> tuple[Sequence[AnthropicTurn], AnthropicTurn | None]:
    """The turns, and the partial reply if the last message is one."""
    turns = parse_turns(request, model.tokenizer, settings.limits.messages, attachments)
    if (request.model_extra or {}).get("thread") is not None:
        raise ThreadUnsupportedRequest
    check_nested_fields(request, tolerated=TOLERATED)
    if not any(turn.message.role is Role.USER for turn in turns):
        raise NoMessages
    if turns[-1].message.role is Role.USER and turns[-1].message.is_blank:
        raise EmptyMessage
    if turns[-1].message.role is not Role.ASSISTANT:
        return turns, None
    partial = turns.pop()
    if partial.message.parts and isinstance(partial.message.parts[-1], ToolCall):
        raise BadParameter("messages", "tool_use", "the last message calls a tool: its tool_result must follow")
    return turns, partial if partial.message.parts else None


def _continue_partial(call: ChatCall, partial: AnthropicTurn, reply_index: ReplyIndex) -> ChatCall:
    return replace(call, partial=partial.message, partial_ids=recall_ids(call, partial, reply_index))


def ignored_request_fields(request: CountRequest, model: Model, settings: ServerSettings) -> list[str]:
    """The names of the fields without effect."""
    ignored = ignored_fields(request, TOLERATED)
    if ignores_effort(to_chat_request(request, model), settings, model.format):
        ignored.append("output_config.effort")
    return ignored


def to_chat_request(request: CountRequest, model: Model, partial: AnthropicTurn | None = None) -> ChatRequest:
    """All fields but the messages. `partial` is the partial reply to continue, if any."""
    config = request.output_config
    fields: dict[str, Any] = {
        "messages": [],
        "tools": [_tool(index, tool) for index, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "thinking": _thinking(request.thinking, model, partial),
        "media": request.media,
        "include_reasoning": request.thinking is None or request.thinking.display != "omitted",
    }
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if config is not None:
        fields |= {"reasoning_effort": config.effort, "response_format": _response_format(config)}
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in _SHARED_FIELDS} | {"stop": request.stop_sequences}
    return ChatRequest.model_validate(fields)


def _tool(index: int, tool: InputTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise BadParameter(f"tools[{index}].type", tool.type[:80], "only tools that the client runs are supported")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> Any:
    match choice:
        case None | ToolChoice(type="auto"):
            return None
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="none"):
            return "none"
        case ToolChoice(name=name):
            if not name:
                raise BadParameter("tool_choice.name", name, "must name the tool")
            return {"type": "function", "function": {"name": name}}


def _thinking(config: ThinkingConfig | None, model: Model, partial: AnthropicTurn | None) -> dict[str, Any] | None:
    """Asking for the model's default needs no switch. A partial answer without thinking is continued without it, unless
    the request asks for thinking."""
    if config is None:
        is_answer = partial is not None and not any(isinstance(part, Thinking) for part in partial.message.parts)
        return {"type": "disabled"} if is_answer and model.format.thinking_switch is not None else None
    switchable, thinks = model.format.thinking_switch is not None, model.format.thinks
    if config.type == "disabled":
        return {"type": "disabled"} if switchable or thinks else None
    enabled = config.type == "enabled" and (switchable or not thinks)
    return {"type": "enabled" if enabled else "adaptive", "budget_tokens": config.budget_tokens}


def _response_format(config: OutputConfig) -> dict[str, Any] | None:
    if config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}


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


def parse_turns(
    request: CountRequest, tokenizer: str, max_messages: int, attachments: AttachmentReader
) -> list[AnthropicTurn]:
    """The conversation; consecutive messages of one role become one turn. `tokenizer` is the fingerprint in use."""
    if len(request.messages) > max_messages:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {max_messages} are taken")
    system = request.system if isinstance(request.system, str) else _text(request.system or ())
    turns = [AnthropicTurn(Message(Role.SYSTEM, (Text(system),)))] if system else []
    for index, message in enumerate(request.messages):
        for turn in _turns(message, f"messages[{index}]", tokenizer, attachments):
            if turns and turns[-1].message.role is turn.message.role is not Role.TOOL:
                turns[-1] = turns[-1].merge(turn)
            else:
                turns.append(turn)
    return _add_tool_names(turns)


def _turns(message: InputMessage, where: str, tokenizer: str, attachments: AttachmentReader) -> list[AnthropicTurn]:
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        return [_assistant_turn(blocks, where, tokenizer)]
    role = Role.USER if message.role == "user" else Role.SYSTEM
    return list(_input_turns(role, blocks, where, attachments))


def _input_turns(
    role: Role, blocks: Sequence[Block], where: str, attachments: AttachmentReader
) -> Iterator[AnthropicTurn]:
    """Yields text and media as one message, and every tool result as a message of its own, in order.

    Pictures of tool results follow the last of them as a message of the user: templates have no place for them inside.
    """
    parts: list[Part] = []
    shown: list[Part] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                separator = BLOCK_SEPARATOR if parts and isinstance(parts[-1], Text) else ""
                parts.append(Text(separator + block.text))
            case ImageBlock() | DocumentBlock() if role is Role.USER:
                with named_in_errors(f"{where}.content[{index}]"):
                    parts.append(_attachment(block, f"{where}.content[{index}]", attachments))
            case ToolResultBlock() if role is Role.USER:
                if parts:
                    yield AnthropicTurn(Message(role, _merge_parts([*shown, *parts])))
                    parts, shown = [], []
                result, pictures = _result(block, f"{where}.content[{index}]", attachments)
                yield AnthropicTurn(Message(Role.TOOL, (result,)))
                shown += pictures
            case _:
                raise _unsupported_block(block, f"{where}.content[{index}]", role)
    if parts or shown or not blocks:
        yield AnthropicTurn(Message(role, _merge_parts([*shown, *parts]) or (Text(""),)))


def _attachment(block: ImageBlock | DocumentBlock, where: str, attachments: AttachmentReader) -> Part:
    """A picture, or the text of a document under its title, with its context."""
    source, title = block.source, (block.title or "") if isinstance(block, DocumentBlock) else ""
    context = f"{block.context}\n\n" if isinstance(block, DocumentBlock) and block.context else ""
    match source:
        case MediaSource(type="base64", data=str(data)):
            part = attachments.read_url(f"data:;base64,{data}", "image" if block.type == "image" else "file", title)
        case MediaSource(type="url", url=str(url)):
            part = attachments.read_url(url, "image" if block.type == "image" else "file", title)
        case MediaSource(type="text", data=str(text)) if block.type == "document":
            part = Text(format_document(title, text))
        case MediaSource(type="content", content=str(text)) if block.type == "document":
            part = Text(format_document(title, text))
        case MediaSource(type="content", content=list(blocks)) if block.type == "document":
            part = Text(format_document(title, _text(_texts(blocks, f"{where}.source"))))
        case _:
            raise BadParameter(f"{where}.source", source.type[:80], "this source is not supported, or has no data")
    return Text(context + part.text) if context and isinstance(part, Text) else part


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


def _result(block: ToolResultBlock, where: str, attachments: AttachmentReader) -> tuple[ToolResult, list[Part]]:
    """The text of a result, documents included, and its pictures."""
    blocks = [] if isinstance(block.content, str) else block.content or []
    texts: list[str] = [block.content] if isinstance(block.content, str) else []
    pictures: list[Part] = []
    for index, inner in enumerate(blocks):
        at = f"{where}.content[{index}]"
        match inner:
            case TextBlock(text=text):
                texts.append(text)
            case ImageBlock() | DocumentBlock():
                with named_in_errors(at):
                    part = _attachment(inner, at, attachments)
                if isinstance(part, Text):
                    texts.append(part.text.strip("\n"))
                else:
                    pictures.append(part)
            case _:
                raise _unsupported_block(inner, at, Role.TOOL)
    if pictures:
        texts = [*filter(None, texts), PICTURE_FOLLOWS]
    content = BLOCK_SEPARATOR.join(texts)
    text = f"Error: {content}" if block.is_error and not content.lower().startswith("error") else content
    return ToolResult(block.tool_use_id, text), pictures


def _texts(blocks: Sequence[ResultBlock], where: str) -> Iterator[TextBlock]:
    for index, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _unsupported_block(block, f"{where}.content[{index}]", Role.TOOL)
        yield block


def _text(blocks: Sequence[TextBlock] | Iterator[TextBlock]) -> str:
    return BLOCK_SEPARATOR.join(block.text for block in blocks)


def _unsupported_block(block: Block | ResultBlock, where: str, role: Role) -> BadParameter:
    if isinstance(block, OtherBlock):
        reason = "blocks of this type are not supported"
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
    return [replace(turn, message=with_tool_names(turn.message, names)) for turn in turns]
