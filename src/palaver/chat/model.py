"""A loaded model: its engine, its chat format and its tokenizer; loading it, and replacing it by another."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.reply_stream import BatchReader, GeneratedReply, RecordStep, ReplyRecord, ReplyRequest
from palaver.engines.base import Engine, EngineState, EngineStatus
from palaver.engines.host.supervisor import HostedEngine, ReportProgress, torch_spec
from palaver.errors import (
    BadParameter,
    ContextOverflow,
    ModelError,
    ModelLoading,
    NoModel,
    NoTemplate,
    NothingToContinue,
    PalaverError,
)
from palaver.formats.base import Format
from palaver.formats.format import TemplateFormat
from palaver.formats.loader import load_completion, load_format, named_tokens, template_text
from palaver.formats.reader import ReplyReader
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.generation import Finish, Prompt, Step
from palaver.messages import Message, Text, Tool, ToolResult
from palaver.models.resolver import ResolvedModel, resolve_model
from palaver.models.templates import TEMPLATES
from palaver.phases import Vocabulary
from palaver.sampling import MAX_SEED, MAX_TOKENS, Sampling, check_sampling


def draw_seed() -> int:
    """A random seed that is short enough to type."""
    return secrets.randbelow(min(2**32, MAX_SEED))


def extend_limit(sampling: Sampling, reply_tokens: int) -> Sampling:
    """The sampling for continuing a reply that reached `max_tokens`: the same number of tokens again."""
    return sampling if sampling.max_tokens is None else replace(sampling, max_tokens=reply_tokens + sampling.max_tokens)


def offset_limits(sampling: Sampling, tokens: int) -> Sampling:
    """The same limits, counted after the reply's first `tokens` tokens."""
    if not tokens:
        return sampling
    min_tokens = min(tokens + sampling.min_tokens, MAX_TOKENS) if sampling.min_tokens else 0
    max_tokens = None if sampling.max_tokens is None else min(tokens + sampling.max_tokens, MAX_TOKENS)
    return replace(sampling, min_tokens=min_tokens, max_tokens=max_tokens)


