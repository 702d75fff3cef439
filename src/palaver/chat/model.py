"""A loaded model: its engine, its chat format and its tokenizer."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from palaver.chat.attachments import check_messages, describe_result_media, has_result_media
from palaver.chat.engine_choice import LoadOptions
from palaver.chat.media_expander import MediaExpander
from palaver.chat.reply_stream import (
    BatchReader,
    GeneratedReply,
    RecordSteps,
    ReplyRecord,
    ReplyRequest,
    StepRecording,
)
from palaver.engines.base import Capability, Engine
from palaver.errors import BadParameter, BrokenModel, ContextOverflow, NoTemplate, NothingToContinue
from palaver.formats.base import Format, RenderOptions
from palaver.formats.format import CompletionFormat, TemplateFormat
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
from palaver.formats.loader import (
    load_completion,
    load_format,
    load_gguf_format,
    named_template,
    named_tokens,
    template_text,
)
from palaver.formats.reader import ReplyReader
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.generation import ExpandedMedia, Finish, Prompt, Step
from palaver.gguf import read_gguf
from palaver.messages import Audio, Image, Message, Text, Tool, ToolResult, Video
from palaver.models.axolotl import find_template
from palaver.models.resolver import ResolvedModel
from palaver.phases import Phase, Phases, State, Vocabulary
from palaver.sampling import MAX_SEED, MAX_TOKENS, Sampling, check_sampling

_MASK = re.compile(r"\[MASK(?::(\d+))?\]")
MAX_MASK = 10_000
"""Tokens of one mask."""


def _mask_length(text: str | None) -> int:
    length = 1 if text is None else int(text[:6])
    if not 1 <= length <= MAX_MASK:
        raise BadParameter("[MASK]", text, f"must be from 1 to {MAX_MASK:,} tokens long")
    return length


def draw_seed() -> int:
    """A random seed that is short enough to type."""
    return secrets.randbelow(min(2**32, MAX_SEED))


def extend_limit(sampling: Sampling, reply_tokens: int) -> Sampling:
    """The sampling for continuing a reply that reached `max_tokens`: the same number of tokens again."""
    if sampling.max_tokens is None:
        return sampling
    return replace(sampling, max_tokens=min(reply_tokens + sampling.max_tokens, MAX_TOKENS))


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
    media: MediaExpander = field(default_factory=MediaExpander, compare=False, repr=False)

    @property
    def text_only(self) -> str:
        """Why a model that sees takes text only; empty for others."""
        return self.engine.info.lacks.get(Capability.MEDIA, "")

    def prompt(
        self, request: ReplyRequest, reply_so_far: Sequence[int] = (), partial_reply: Message | None = None
    ) -> Prompt:
        """Renders the request. Raises ContextOverflow if no token is left for the reply. With media it blocks while the
        engine expands them: call it in a thread."""
        self.check_size(text_size(request.messages, request.tools))
        rendered = self.render(
            request.messages, request.tools, request.options, reply_so_far, partial_reply, request.past_replies
        )
        limit = self.engine.info.context_length
        if len(rendered) >= limit:
            raise ContextOverflow(len(rendered), limit)
        longest, length = request.options.max_prompt_tokens, len(rendered.context_ids)
        if longest is not None and length > longest:
            raise BadParameter("max_prompt_tokens", longest, f"the prompt is longer: {length:,} tokens")
        if request.healing and partial_reply is None:
            rendered = replace(rendered, healing=request.healing, healing_at=request.healing_at)
        phases = replace(rendered.phases, ends=rendered.phases.ends | self.engine.info.end_ids)
        return replace(
            rendered,
            phases=phases,
            owner=request.owner,
            conversation=request.conversation,
            answer_at=request.answer_at,
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
        reply_so_far: Sequence[int] = (),
        partial_reply: Message | None = None,
        past_replies: Sequence[Sequence[int] | None] = (),
    ) -> Prompt:
        """Renders messages, however long, with the media that the model takes. Blocks as `prompt` does."""
        if has_result_media(messages):  # what the template writes is learned only then
            messages = describe_result_media(messages, self._result_media)
        check_messages(messages, self.name, self.engine.info.media, self.text_only)
        counts: Counter[str] = Counter()

        def expand(part: Image | Audio | Video) -> tuple[ExpandedMedia, ...]:
            return self.media.expand(part, self.engine, self.format, options.media, counts)

        return self.format.render(messages, tools, options, reply_so_far, partial_reply, past_replies, expand)

    @cached_property
    def _result_media(self) -> frozenset[str]:
        """The media that the model takes in tool results: those that its template writes there, or that it does not
        know at all, so that they are written into the text."""
        unwritten = frozenset(self.format.placeholders) - self.format.result_media
        if "image" in unwritten or "audio" in unwritten:
            unwritten |= {"video"}  # it becomes pictures and sound
        return frozenset(self.engine.info.media) - unwritten

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
        record_steps: RecordSteps | None = None,
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

        def make_reader() -> BatchReader:
            return BatchReader(self.reader(request, first_prompt), first_prompt)

        recording = None if record_steps is None else StepRecording(record_steps, make_reader)
        return GeneratedReply(request, prompt, make_reader(), self.engine, recording, earlier)

    def fill_text(self, text: str, sampling: Sampling, owner: str = "") -> tuple[str, GeneratedReply]:
        """A diffusion model fills the masks of a text: `[MASK]` is one token, `[MASK:8]` eight.

        Returns the text before the first mask, and the stream that writes the rest.
        """
        self.check_size(len(text))
        before, *rest = _MASK.split(text)
        tokenizer = self.format.tokenizer
        canvas: list[int | None] = []
        for count, behind in zip(rest[::2], rest[1::2], strict=True):
            canvas += [None] * _mask_length(count)
            canvas += tokenizer.encode([behind]) if behind else ()
        if not canvas:
            raise BadParameter("text", text[:40], "must have at least one [MASK], or [MASK:8] for eight tokens")
        ends = self.engine.info.end_ids
        context = (*tokenizer.prefix, *(tokenizer.encode([before]) if before else ())) or (min(ends, default=0),)
        phases = Phases((State(Phase.ANSWER),), ends=ends, hidden=tokenizer.special_ids)
        prompt = Prompt(tuple(context), (), phases, owner=owner, canvas=tuple(canvas))
        reader = CompletionFormat(tokenizer).reader(prompt, ())
        request = ReplyRequest((), sampling, owner=owner)
        return before, GeneratedReply(request, prompt, BatchReader(reader, prompt), self.engine)

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
        prompt = await asyncio.to_thread(self.prompt, request, reply_so_far)
        async with self.stream_reply(request, reply_so_far, prompt=prompt) as stream:
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


def load_model_format(model: ResolvedModel, loading: LoadOptions) -> tuple[FastTokenizer, Format]:
    """The tokenizer and the chat format: from the given template, the one it was trained with, or the model's own."""
    if model.gguf is not None:
        return _load_gguf_format(model.gguf, loading)
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
        if model.fallback_template is None:
            raise
        return tokenizer, _template_format(_named_template(folder, model.fallback_template), folder, tokenizer)


