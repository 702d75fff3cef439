"""Runs a turn (prompt, reply and audio) and encodes its events as messages of the protocol in the turn's log."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, assert_never, cast

import numpy as np

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.errors import EngineError, ModelError, PalaverError, ShuttingDown
from palaver.events import (
    AnswerDelta,
    DraftBlock,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    ReadEvent,
    ReplyBatch,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
)
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.server.errors import INTERNAL, log_unexpected
from palaver.server.metrics import Metrics, TokenPace
from palaver.server.openai.request import api_field_names
from palaver.server.openai.stored import conversation_model, start_replies
from palaver.server.socket.registry import MessageLog, SocketTurn
from palaver.server.socket.request import FIELD_NAMES, decode_recording, parse_history, parse_turn, turn_parameters
from palaver.server.socket.schemas import TurnRequest
from palaver.server.state import ServerState
from palaver.voice.base import Samples, silence
from palaver.voice.speech import Speech, choose_voice, not_spoken

_FINISH_REASONS = {
    Finish.END: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.STOPPED: "stopped",
}


class TurnEncoder:
    """Encodes one turn into its message log."""

    def __init__(self, turn_id: str, log: MessageLog, streaming: bool, spoken: bool = False) -> None:
        self._turn_id = turn_id
        self._log = log
        self._streaming = streaming
        self._spoken = spoken
        self.stored_ids: dict[str, str] = {}
        """The ids of the conversation and the reply, if it is stored."""
        self._prefilled = False
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._notices: list[str] = []
        self._audio: list[Samples] = []

    def feed(self, event: Event) -> None:
        match event:
            case Waiting():
                self._waiting(event)
            case Started(prompt_tokens, cached_tokens):
                self._started(prompt_tokens, cached_tokens)
            case ThinkingDelta(text):
                self._delta("thinking_delta", text, self._thinking)
            case AnswerDelta(text):
                self._delta("text_delta", text, self._text)
            case Notice(text):
                self._notices.append(text)
            case PhaseOpened(Phase.THINKING):
                self._open_thinking()
            case PhaseOpened() | ToolCallOpened() | ToolCallDelta():
                pass  # without tools there is only text, and the field of a delta names its phase
            case Finished():
                self._finished(event)
            case DraftBlock():
                pass  # the protocol has no drafts
            case Failed() | Snapshot():
                raise AssertionError("a reply stream has no such event")
            case _:
                assert_never(event)

    def add_audio(self, samples: Samples) -> None:
        """Adds the audio of a clause."""
        if self._streaming:
            self._log.add({"type": "chunk", "text_delta": "", "audio_data": audio_data(samples)})
        else:
            self._audio.append(samples)

    def fail(self, error: Exception) -> None:
        """Ends the turn with an error, unless it has ended already."""
        if self._log.ended:
            return
        message = str(error) if isinstance(error, PalaverError) else INTERNAL
        self._log.add({"type": "error", "error": message, "turn_id": self._turn_id}, last=True)

    def _waiting(self, waiting: Waiting) -> None:
        fields: dict[str, Any] = {"position": waiting.position, "estimated_wait_s": waiting.seconds}
        if waiting.loading:
            fields |= {"loading": waiting.loading, "progress": waiting.progress}
        self._log.add_status({"type": "queued", **fields, "turn_id": self._turn_id})

    def _started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Only the first time: an engine that was restarted reads the prompt again."""
        if not self._prefilled:
            self._prefilled = True
            counts = {"input_tokens": prompt_tokens, "cached_tokens": cached_tokens}
            self._log.add({"type": "prefill_done", **counts, **self.stored_ids, "turn_id": self._turn_id})

    def _open_thinking(self) -> None:
        """Announces thinking before its first token, by an empty delta."""
        if self._streaming:
            self._log.add({"type": "chunk", "text_delta": "", "thinking_delta": ""})

    def _delta(self, name: str, text: str, texts: list[str]) -> None:
        texts.append(text)
        if self._streaming and text:
            self._log.add({"type": "chunk", "text_delta": "", name: text})

    def _finished(self, finished: Finished) -> None:
        for event in finished.tail:
            self.feed(event)
        done: dict[str, Any] = {
            "type": "done",
            "text": "".join(self._text),
            "thinking": "".join(self._thinking),
            "generated_tokens": finished.usage.reply_tokens,
            "input_tokens": finished.usage.prompt_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "finish_reason": _FINISH_REASONS[finished.finish],
            **self.stored_ids,
            "turn_id": self._turn_id,
        }
        if self._spoken and not self._streaming:
            done["audio_data"] = audio_data(np.concatenate([silence(), *self._audio]))
        if self._notices:
            done["notices"] = self._notices
        self._log.add(done, last=True)


