"""An answer that is read aloud holds no character unfit for speech; all else may."""

from __future__ import annotations

import pytest

from palaver.engines.core.token_masks import ExitMarkers, UnspeakableTokens, VocabularyIndex, unspeakable_characters
from palaver.engines.torch import TorchEngine
from palaver.generation import Prompt
from palaver.phases import Phase, Phases, State, StateText, Tracker, Trigger
from palaver.sampling import Sampling
from tests.engines.generate import continued, run
from tests.engines.tiny import CALL, CALL_END, END, THINK, THINK_END, VOCABULARY

CONTROL = frozenset(range(256, len(VOCABULARY)))
PROMPT = Prompt(tuple(b"Say it:"), phases=Phases((State(Phase.ANSWER),), ends=frozenset({END}), hidden=CONTROL))
FRESH, ANSWER, THINKING, CALLING = range(4)


def phases(think: int | bytes, call: int | bytes, start: int = FRESH) -> Phases:
    """A thought may come first and a call anywhere, by tokens or by text."""
    think_end, call_end = (THINK_END, CALL_END) if isinstance(think, int) else (b"</t>", b"</c>")
    opened = (Trigger(think, THINKING), Trigger(call, CALLING))
    return Phases(
        states=(
            State(Phase.ANSWER, opened, other=ANSWER),
            State(Phase.ANSWER, (Trigger(call, CALLING),)),
            State(Phase.THINKING, (Trigger(think_end, FRESH),)),
            State(Phase.TOOL_CALL, (Trigger(call_end, FRESH),)),
        ),
        start=start,
        ends=frozenset({END}),
        hidden=CONTROL,
    )


def text_in_phase(ids: tuple[int, ...] | list[int], layout: Phases, phase: Phase) -> str:
    """The text of all tokens in a phase."""
    tracker = Tracker(layout, VOCABULARY)
    happenings = [happening for token_id in ids for happening in tracker.feed(token_id)]
    found = [h.data for h in happenings if isinstance(h, StateText) and layout.states[h.state].phase is phase]
    return b"".join(found).decode(errors="replace")


def unspeakable(text: str) -> set[str]:
    return set(text) & unspeakable_characters()


def test_the_list_holds_what_the_reference_misses() -> None:
    assert set("*#`[]()/\\{}<>|“”「」＊＃（）［］／＜＞｛｝＿～＂﹡⁽") <= unspeakable_characters()
    assert not unspeakable_characters() & set("abcÄ你, .!?:;'’-—%$€0123456789，。！？…\n")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_random_bytes_never_spell_an_unfit_character(engine: TorchEngine, temperature: float) -> None:
    """Not even byte by byte, as `＊` is spelled if no token contains it."""
    seen = ""
    for seed in range(12):
        likely = tuple((byte, 5.0) for byte in "＊「“*".encode())
        sampling = Sampling(temperature=temperature, max_tokens=120, seed=seed, logit_bias=likely, spoken=True)
        out = await run(engine, PROMPT, sampling)
        text = text_in_phase(out.ids, PROMPT.phases, Phase.ANSWER)
        assert not unspeakable(text)
        seen += text
    assert any(ord(character) >= 0x80 for character in seen)


async def test_without_voice_they_come(engine: TorchEngine) -> None:
    out = [await run(engine, PROMPT, Sampling(max_tokens=120, seed=seed)) for seed in range(4)]
    assert unspeakable("".join(text_in_phase(one.ids, PROMPT.phases, Phase.ANSWER) for one in out))


@pytest.mark.parametrize("start", [FRESH, THINKING, CALLING])
@pytest.mark.parametrize(("think", "call"), [(THINK, CALL), (b"<t>", b"<c>")])
async def test_thinking_and_calls_are_free(
    engine: TorchEngine, think: int | bytes, call: int | bytes, start: int
) -> None:
    layout = phases(think, call, start)
    free = ""
    for seed in range(6):
        sampling = Sampling(max_tokens=150, seed=seed, spoken=True)
        out = await run(engine, Prompt(PROMPT.context_ids, phases=layout), sampling)
        assert not unspeakable(text_in_phase(out.ids, layout, Phase.ANSWER))
        free += text_in_phase(out.ids, layout, Phase.THINKING) + text_in_phase(out.ids, layout, Phase.TOOL_CALL)
    assert start == FRESH or unspeakable(free)


async def test_a_call_that_is_marked_by_text_can_be_made(engine: TorchEngine) -> None:
    """Its marker has unspeakable characters: once begun it is completed, so that none of it becomes answer."""
    layout = phases(b"<t>", b"<call>", ANSWER)
    sampling = Sampling(max_tokens=40, logit_bias=((ord("<"), 100.0),), spoken=True)
    out = await run(engine, Prompt(PROMPT.context_ids, phases=layout), sampling)
    assert b"".join(VOCABULARY[i] for i in out.ids).startswith(b"<call>")
    assert not unspeakable(text_in_phase(out.ids, layout, Phase.ANSWER))


async def test_a_spoken_reply_goes_on_as_if_it_had_not_been_stopped(engine: TorchEngine) -> None:
    layout = phases(b"<t>", b"<c>")
    prompt = Prompt(PROMPT.context_ids, phases=layout)
    sampling = Sampling(max_tokens=60, seed=3, spoken=True)
    whole = await run(engine, prompt, sampling)
    for cut in (1, 7, 30, 59):
        assert (await run(engine, continued(prompt, whole.ids[:cut]), sampling)).ids == whole.ids[cut:]


def test_tokens_that_begin_a_marker_may_come() -> None:
    vocabulary = (b"<", b"\n<to", b"<tool> {", b"a < b", b"*", b"x<to", b"fine", b"<|end|>", b"(<to")
    tokens = UnspeakableTokens(VocabularyIndex(vocabulary))
    anywhere = ExitMarkers((b"<tool>",), (b"<tool>",))
    at_first = ExitMarkers((b"<tool>",), ())
    ends = frozenset({7})
    assert tokens.banned_ids(anywhere, ends, 9).tolist() == [3, 4, 8]
    assert tokens.banned_ids(at_first, ends, 9).tolist() == [3, 4, 5, 8]
    assert tokens.banned_ids(ExitMarkers((), ()), ends, 9).tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert tokens.banned_ids(ExitMarkers((), ()), ends, 4).tolist() == [0, 1, 2, 3]
