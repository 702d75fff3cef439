"""`/v1/completions`: continues a text or token ids without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import merge_parameters, resolve_parameters
from palaver.chat.reply_stream import BatchReader, GeneratedReply, ReplyRequest
from palaver.errors import BadParameter, ContextOverflow, EmptyMessage
from palaver.events import AnswerDelta
from palaver.formats.format import CompletionFormat
from palaver.generation import Prompt
from palaver.phases import Phase, Phases, State
from palaver.server.auth import CallerDep
from palaver.server.openai.request import (
    ChatCall,
    OutputOptions,
    UsageChunks,
    api_field_names,
    check_nested_fields,
    choice_count,
    ignored_fields,
    ignored_header,
    usage_chunks,
)
from palaver.server.openai.sampling_params import completion_parameters, fill_parameters
from palaver.server.openai.schemas import CompletionRequest, FillRequest
from palaver.server.openai.streaming import ChoiceDelta, ChunkHeader, CompletionStream, respond
from palaver.server.settings import ServerSettings
from palaver.server.sse import answer_while_loading, encode_json
from palaver.server.state import ServerState, StateDep
from palaver.store.records import new_id

MAX_PROMPTS = 64


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest, caller: CallerDep, state: StateDep) -> Response:
        """What the model makes of a text, whole or as a stream of server-sent events."""
        answer = _complete(request, body, caller.owner_id, state)
        return await answer_while_loading(request, state, body.model, body.stream, answer)

    @routes.post("/v1/fill", response_model=None)
    async def fill(request: Request, body: FillRequest, caller: CallerDep, state: StateDep) -> Response:
        """A text whose masks a diffusion model fills in: the whole text, as a text completion."""
        model = await state.model(body.model)
        with api_field_names():
            before, call, stream = await asyncio.to_thread(_parse_fill, body, model, state.settings, caller.owner_id)
        completion = CompletionStream(call, [stream], state.metrics, state.limiter)
        header = ChunkHeader(model.name, f"fp_{model.tokenizer}", f"fill-{new_id()}")
        encoder, ignored = TextEncoder(header, completion, before), ignored_header(ignored_fields(body))
        return await respond(request, completion, completion.deltas(), encoder, ignored)

    return routes


async def _complete(request: Request, body: CompletionRequest, owner: str, state: ServerState) -> Response:
    model = await state.model(body.model)
    with api_field_names():
        call, reply_streams = await asyncio.to_thread(_parse_request, body, model, state.settings, owner)
    completion = CompletionStream(call, reply_streams, state.metrics, state.limiter)
    header = ChunkHeader(model.name, f"fp_{model.tokenizer}", f"cmpl-{new_id()}")
    encoder, ignored = TextEncoder(header, completion), ignored_header(ignored_fields(body))
    return await respond(request, completion, completion.deltas(), encoder, ignored)


def _parse_fill(
    body: FillRequest, model: Model, settings: ServerSettings, owner: str
) -> tuple[str, ChatCall, GeneratedReply]:
    check_nested_fields(body)
    if body.stream:
        raise BadParameter("stream", True, "must be false: the text comes when all of it is filled in")
    if body.n not in (None, 1):
        raise BadParameter("n", body.n, "must be 1")
    given = merge_parameters(settings.defaults, fill_parameters(body), settings.forced)
    resolved = resolve_parameters(model.engine.info.defaults, given, draw_seed(), None)
    before, stream = model.fill_text(body.text, resolved.sampling, owner)
    return before, ChatCall(model, stream.request, 1, OutputOptions()), stream


def _parse_request(
    body: CompletionRequest, model: Model, settings: ServerSettings, owner: str
) -> tuple[ChatCall, list[GeneratedReply]]:
    check_nested_fields(body)
    _check_fields(body)
    resolved = resolve_parameters(model.engine.info.defaults, completion_parameters(body, settings), draw_seed(), None)
    prompts = [encode_prompt(model, prompt, owner) for prompt in _prompts(body.prompt)]
    n = choice_count(body.n, settings)
    if len(prompts) * n > settings.limits.choices:
        raise BadParameter("n", n, f"prompts times n must be at most {settings.limits.choices}")
    request = ReplyRequest((), resolved.sampling, owner=owner)
    output = OutputOptions(
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        usage=usage_chunks(body),
    )
    streams = [_reply_stream(model, replace(request, choice=c), prompt) for prompt in prompts for c in range(n)]
    return ChatCall(model, request, len(streams), output), streams


def _check_fields(body: CompletionRequest) -> None:
    if body.echo:
        raise BadParameter("echo", True, "is not supported: the prompt is never returned")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadParameter("best_of", body.best_of, "must be the same as n, or left out")


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    found: list[Any]
    if isinstance(prompt, str) or (prompt and all(isinstance(one, int) for one in prompt)):
        found = [prompt]
    else:
        found = list(prompt)
    if not found:
        raise EmptyMessage
    if len(found) > MAX_PROMPTS:
        raise BadParameter("prompt", f"{len(found)} prompts", f"at most {MAX_PROMPTS} are taken")
    return found


def encode_prompt(model: Model, text: str | list[int], owner: str) -> Prompt:
    tokenizer = model.format.tokenizer
    size = model.engine.info.vocabulary_size
    if isinstance(text, str):
        model.check_size(len(text))
        ids = (*tokenizer.prefix, *tokenizer.encode([text]))
    else:
        ids = tuple(text)
        for token_id in ids:
            if not 0 <= token_id < size:
                raise BadParameter("prompt", token_id, f"token ids go from 0 to {size - 1}")
    if not ids:  # an empty text has the token that begins every text, if the model has one
        raise EmptyMessage
    limit = model.engine.info.context_length
    if len(ids) >= limit:
        raise ContextOverflow(len(ids), limit)
    phases = Phases((State(Phase.ANSWER),), ends=model.engine.info.end_ids, hidden=tokenizer.special_ids)
    return Prompt(ids, (), phases, owner=owner)


def _reply_stream(model: Model, request: ReplyRequest, prompt: Prompt) -> GeneratedReply:
    reader = CompletionFormat(model.format.tokenizer).reader(prompt, request.sampling.stop)
    return GeneratedReply(request, prompt, BatchReader(reader, prompt), model.engine)


@dataclass
class TextEncoder:
    """A completion in the format of OpenAI's text completions."""

    header: ChunkHeader
    completion: CompletionStream
    before: str = ""
    """Text that precedes the generated one."""
    _logprobs_end: dict[int, int] = field(default_factory=dict)
    """Where the tokens of each choice end, of those whose log-probabilities were sent."""

    async def fold(self, deltas: AsyncGenerator[ChoiceDelta]) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self.completion.choices]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self.completion.choices]
        async with aclosing(deltas):
            async for delta in deltas:
                texts[delta.index].append(_text(delta))
                logprobs[delta.index] += delta.logprobs
        choices = [
            self._choice(index, self.before + "".join(pieces), logprobs[index], finished=True)
            for index, pieces in enumerate(texts)
        ]
        return {**self.header.value("text_completion"), "choices": choices, "usage": self.completion.usage()}

    def encode_opening(self) -> bytes:
        return b""

    def encode(self, delta: ChoiceDelta) -> bytes:
        text, is_last = _text(delta), delta.finished is not None
        if not (text or is_last or delta.logprobs or delta.token_ids):
            return b""
        choice = self._choice(delta.index, text, delta.logprobs, is_last, delta.token_ids)
        return self._event({"choices": [choice], **self._usage(delta)})

    def encode_usage(self) -> bytes:
        return self._event({"choices": [], "usage": self.completion.usage()})

    def _usage(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The usage field of the delta's chunk, if it has one."""
        usage = self.completion.call.output.usage
        is_last = delta.finished is not None and self.completion.finished
        if usage is UsageChunks.EVERY or (usage is UsageChunks.FINISH and is_last):
            return {"usage": self.completion.usage()}
        return {}

    def _event(self, value: Mapping[str, Any]) -> bytes:
        return encode_json({**self.header.value("text_completion"), **value})

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[dict[str, Any]],
        finished: bool,
        ids: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        choice, output = self.completion.choices[index], self.completion.call.output
        value: dict[str, Any] = {"index": index, "text": text}
        value["logprobs"] = self._logprobs(index, logprobs) if output.logprobs else None
        value["finish_reason"] = choice.finish_reason if finished else None
        value["stop_reason"] = choice.stop_reason if finished else None
        if output.token_ids:
            value["token_ids"] = [step.token_id for step in choice.reply_stream.steps] if ids is None else list(ids)
            if finished and ids is None:
                value["prompt_token_ids"] = list(choice.reply_stream.prompt.context_ids)
        return value

    def _logprobs(self, index: int, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The offsets go on from chunk to chunk."""
        tokens = [entry["token"] for entry in entries]
        offsets = list(accumulate(map(len, tokens), initial=self._logprobs_end.get(index, 0)))
        self._logprobs_end[index] = offsets.pop()
        top = [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries]
        values = [entry["logprob"] for entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _text(delta: ChoiceDelta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, AnswerDelta))