def check_draft_model(path: Path, tokenizer: FastTokenizer) -> None:
    """Raises BadParameter unless its tokens are those of the model that it drafts for, as far as both have them."""
    own = load_gguf_tokenizer(read_gguf(path)) if path.is_file() else load_tokenizer(path)
    size = min(len(own.vocabulary), len(tokenizer.vocabulary))
    if list(own.vocabulary[:size]) != list(tokenizer.vocabulary[:size]):
        raise BadParameter("--draft-model", str(path), "has another vocabulary than the model")


def _load_gguf_format(file: Path, loading: LoadOptions) -> tuple[FastTokenizer, Format]:
    header = read_gguf(file)
    tokenizer = load_gguf_tokenizer(header)
    if loading.raw:
        return tokenizer, CompletionFormat(tokenizer)
    return tokenizer, load_gguf_format(header, tokenizer, loading.template)


def _training_template(model: ResolvedModel) -> str | None:
    """The template in the configuration, else the one saved with the trained model, else the one it names."""
    if model.template is not None:
        return model.template
    saved = template_text(model.output_folder) if model.output_folder is not None else None
    return saved or (_named_template(model.folder, model.template_name) if model.template_name else None)


def _named_template(folder: Path, name: str) -> str:
    """The template of that name, from an installed axolotl or from the tokenizer."""
    found = find_template(name) or named_template(folder, name)
    if found is None:
        known = "neither an installed axolotl nor the model's tokenizer has one of that name"
        raise BrokenModel(f"The training names the chat template {name!r}: {known}. --template FILE sets one.")
    return found


def _template_format(template: str, folder: Path, tokenizer: FastTokenizer) -> TemplateFormat:
    return TemplateFormat(Template(template, f"chat template for {folder.name}"), tokenizer, named_tokens(folder))


def build_model(name: str, engine: Engine, format: Format, tokenizer: FastTokenizer) -> Model:
    return Model(engine, format, name, tokenizer.fingerprint, tokenizer.vocabulary)
