"""How a turn is made: its prompt, its reply and its sound, told into its record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import cast

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.errors import EngineError, PalaverError, ShuttingDown
from palaver.events import AnswerDelta, Event, Finished, Notice, ReadEvent, Started, Waiting
from palaver.generation import Finish
from palaver.server.errors import log_unexpected
from palaver.server.metrics import Metrics, TokenPace
from palaver.server.openai.history import begin_replies
from palaver.server.openai.sampling_params import api_field_names
from palaver.server.openai.stored import stream_stored_turn
from palaver.server.socket.request import THEIRS, decode_recording, parse_history, parse_turn, turn_parameters
from palaver.server.socket.schemas import TurnRequest
from palaver.server.socket.streaming import TurnEncoder
from palaver.server.socket.turn import SocketTurn
from palaver.server.state import ServerState
from palaver.voice.base import Samples, VoiceSettings
from palaver.voice.speech import Speech


class TurnSound:
    """Entered by the turn that is spoken; left, it is silent, whatever was still to be said."""

    def __init__(self, speech: Speech, heard: Callable[[Samples], None]) -> None:
        self._speech = speech
        self._heard = heard
        self._saying: asyncio.Task[None]

    async def __aenter__(self) -> TurnSound:
        self._saying = asyncio.create_task(self._say())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._speech.stop()
        self._saying.cancel()
        await asyncio.gather(self._saying, return_exceptions=True)

    def take(self, event: ReadEvent) -> None:
        """Only what is answered is said."""
        if isinstance(event, AnswerDelta):
            self._speech.feed(event.text)

    def stop(self) -> None:
        self._speech.stop()

    async def finish(self) -> PalaverError | None:
        """Waits until all is said. Gives what went wrong: a voice that fails takes no word from the text."""
        self._speech.end()
        try:
            await self._saying
        except PalaverError as error:
            return error
        except Exception as error:
            log_unexpected(error)
            return EngineError("The voice failed: the server's log has the details.")
        return None

    async def _say(self) -> None:
        async with aclosing(aiter(self._speech)) as pieces:
            async for piece in pieces:
                if len(piece.samples):
                    self._heard(piece.samples)


class TurnProducer:
    """Holds all that it takes: let go of at the end, when the record is all that is left."""

    def __init__(self, turn: SocketTurn, opening: TurnRequest, state: ServerState) -> None:
        self._owner = turn.owner
        self._opening = opening
        self._state = state
        self._telling = TurnEncoder(turn.id, turn.record, opening.streaming, opening.tts.enabled)
        self._metrics = Metrics() if opening.conversation else state.metrics  # turns of conversations are counted
        self._pace = TokenPace(self._metrics)
        self._counted = 0
        """Tokens whose time was noted."""
        self._utterance: ReplyStream | None = None
        self._sounding: TurnSound | None = None
        self._stopped = False
        self._cut = False
        """Whether the server ended it, because it ends itself."""

    def stop(self) -> None:
        self._stopped = True
        if self._sounding is not None:
            self._sounding.stop()
        if self._utterance is not None:
            self._utterance.stop()

    async def run(self) -> None:
        """To its last message, which tells of an error where there was one."""
        try:
            with nullcontext() if self._opening.conversation else self._state.floor.taken(self._owner, self._end):
                await self._speak()
        except asyncio.CancelledError:
            self._telling.fail(ShuttingDown())
            raise
        except Exception as error:
            log_unexpected(error)
            self._telling.fail(error)

    def _end(self) -> None:
        self._cut = True
        self.stop()

    async def _speak(self) -> None:
        model = self._state.service.models.current()
        utterance = await (self._landed(model) if self._opening.conversation else asyncio.to_thread(self._begun, model))
        async with self._voiced():
            with api_field_names(THEIRS):
                finished = await self._said(utterance)
            if self._cut and finished.finish is Finish.STOPPED:
                raise ShuttingDown
            self._tell(finished.tail)
            if self._sounding is not None and (error := await self._sounding.finish()):
                self._tell([Notice(str(error))])
            self._telling.take(replace(finished, tail=()))
        if self._opening.conversation:
            return
        reply = utterance.reply()
        self._state.remembered.keep(self._owner, utterance.request.messages, reply.message, reply.token_ids)

    async def _landed(self, model: Model) -> ReplyStream:
        """A turn of the conversation that is named, followed as it is said."""
        chat, settings = self._state.service.chat(self._owner), self._state.settings
        messages = parse_history(self._opening, settings.limits.messages)
        with api_field_names(THEIRS):
            wanted = turn_parameters(self._opening, model, settings)
            place = await begin_replies(chat, model, [wanted], messages, self._opening.conversation, self._state, None)
            self._telling.place = {"conversation": place.conversation, "reply": place.reply}
            return await stream_stored_turn(self._state, chat, model, await chat.message(place.reply), 0, False)

    def _begun(self, model: Model) -> ReplyStream:
        request = parse_turn(self._opening, model, self._state.settings, self._owner, self._state.remembered)
        with api_field_names(THEIRS):
            return model.utterance(request)

    @asynccontextmanager
    async def _voiced(self) -> AsyncIterator[None]:
        """Inside, what is answered is spoken, where that is wanted."""
        wish = self._opening.tts
        if not wish.enabled:
            yield
            return
        speaker = await self._state.speakers.current()
        reference = await asyncio.to_thread(decode_recording, wish.ref_audio_data)
        voice = VoiceSettings(reference=reference if speaker.follows else b"")
        async with TurnSound(Speech(speaker, voice), self._telling.sound) as self._sounding:
            if self._stopped:
                self._sounding.stop()
            yield

    async def _said(self, utterance: ReplyStream) -> Finished:
        """Runs the reply to its end, telling what it says. The end itself is not told yet."""
        finished: Finished | None = None
        self._utterance = utterance
        if self._stopped:
            utterance.stop()
        try:
            async with utterance, aclosing(utterance.batches()) as batches:
                async for events in batches:
                    if isinstance(last := events[-1], Finished):
                        finished = last
                    else:
                        self._take(events, len(utterance.steps))
        finally:
            self._utterance = None
            self._pace.no_longer_waits()
            self._metrics.replied(utterance.usage, finished.finish.value if finished else "left")
        if finished is None:
            raise EngineError("The engine ended the reply without a word.")
        return finished

    def _take(self, events: Sequence[Event], said: int) -> None:
        """What came with one token, or how the turn stands."""
        match events[0]:
            case Waiting() as event:
                self._pace.waits()
                self._telling.take(event)
            case Started() as event:
                self._pace.no_longer_waits()
                self._telling.take(event)
            case _:
                self._tell(cast("Sequence[ReadEvent]", events))
        if said > self._counted:
            self._pace.tokens(said - self._counted)
            self._counted = said

    def _tell(self, events: Sequence[ReadEvent]) -> None:
        for event in events:
            self._telling.take(event)
            if self._sounding is not None:
                self._sounding.take(event)