def audio_data(samples: Samples) -> str:
    """Base64 of raw little-endian float32."""
    return base64.b64encode(samples.astype("<f4").tobytes()).decode()


class TurnAudio:
    """Speaks a turn's answer while it is entered. Leaving it discards audio that is still pending."""

    def __init__(self, speech: Speech, on_samples: Callable[[Samples], None]) -> None:
        self._speech = speech
        self._on_samples = on_samples
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> TurnAudio:
        self._task = asyncio.create_task(self._speak())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._speech.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def feed(self, event: ReadEvent) -> None:
        """Speaks the answer, not the thinking."""
        if isinstance(event, AnswerDelta):
            self._speech.feed(event.text)

    def stop(self) -> None:
        self._speech.stop()

    async def finish(self) -> PalaverError | None:
        """Waits for the end of the audio. Returns the voice's error, which does not affect the text."""
        self._speech.end()
        try:
            await self._task
        except PalaverError as error:
            return error
        except Exception as error:
            log_unexpected(error)
            return EngineError("The voice failed: the server's log has the details.")
        return None

    async def _speak(self) -> None:
        async with aclosing(aiter(self._speech)) as clauses:
            async for clause in clauses:
                if len(clause.samples):
                    self._on_samples(clause.samples)


class TurnProducer:
    """Generates one turn. The registry drops it at the end and keeps only the turn's log."""

    def __init__(self, turn: SocketTurn, request: TurnRequest, state: ServerState) -> None:
        self._owner = turn.owner
        self._request = request
        self._state = state
        self._encoder = TurnEncoder(turn.id, turn.log, request.streaming, request.tts.enabled)
        self._metrics = Metrics() if request.conversation else state.metrics  # stored turns are counted elsewhere
        self._pace = TokenPace(self._metrics)
        self._reply_stream: ReplyStream | None = None
        self._audio: TurnAudio | None = None
        self._stopped = False
        self._shut_down = False
        """Whether the server stopped the turn because it shuts down."""

    def stop(self) -> None:
        self._stopped = True
        if self._audio is not None:
            self._audio.stop()
        if self._reply_stream is not None:
            self._reply_stream.stop()

    async def run(self) -> None:
        """Runs the turn to its last message, which is an error message if it failed."""
        try:
            with (
                nullcontext()
                if self._request.conversation
                else self._state.limiter.acquire(self._owner, self._on_shutdown)
            ):
                await self._generate()
        except asyncio.CancelledError:
            self._encoder.fail(ShuttingDown())
            raise
        except Exception as error:
            log_unexpected(error)
            self._encoder.fail(error)

    def _on_shutdown(self) -> None:
        self._shut_down = True
        self.stop()

    async def _generate(self) -> None:
        model = await self._model()
        reply_stream = await (
            self._start_stored(model) if self._request.conversation else asyncio.to_thread(self._start_reply, model)
        )
        async with self._audio_output():
            with api_field_names(FIELD_NAMES):
                finished = await self._follow(reply_stream)
            if self._shut_down and finished.finish is Finish.STOPPED:
                raise ShuttingDown
            self._emit(finished.tail)
            if self._audio is not None and (error := await self._audio.finish()):
                self._emit([Notice(not_spoken(error))])
            self._encoder.feed(replace(finished, tail=()))
        if self._request.conversation:
            return
        reply = reply_stream.reply()
        self._state.reply_index.add(self._owner, reply_stream.request.messages, reply.message, reply.token_ids)

    async def _model(self) -> Model:
        conversation, chat = self._request.conversation, self._state.service.chat(self._owner)
        if conversation:
            return await conversation_model(chat, conversation, self._request.model, self._state)
        return await self._state.model(self._request.model)

    async def _start_stored(self, model: Model) -> ReplyStream:
        """Starts a turn in the request's conversation and follows it."""
        chat, settings = self._state.service.chat(self._owner), self._state.settings
        attachments = self._state.attachments(model)
        messages = await asyncio.to_thread(parse_history, self._request, settings.limits.messages, attachments)
        with api_field_names(FIELD_NAMES):
            parameters = {**turn_parameters(self._request, model, settings), "model": model.name}
            stored = await start_replies(chat, model, [parameters], messages, self._request.conversation, None)
            self._encoder.stored_ids = {"conversation": stored.conversation, "reply": stored.reply}
            return await chat.reply_stream(stored.reply)

    def _start_reply(self, model: Model) -> ReplyStream:
        state = self._state
        request = parse_turn(
            self._request, model, state.settings, self._owner, state.reply_index, state.attachments(model)
        )
        with api_field_names(FIELD_NAMES):
            return model.stream_reply(request)

    @asynccontextmanager
    async def _audio_output(self) -> AsyncIterator[None]:
        """Speaks the answer while the context is entered, if the request asks for audio."""
        options = self._request.tts
        if not options.enabled:
            yield
            return
        reference = await asyncio.to_thread(decode_recording, options.ref_audio_data, self._state.service.media)
        try:
            speaker = await self._state.speakers.current()
        except ModelError as error:
            self._emit([Notice(not_spoken(error))])
            yield
            return
        voice, notices = choose_voice(speaker, options.language, reference)
        self._emit([Notice(notice) for notice in notices])
        async with TurnAudio(Speech(speaker, voice), self._encoder.add_audio) as self._audio:
            if self._stopped:
                self._audio.stop()
            yield

    async def _follow(self, reply_stream: ReplyStream) -> Finished:
        """Runs the reply to its end and emits its events, except for the end itself."""
        finished: Finished | None = None
        self._reply_stream = reply_stream
        if self._stopped:
            reply_stream.stop()
        try:
            async with reply_stream, aclosing(reply_stream.batches()) as batches:
                async for batch in batches:
                    match batch.events[0]:
                        case Finished() as finished:
                            pass
                        case Failed() as failed:
                            raise reply_stream.failure(failed)
                        case _:
                            self._feed(batch)
        finally:
            self._reply_stream = None
            self._pace.stop_waiting()
            self._metrics.count_reply(reply_stream.usage, finished.finish.value if finished else "left")
        if finished is None:
            raise EngineError("The engine ended the reply without a result.")
        return finished

    def _feed(self, batch: ReplyBatch) -> None:
        """Emits the events of one token, or a change of the turn's status."""
        match batch.events[0]:
            case Waiting() as event:
                self._pace.start_waiting()
                self._encoder.feed(event)
            case Started() as event:
                self._pace.stop_waiting()
                self._encoder.feed(event)
            case DraftBlock() as event:
                self._encoder.feed(event)
            case _:
                self._emit(cast("Sequence[ReadEvent]", batch.events))
        if batch.steps:
            self._pace.observe(len(batch.steps))

    def _emit(self, events: Sequence[ReadEvent]) -> None:
        for event in events:
            self._encoder.feed(event)
            if self._audio is not None:
                self._audio.feed(event)
