"""The phase tracker: results do not depend on how bytes are cut, and possible markers are held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaver.phases import Phase, Phases, Scanner, State, StateEntered, StateText, StopMatched, Tracker, Trigger
from tests.pieces import Pieces, cuts

TEXT = Phases(
    (
        State(Phase.ANSWER, (Trigger(b"<think>", 1),)),
        State(Phase.THINKING, (Trigger(b"</think>", 0),)),
    )
)


def run(pieces: list[bytes], stops: tuple[str, ...] = (), phases: Phases = TEXT) -> list[tuple[str, str]]:
    """The text of each phase, with adjacent pieces joined."""
    vocabulary = Pieces()
    tracker = Tracker(phases, vocabulary, stops)
    events = [event for piece in pieces for event in tracker.feed(vocabulary.add(piece))]
    events += tracker.flush()
    out: list[tuple[str, str]] = []
    for event in events:
        match event:
            case StateText(state, data):
                phase = phases.states[state].phase
                if out and out[-1][0] == phase:
                    out[-1] = (phase, out[-1][1] + data.decode("latin-1"))
                else:
                    out.append((phase, data.decode("latin-1")))
            case StateEntered(state, marker):
                out.append(("entered", marker.decode("latin-1")))
            case StopMatched(stop):
                out.append(("stopped", stop))
    return out


def test_markers_in_plain_text_change_the_phase_and_are_not_said() -> None:
    assert run([b"a<think>b</think>c"]) == [
        ("answer", "a"),
        ("entered", "<think>"),
        ("thinking", "b"),
        ("entered", "</think>"),
        ("answer", "c"),
    ]


@given(st.data())
def test_the_cut_makes_no_difference(data: st.DataObject) -> None:
    text = data.draw(st.lists(st.sampled_from(["<think>", "</think>", "<th", "x", "</", "STOP", "ST", "é"]))) or [""]
    whole = "".join(text).encode()
    stops = data.draw(st.sampled_from([(), ("STOP",), ("x", "STO")]))
    assert run(data.draw(cuts(whole)), stops) == run([whole], stops)


def test_a_half_marker_is_held_back_and_let_go_when_it_turns_out_to_be_text() -> None:
    vocabulary = Pieces()
    tracker = Tracker(TEXT, vocabulary)
    assert tracker.feed(vocabulary.add(b"1 <thi")) == [StateText(0, b"1 ")]
    assert tracker.feed(vocabulary.add(b"s")) == [StateText(0, b"<this")]


def test_a_token_marker_is_no_text_and_the_same_letters_are() -> None:
    phases = Phases((State(Phase.ANSWER, (Trigger(0, 1),)), State(Phase.THINKING, (Trigger(1, 0),))))
    tracker = Tracker(phases, [b"<think>", b"</think>", b"<", b"think>"])
    assert tracker.feed(2) + tracker.feed(3) == [StateText(0, b"<"), StateText(0, b"think>")]
    assert tracker.feed(0) == [StateEntered(1, b"<think>")]
    assert tracker.feed(3) == [StateText(1, b"think>")]


def test_stop_strings_count_in_the_answer_only() -> None:
    assert run([b"<think>STOP</think>go STOP on"], ("STOP",))[-2:] == [("answer", "go "), ("stopped", "STOP")]


def test_nothing_is_said_after_the_end() -> None:
    phases = Phases((State(Phase.ANSWER),), ends=frozenset({0}))
    tracker = Tracker(phases, [b"<end>", b"x"])
    assert [tracker.feed(1), tracker.feed(0), tracker.feed(1)] == [[StateText(0, b"x")], [], []]
    assert tracker.ended


def test_hidden_tokens_are_not_text() -> None:
    tracker = Tracker(Phases((State(Phase.ANSWER),), hidden=frozenset({0})), [b"<pad>", b"x"])
    assert [tracker.feed(0), tracker.feed(1)] == [[], [StateText(0, b"x")]]


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.text("abc", max_size=30), st.data())
def test_the_scanner_finds_what_a_whole_search_finds(patterns: list[str], text: str, data: st.DataObject) -> None:
    keys = [p.encode() for p in patterns]
    found = [(text.find(p), -len(p), p) for p in patterns if p in text]
    expected = min(found)[2].encode() if found else None
    scanner = Scanner(keys)
    said, met = b"", None
    for piece in data.draw(cuts(text.encode())):
        released, met, _ = scanner.feed(piece)
        said += released
        if met:
            break
    if met is None:
        released, met, _ = scanner.end()
        said += released
    assert met == expected
    assert said == (text.encode() if met is None else text.encode()[: text.find(met.decode())])


QUOTED = Phases((State(Phase.ANSWER, (Trigger(b"</c>", 1),), quotes=b'"'), State(Phase.THINKING)))


@given(st.data())
def test_a_marker_inside_quotation_marks_is_text(data: st.DataObject) -> None:
    whole = b'{"a": "</c> \\" </c>"} < </c>done'
    assert run(data.draw(cuts(whole)), phases=QUOTED) == [
        ("answer", '{"a": "</c> \\" </c>"} < '),
        ("entered", "</c>"),
        ("thinking", "done"),
    ]


FRESH = Phases(
    (
        State(Phase.ANSWER, (Trigger(b"<think>", 1), Trigger(b"A:", 3)), other=2),
        State(Phase.THINKING, (Trigger(b"</think>", 0),)),
        State(Phase.ANSWER),
        State(Phase.CONTROL, (Trigger(b"go", 1),), other=2),
    )
)


@given(st.data())
def test_a_marker_counts_only_where_the_state_knows_it(data: st.DataObject) -> None:
    whole = b" <think>x</think>\n y <think> z"
    assert run(data.draw(cuts(whole)), phases=FRESH) == [
        ("answer", " "),
        ("entered", "<think>"),
        ("thinking", "x"),
        ("entered", "</think>"),
        ("answer", "\n y <think> z"),
    ]


@given(st.data())
def test_a_chain_that_breaks_off_leads_to_the_text(data: st.DataObject) -> None:
    assert run(data.draw(cuts(b"A: go x")), phases=FRESH)[-2:] == [("entered", "go"), ("thinking", " x")]
    assert run(data.draw(cuts(b"A: gx")), phases=FRESH) == [
        ("entered", "A:"),
        ("control", " "),
        ("entered", ""),
        ("answer", "gx"),
    ]


GROWING = Phases((State(Phase.ANSWER, (Trigger(b"</c>", 1), Trigger(b"</c>x", 0)), quotes=b'"'), State(Phase.THINKING)))


@given(st.data())
def test_a_marker_that_might_have_grown_counts_when_a_quotation_mark_follows(data: st.DataObject) -> None:
    assert run(data.draw(cuts(b'a</c>"b"')), phases=GROWING) == [
        ("answer", "a"),
        ("entered", "</c>"),
        ("thinking", '"b"'),
    ]


def test_hidden_tokens_inside_the_letters_of_a_marker_are_as_if_not_there() -> None:
    phases = Phases(TEXT.states, hidden=frozenset({0}))
    tracker = Tracker(phases, [b"<pad>", b"<th", b"ink>"])
    assert [tracker.feed(1), tracker.feed(0), tracker.feed(2)] == [[], [], [StateEntered(1, b"<think>")]]


@given(st.data())
def test_a_stop_string_may_span_states_of_one_phase(data: st.DataObject) -> None:
    phases = Phases((State(Phase.ANSWER, other=1), State(Phase.ANSWER)))
    assert run(data.draw(cuts(b"\n\nUser: x")), ("\n\nUser:",), phases) == [("stopped", "\n\nUser:")]
