"""The generator is a pure function, keeps its halves apart, and claims only what is true."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from training import digits
from training.abilities import arithmetic, letters, palaver, small_talk, tools
from training.abilities.schemas import function
from training.bars import BARS, Bar, cases
from training.checks import Reply, read, right
from training.mixture import samples
from training.phrasings import ASKS, Draw, Split, banks, essence, halves, share
from training.rendering import render
from training.words import PROGRAM_WORDS, UNSEEN_WORDS, WORDS, held_out, word


def test_a_shard_is_a_pure_function_of_seed_and_number() -> None:
    first = [render(s) for s in islice(samples(5, 7, Split.TRAIN, ()), 200)]
    assert first == [render(s) for s in islice(samples(5, 7, Split.TRAIN, ()), 200)]
    assert first != [render(s) for s in islice(samples(5, 8, Split.TRAIN, ()), 200)]


@pytest.mark.parametrize("file", sorted(path.stem for path in ASKS.glob("*.txt")))
def test_held_out_phrasings_are_others(file: str) -> None:
    for name, forms in banks(file).items():
        train, kept = share(f"{file}/{name}", Split.TRAIN), share(f"{file}/{name}", Split.HELD_OUT)
        assert len(train) >= 8, name
        assert len(kept) >= 2, name
        assert len(set(forms)) == len(forms)
        assert not set(train) & set(kept)


def test_no_phrasing_is_in_both_halves() -> None:
    """Neither another case, nor punctuation, nor other names of its slots bring a kept phrasing into training."""
    found: dict[str, set[Split]] = {}
    for (_, text), half in halves().items():
        found.setdefault(essence(text), set()).add(half)
    assert all(len(both) == 1 for both in found.values())
    assert essence("What's {a} + {b}?") == essence("whats {n}+{m}") != essence("What's {a} - {b}?")


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_every_case_of_every_bar_can_be_judged(bar: Bar) -> None:
    for sample in cases(bar, 120, 5):
        assert sample.expect is not None
        wrong = Reply("zzqx 7770777", ("no call",), True, True)
        assert right(read(render(sample)[1], sample.thinks), sample.expect)
        assert not right(replace(wrong, well_formed=False), sample.expect)
        assert sample.expect.kind in CAN_HOLD_BY_CHANCE or not right(wrong, sample.expect)


CAN_HOLD_BY_CHANCE = ("without", "not_honest", "lower")


def test_unseen_words_are_unseen() -> None:
    train = Draw(Random(1), Split.TRAIN, ("gra", "vel", "yak", "ing", "zi", "pper"))
    kept = Draw(Random(1), Split.HELD_OUT)
    assert not set(UNSEEN_WORDS) & set(WORDS)
    assert not any(held_out(w) for w in (word(train) for _ in range(500)) if w not in {*WORDS, *PROGRAM_WORDS})
    assert all(held_out(word(kept)) for _ in range(500))


def test_words_to_spell_have_every_pair_of_letters() -> None:
    train = Draw(Random(1), Split.TRAIN, ("ra", "vel", "yak", "Zi", "pper"))
    found = [word(train) for _ in range(12000)]
    assert len({w[at : at + 2] for w in found for at in range(len(w) - 1)}) > 0.98 * 26 * 26
    assert all(w.islower() for w in found)


def test_arguments_come_in_the_order_of_the_request() -> None:
    draw = Draw(Random(8), Split.HELD_OUT)
    for _ in range(300):
        exchange, _ = tools.two_calls(draw)
        first, second = (call.name.split("__")[-1] for call in exchange.calls)
        assert exchange.thinking.startswith(f'Two calls: "{first}", "{second}".')
        at = 0
        for given in (value for call in exchange.calls for value in call.arguments.values()):
            if isinstance(given, str):
                at = exchange.user.index(given, at)


def test_unseen_operands_and_functions_are_unseen() -> None:
    train, kept = Draw(Random(1), Split.TRAIN), Draw(Random(1), Split.HELD_OUT)
    for draw in (train, kept):
        for _ in range(300):
            found = [int(n) for n in re.findall(r"\d+", arithmetic.sum_(draw, 6).thinking)[:2]]
            assert arithmetic.held_out(*found) == (draw is kept)
    for _ in range(300):
        wanted = function(kept)
        for name in (wanted.name, *(p.name for p in wanted.parameters)):
            assert any(held_out(part.lower()) for part in re.findall(r"[A-Z]?[a-z]+", name))


def test_every_column_of_every_sum_is_right() -> None:
    draw = Draw(Random(2))
    for _ in range(2000):
        exchange = arithmetic.any_one(draw)
        for left, claimed in re.findall(r"(?<![\d=×÷+-])(\d+(?:[+×-]\d+)+)=(-?\d+)", exchange.thinking):
            assert eval(left.replace("×", "*")) == int(claimed), exchange.thinking


def test_results_are_right() -> None:
    draw = Random(3)
    for _ in range(2000):
        a, b = draw.randrange(10**6), draw.randrange(10**6)
        assert digits.add(a, b)[1] == a + b
        assert digits.add(a, b)[0].endswith(str(a + b))
        assert digits.subtract(a, b)[1] == a - b
        assert digits.subtract(a, b)[0].endswith(str(a - b))
        assert digits.compare(a, b)[1] == max(a, b)
        assert digits.divide(a, 1 + b % 9)[1] == divmod(a, 1 + b % 9)
        assert digits.multiply(a % 1000, b % 100)[0].endswith(str((a % 1000) * (b % 100)))


def test_letters_are_right() -> None:
    draw = Draw(Random(4))
    for _ in range(300):
        exchange = letters.reverse(draw)
        assert exchange.expect is not None
        assert exchange.expect.value[::-1] in exchange.thinking.split(":")[0]


@pytest.mark.parametrize("split", list(Split))
def test_wanted_replies_pass_their_own_checks(split: Split) -> None:
    for sample in islice(samples(6, 0, split, ()), 3000):
        if sample.expect:
            _, reply = render(sample)
            assert right(read(reply, sample.thinks), sample.expect), (sample.expect, reply)


def test_no_two_tools_share_a_name() -> None:
    """Neither do those offered beside a request, and every call is of a tool that is offered with these parameters."""
    drawn = [found for at in range(3) for found in islice(samples(9, at, Split.TRAIN, (), polish=True), 1500)]
    drawn += [found for bar in BARS for found in cases(bar, 60, 11)]
    for found in (one for one in drawn if one.tools):
        offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in found.tools}
        assert len(offered) == len(found.tools)
        for call in found.messages[-1].calls:
            assert set(call.arguments) <= set(offered[call.name])


def test_tools_of_several_servers_are_offered() -> None:
    draw = Draw(Random(4))
    drawn = [tools.several_calls(draw) for _ in range(300)]
    named = [{call.name.split("__")[0] for call in exchange.calls if "__" in call.name} for exchange, _ in drawn]
    assert sum(len(servers) > 1 for servers in named) > 40


COMMAND = re.compile(r"(^|\s)/[a-z]|Ctrl\+C|terminal|`")


def test_answers_about_palaver_name_commands_only_where_the_terminal_is_known() -> None:
    draw = Draw(Random(6))
    drawn = [palaver.any_one(draw) for _ in range(1500)]
    page = [found for found in drawn if found.expect and found.expect.kind == "page_way"]
    assert len(page) > 600
    assert not any(COMMAND.search(found.answer) for found in page)
    at_terminal = Draw(Random(6), terminal=True)
    asked = [palaver.any_one(at_terminal) for _ in range(1500)]
    told = [found for found in asked if COMMAND.search(found.answer)]
    other = [found for found in asked if found.expect and found.expect.kind == "page_way"]
    assert len(told) > 5 * len(other) > 0  # a question may name the page there


def test_small_talk_names_no_command_of_the_terminal() -> None:
    """The page has none."""
    draw = Draw(Random(6))
    assert not any(re.search(r"(^|\s)/[a-z]", small_talk.any_one(draw).answer) for _ in range(600))
