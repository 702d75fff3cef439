"""`/v1/completions`: text, or token ids, goes on as it is, without a chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import resolve_parameters
from palaver.chat.reply_stream import ReplyRequest as Asking
from palaver.chat.reply_stream import ReplyStream
from palaver.errors import BadParameter, ContextOverflow, EmptyMessage
from palaver.events import AnswerDelta
from palaver.formats.completion import CompletionFormat
from palaver.generation import Prompt
from palaver.phases import Phase, Phases, State
from palaver.server.auth import Whoever
from palaver.server.errors import error_body, log_unexpected
from palaver.server.openai.choices import ChoiceDelta, CompletionStream
from palaver.server.openai.disconnect import (
    close_on_failure,
    close_stream,
    first_chunk,
    first_seconds,
    limited_stream,
    run_while_connected,
)
from palaver.server.openai.request import ChatCall, OutputOptions, Usage, check_model, choice_count, usage_of
from palaver.server.openai.sampling_params import (
    api_field_names,
    check_nested_fields,
    completion_parameters,
    ignored_fields,
    ignored_header,
)
from palaver.server.openai.schemas import CompletionRequest
from palaver.server.openai.streaming import DONE, ChunkHeader, choice_ending
from palaver.server.settings import ServerSettings
from palaver.server.sse import EventStream
from palaver.server.state import StateOf
from palaver.store.records import new_id

MAX_PROMPTS = 64


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest, caller: Whoever, state: StateOf) -> Response:
        """What the model makes of a text, whole or as a stream of server-sent events."""
        model = state.service.models.current()
        with api_field_names():
            what, utterances = await asyncio.to_thread(_asked, body, model, state.settings, caller.owner_id)
        speaking = CompletionStream(what, utterances, state.metrics)
        stream, ignored = limited_stream(state, speaking), ignored_header(ignored_fields(body))
        about = _Texts(ChunkHeader(model.name, f"fp_{model.tokenizer}", f"cmpl-{new_id()}"), speaking)
        async with close_on_failure(stream):
            with api_field_names():
                if not what.shown.stream:
                    return JSONResponse(await run_while_connected(request, about.whole(stream)), headers=ignored)
                first = await first_chunk(request, stream, first_seconds(what.request))
            return EventStream(about.chunks(stream, first), ignored)

    return routes


def _asked(
    body: CompletionRequest, model: Model, settings: ServerSettings, owner: str
) -> tuple[ChatCall, list[ReplyStream]]:
    check_nested_fields(body)
    check_model(body.model, model, settings)
    _check_rest(body)
    decided = resolve_parameters(model.engine.info.defaults, completion_parameters(body, settings), draw_seed(), None)
    prompts = [_prompt(model, one, owner) for one in _prompts(body.prompt)]
    n = choice_count(body.n, settings)
    if len(prompts) * n > settings.limits.choices:
        raise BadParameter("n", n, f"prompts times n must be at most {settings.limits.choices}")
    request = Asking((), decided.sampling, owner=owner)
    shown = OutputOptions(
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        usage=usage_of(body.stream_options),
    )
    spoken = [_utterance(model, replace(request, choice=c), prompt) for prompt in prompts for c in range(n)]
    return ChatCall(model, request, len(spoken), shown), spoken


def _check_rest(body: CompletionRequest) -> None:
    if body.echo:
        raise BadParameter("echo", True, "the prompt is not sent back")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadParameter("best_of", body.best_of, "must be the same as n, or left out")


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    found: list[Any]
    if isinstance(prompt, str) or (prompt and all(isinstance(one, int) for one in prompt)):
        found = [prompt]
    else:
        found = list(prompt)
    if not found or any(not one for one in found):
        raise EmptyMessage
    if len(found) > MAX_PROMPTS:
        raise BadParameter("prompt", f"{len(found)} prompts", f"at most {MAX_PROMPTS} are taken")
    return found


def _prompt(model: Model, given: str | list[int], owner: str) -> Prompt:
    tokenizer = model.format.tokenizer
    size = model.engine.info.vocabulary_size
    if isinstance(given, str):
        model.check_size(len(given))
        ids = (*tokenizer.prefix, *tokenizer.encode([given]))
    else:
        ids = tuple(given)
        for token_id in ids:
            if not 0 <= token_id < size:
                raise BadParameter("prompt", token_id, f"token ids here go from 0 to {size - 1}")
    limit = model.engine.info.context_length
    if len(ids) >= limit:
        raise ContextOverflow(len(ids), limit)
    phases = Phases((State(Phase.ANSWER),), ends=model.engine.info.end_ids, hidden=tokenizer.special_ids)
    return Prompt(ids, (), phases, owner=owner)


def _utterance(model: Model, request: Asking, prompt: Prompt) -> ReplyStream:
    reader = CompletionFormat(model.format.tokenizer).reader(prompt, request.sampling.stop)
    return ReplyStream(request, prompt, reader, model.engine)


@dataclass
class _Texts:
    """Completions in OpenAI's older words."""

    heading: ChunkHeader
    speaking: CompletionStream

    async def whole(self, stream: AsyncGenerator[ChoiceDelta]) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self.speaking.choices]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self.speaking.choices]
        async with aclosing(stream):
            async for told in stream:
                texts[told.index].append(_text(told))
                logprobs[told.index] += told.logprobs
        found = [
            self._choice(index, "".join(pieces), logprobs[index], finished=True) for index, pieces in enumerate(texts)
        ]
        return {**self.heading.value("text_completion"), "choices": found, "usage": self.speaking.usage()}

    async def chunks(
        self, stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta]
    ) -> AsyncGenerator[bytes]:
        shown = self.speaking.asked.shown
        try:
            told = await first
            while True:
                text = _text(told)
                if text or told.finished or told.logprobs or told.token_ids:
                    choice = self._choice(told.index, text, told.logprobs, told.finished is not None, told.token_ids)
                    yield self._event({"choices": [choice], **self._usage(told)})
                told = await anext(stream)
        except StopAsyncIteration:
            if shown.usage is not Usage.FINISH:
                yield self._event({"choices": [], "usage": self.speaking.usage()})
            yield DONE
        except Exception as error:
            log_unexpected(error)
            yield b"data: " + error_body(error) + b"\n\n" + DONE
        finally:
            await close_stream(first, stream)

    def _usage(self, told: ChoiceDelta) -> dict[str, Any]:
        """Of a chunk with a choice in it."""
        where = self.speaking.asked.shown.usage
        last = told.finished is not None and self.speaking.finished
        if where is Usage.EVERY or (where is Usage.FINISH and last):
            return {"usage": self.speaking.usage()}
        return {}

    def _event(self, value: Mapping[str, Any]) -> bytes:
        whole = {**self.heading.value("text_completion"), **value}
        return f"data: {json.dumps(whole, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[dict[str, Any]],
        finished: bool,
        ids: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        choice, shown = self.speaking.choices[index], self.speaking.asked.shown
        value: dict[str, Any] = {"index": index, "text": text}
        value["logprobs"] = _logprobs(logprobs) if shown.logprobs else None
        value["finish_reason"], value["stop_reason"] = choice_ending(choice) if finished else (None, None)
        if shown.token_ids:
            value["token_ids"] = [step.token_id for step in choice.utterance.steps] if ids is None else list(ids)
            if finished and ids is None:
                value["prompt_token_ids"] = list(choice.utterance.prompt.context_ids)
        return value


def _text(told: ChoiceDelta) -> str:
    return "".join(event.text for event in told.events if isinstance(event, AnswerDelta))


def _logprobs(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = [entry["token"] for entry in entries]
    places = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
    likeliest = [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries]
    values = [entry["logprob"] for entry in entries]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": places}