@dataclass(frozen=True)
class Model:
    engine: Engine
    format: Format
    name: str = ""
    tokenizer: str = ""
    """The tokenizer's fingerprint: token ids of another one mean nothing here."""
    vocabulary: Vocabulary = ()
    notices: tuple[str, ...] = ()
    """Notices for the user about how it was loaded."""

    def prompt(
        self, request: ReplyRequest, reply_so_far: Sequence[int] = (), partial_reply: Message | None = None
    ) -> Prompt:
        """Renders the request. Raises ContextOverflow if no token is left for the reply."""
        self.check_size(text_size(request.messages, request.tools))
        rendered = self.format.render(
            request.messages, request.tools, request.options, reply_so_far, partial_reply, request.past_replies
        )
        limit = self.engine.info.context_length
        if len(rendered) >= limit:
            raise ContextOverflow(len(rendered), limit)
        phases = replace(rendered.phases, ends=rendered.phases.ends | self.engine.info.end_ids)
        return replace(
            rendered,
            phases=phases,
            owner=request.owner,
            conversation=request.conversation,
            answer_at=request.answer_at,
        )

    def check_size(self, characters: int) -> None:
        """Raises ContextOverflow, before tokenizing, if the text is far too long for the context.

        The limit is four times the longest text that fits: a tokenizer or a template may drop characters.
        """
        limit = self.engine.info.context_length
        if self._longest_token and characters > 4 * limit * self._longest_token:
            raise ContextOverflow(characters // self._longest_token, limit)

    @cached_property
    def _longest_token(self) -> int:
        """In bytes; 0 if the vocabulary is not known."""
        return max(map(len, self.vocabulary), default=0)

    def stream_reply(
        self,
        request: ReplyRequest,
        reply_so_far: Sequence[int] = (),
        partial_reply: Message | None = None,
        record_step: RecordStep | None = None,
        limit_added: bool = False,
        prompt: Prompt | None = None,
        earlier: Sequence[Step] = (),
    ) -> GeneratedReply:
        """A stream to enter. It continues the token ids `reply_so_far`, or the text of `partial_reply`.

        `prompt` is the rendered request, if it is rendered already. `limit_added`: `min_tokens` and `max_tokens` count
        the tokens that are added, not the complete reply. `earlier`: the last tokens of `reply_so_far`, if they were
        sampled before the reply was stopped.
        """
        request = self._with_stop_strings(request)
        if prompt is None:
            prompt = self.prompt(request, reply_so_far, partial_reply)
        prompt = replace(prompt, conversation=request.conversation)
        if limit_added:
            request = replace(request, sampling=offset_limits(request.sampling, len(prompt.reply_ids)))
        first_prompt = replace(prompt, reply_ids=prompt.reply_ids[: len(prompt.reply_ids) - len(earlier)])
        reader = BatchReader(self.reader(request, first_prompt), first_prompt)
        return GeneratedReply(request, prompt, reader, self.engine, record_step, earlier)

    def reader(self, request: ReplyRequest, prompt: Prompt) -> ReplyReader:
        """A reader for the tokens of a reply to the rendered request."""
        request = self._with_stop_strings(request)
        return self.format.reader(prompt, request.sampling.stop, request.tools, request.options)

    def _with_stop_strings(self, request: ReplyRequest) -> ReplyRequest:
        """The request with the stop strings of the chat template added."""
        stops = tuple(dict.fromkeys((*request.sampling.stop, *self.format.stop_strings)))
        return replace(request, sampling=check_sampling(replace(request.sampling, stop=stops)))

    def continue_reply(self, reply: ReplyRecord) -> GeneratedReply:
        """Continues a stopped reply, token for token as if it had not been stopped.

        A reply that reached `max_tokens` gets the same number of tokens again.
        """
        if reply.finish in (Finish.END, Finish.STOP_STRING):
            raise NothingToContinue("The reply is complete: there is nothing to continue.")
        request = reply.request
        if reply.finish is Finish.LENGTH:
            request = replace(request, sampling=extend_limit(request.sampling, len(reply.token_ids)))
        return self.stream_reply(request, reply.token_ids)

    async def reply(self, request: ReplyRequest, reply_so_far: Sequence[int] = ()) -> ReplyRecord:
        """The complete reply: the same stream, folded."""
        async with self.stream_reply(request, reply_so_far) as stream:
            async for _ in stream:
                pass
            return stream.reply()


def text_size(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """The characters that every template renders. Past thinking is not counted: most templates drop it."""
    parts = [part for message in messages for part in message.parts]
    texts = sum(len(part.text) for part in parts if isinstance(part, Text))
    results = sum(len(part.content) for part in parts if isinstance(part, ToolResult))
    return texts + results + sum(len(tool.description) + _size(tool.parameters) for tool in tools)


def _size(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(len(name) + _size(one) for name, one in value.items())
        case list() | tuple():
            return sum(map(_size, value))
        case _:
            return 0


_log = logging.getLogger(__name__)
Load = Callable[[str, ReportProgress], Awaitable[Model]]
Check = Callable[[str, ReportProgress], Awaitable[None]]
Park = Callable[[], Awaitable[None]]


class ModelSlot:
    """The model in use. Another one replaces it: the current model stays until the other is checked, and is loaded
    again if the other fails to start. Both are never in memory at once."""

    def __init__(self, load: Load, names: Sequence[str] = (), check: Check | None = None) -> None:
        """`load` loads a model by name; `names` are the available models. `check` raises if a model can't be loaded,
        as far as that shows without its engine."""
        self._load = load
        self._check = check
        self.names = tuple(names)
        self.park: Park | None = None
        """Called before a model is unloaded, to park its turns."""
        self._model: Model | None = None
        self._in_use = ""
        """The name of the model in use, or of the one to load again if a load fails."""
        self._name = ""
        """The name that was requested last."""
        self._progress: float | None = None
        self._note = ""
        self._error: PalaverError | None = None
        """The error of the last load."""
        self._loading: asyncio.Task[None] | None = None

    def current(self) -> Model:
        if self._model is not None:
            return self._model
        if self._loading is not None:
            raise ModelLoading(self._name)
        raise self._error or NoModel()

    def card(self) -> ModelCard:
        """The model in use; without one, the model that is being loaded or failed to load."""
        if self._model is None:
            return self.loading_card()
        note = "" if self._error is None else str(self._error)
        return _with_status(replace(_card(self._model), note=note), self._model.engine.status)

    def loading_card(self) -> ModelCard:
        """The model that is being loaded; without one, the model in use."""
        if self._loading is not None:
            return ModelCard(self._name, ModelState.LOADING, self._progress, self._note)
        if self._model is not None:
            return self.card()
        if self._error is not None:
            return ModelCard(self._name, ModelState.FAILED, note=str(self._error))
        return ModelCard(self._name, ModelState.NONE)

    async def use(self, model: Model) -> None:
        """Puts a model into use that is loaded already."""
        await self.unload()
        self._model, self._name, self._in_use = model, model.name, model.name

    def load(self, name: str) -> None:
        """Starts loading. The turns of the current model are parked when it is replaced."""
        previous, self._name = self._loading, name
        self._error, self._progress, self._note = None, None, ""
        self._loading = asyncio.create_task(self._replace(name, previous))

    async def ready(self) -> Model:
        """The model in use. Waits for one only if there is none."""
        while self._model is None and self._loading is not None:
            await self._settle(self._loading)
        return self.current()

    async def settled(self) -> Model:
        """The model in use when no model is being loaded any more, whether or not the last load succeeded."""
        while self._loading is not None:
            await self._settle(self._loading)
        return self.current()

    async def loaded(self) -> Model:
        """The model that was loaded last. Raises the error of its load, even if another model is in use."""
        model = await self.settled()
        if self._error is not None:
            raise self._error
        return model

    async def forget(self, conversation: str) -> None:
        """Frees the conversation's cache; does nothing if no model is loaded."""
        if self._model is not None:
            await self._model.engine.forget(conversation)

    async def unload(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])
            self._loading = None
        await self._close_model()
        self._name, self._in_use, self._error = "", "", None

    async def _settle(self, loading: asyncio.Task[None]) -> None:
        await asyncio.wait([loading])
        if self._loading is loading:
            self._loading = None

    async def _replace(self, name: str, previous: asyncio.Task[None] | None) -> None:
        try:
            if previous is not None:
                previous.cancel()
                await asyncio.wait([previous])
            self._error = await self._try_to_load(name, replaces=self._model is not None)
            if self._error is not None:
                await self._fall_back(self._error)
        finally:
            if self._loading is asyncio.current_task():
                self._loading = None

    async def _try_to_load(self, name: str, replaces: bool = False) -> PalaverError | None:
        """Puts the model into use. Returns the error if that fails."""
        try:
            if replaces and self._check is not None:
                await self._check(name, self._report)
            await self._close_model()
            self._model = await self._load(name, self._report)
            self._in_use = name
        except PalaverError as error:
            return error
        except Exception as error:
            _log.exception("the model %r could not be loaded", name)
            return ModelError(f"Can't load the model {name!r} ({type(error).__name__}: {error}).")
        return None

    async def _fall_back(self, error: PalaverError) -> None:
        """After a load that failed: the previous model stays in use, and the error says so."""
        if not self._in_use:
            return
        if self._model is None and await self._try_to_load(self._in_use) is not None:
            self._in_use = ""
            return
        error.args = (f"{error} {self._in_use} is still in use.",)

    async def _close_model(self) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        try:
            if self.park is not None:
                await self.park()
        except Exception:  # its turns end with the engine
            _log.exception("the turns of %r could not be parked", model.name)
        finally:
            await model.engine.close()

    def _report(self, progress: float | None, note: str) -> None:
        self._progress, self._note = progress, note


def _with_status(card: ModelCard, status: EngineStatus) -> ModelCard:
    """The card with the engine's state: a loaded model is ready only while its engine is."""
    match status.state:
        case EngineState.READY:
            return card
        case EngineState.STARTING:
            return replace(card, state=ModelState.LOADING, progress=None, note=status.reason)
        case EngineState.FAILED:
            return replace(card, state=ModelState.FAILED, progress=None, note=status.reason)


def _card(model: Model) -> ModelCard:
    info = model.engine.info
    return ModelCard(
        model.name,
        ModelState.READY,
        1.0,
        context_length=info.context_length,
        device=info.device,
        dtype=info.dtype,
        reuse=info.reuse,
        exactness=info.exactness,
        steps=info.steps,
        fingerprint=info.fingerprint,
        defaults=info.defaults,
        thinks=model.format.thinks,
        switches=model.format.switches,
        takes_tools=model.format.takes_tools,
        notices=model.notices,
    )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading models."""

    template: Path | None = None
    """A chat template to use instead of the model's."""
    raw: bool = False
    """Complete text as it is, without a chat template."""
    device: str | None = None
    dtype: str | None = None
    exact: bool = False
    compiled: bool | None = None
    """Compiled steps: None where they can be used, True required, False never."""
    cache_bytes: int | None = None
    """The bound on the KV cache. None: a share of the free memory."""
    max_running: int | None = None
    """How many requests are computed at once. None: the engine decides."""

    def __post_init__(self) -> None:
        if self.template is not None and not self.template.is_file():
            raise BadParameter("--template", str(self.template), "there is no such file")


def hosted_loader(loading: LoadOptions) -> Load:
    """Loads models into engine hosts."""

    async def load(name: str, report: ReportProgress) -> Model:
        report(None, "looking for the model")
        resolved = await asyncio.to_thread(resolve_model, name)
        report(None, "reading the tokenizer and the template")
        tokenizer, format = await asyncio.to_thread(load_model_format, resolved, loading)
        spec = torch_spec(
            resolved.folder,
            tokenizer.vocabulary,
            loading.device,
            loading.dtype,
            loading.exact,
            resolved.adapter,
            resolved.context_length,
            loading.compiled,
            loading.cache_bytes,
            loading.max_running,
        )
        engine = HostedEngine(spec, report)
        await engine.start()
        notices = (*resolved.notes, *(() if loading.template else missing_template_notices(resolved)), engine.info.hint)
        return replace(build_model(name, engine, format, tokenizer), notices=tuple(filter(None, notices)))

    return load


def model_checker(loading: LoadOptions) -> Check:
    """Finds (or downloads) a model and reads its tokenizer and template, without starting an engine."""

    async def check(name: str, report: ReportProgress) -> None:
        report(None, "looking for the model")
        resolved = await asyncio.to_thread(resolve_model, name)
        await asyncio.to_thread(load_model_format, resolved, loading)

    return check


def load_model_format(model: ResolvedModel, loading: LoadOptions) -> tuple[FastTokenizer, Format]:
    """The tokenizer and the chat format: from the given template, the one it was trained with, or the model's own."""
    folder = model.folder
    tokenizer = load_tokenizer(folder)
    if loading.raw:
        return tokenizer, load_completion(folder, tokenizer)
    template = _training_template(model) if loading.template is None else None
    if template is not None and template != template_text(folder):
        return tokenizer, _template_format(template, folder, tokenizer)
    try:
        return tokenizer, load_format(folder, tokenizer, loading.template)
    except NoTemplate:
        fallback = TEMPLATES.get(model.fallback_template or "")
        if fallback is None:
            raise
        return tokenizer, _template_format(fallback, folder, tokenizer)


def missing_template_notices(model: ResolvedModel) -> tuple[str, ...]:
    """A notice if the training configuration names a template that is not available."""
    if model.template_name is None or _training_template(model) is not None:
        return ()
    name = model.template_name
    return (f"The chat template {name!r} is not available, so the model's own is used. --template FILE sets one.",)


def _training_template(model: ResolvedModel) -> str | None:
    """The template in the configuration, else the one saved with the trained model, else the one it names."""
    if model.template is not None:
        return model.template
    saved = template_text(model.output_folder) if model.output_folder is not None else None
    return saved or TEMPLATES.get(model.template_name or "")


def _template_format(template: str, folder: Path, tokenizer: FastTokenizer) -> TemplateFormat:
    return TemplateFormat(Template(template, f"chat template for {folder.name}"), tokenizer, named_tokens(folder))


def build_model(name: str, engine: Engine, format: Format, tokenizer: FastTokenizer) -> Model:
    return Model(engine, format, name, tokenizer.fingerprint, tokenizer.vocabulary)
