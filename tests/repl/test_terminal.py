"""The real program at a pseudo-terminal: the screen as a person sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from palaver.repl.commands import table
from tests.repl.conftest import Door
from tests.repl.terminal import ALT_ENTER, CTRL_C, CTRL_R, CTRL_T, ENTER, MARK, TAB, UP, Terminal

STATISTICS = r"\d+ tokens( \(\d+ thinking\))? · [\d.]+ tokens/s · first [\d.]+ s · prompt \d+"


def fresh(talk: Terminal) -> None:
    """A new conversation with the parameters of the start."""
    talk.type(CTRL_C)
    talk.prompt()
    talk.do("/preset load fresh")
    assert "A new conversation" in talk.do("/new")


def test_a_turn(talk: Terminal) -> None:
    fresh(talk)
    talk.enter("What is 1234 + 5678?")
    talk.wait(r"^thinking · [\d.]+ s( · \d+ tokens?)?\n│ ")
    talk.until(STATISTICS)
    shown = talk.prompt()
    turn = shown[shown.rindex("› What is 1234") :]
    assert re.fullmatch(
        rf"› What is 1234 \+ 5678\?\nthought for [\d.]+ s · \d+ tokens\n\n[^│]*6912[^│]*\n{STATISTICS}(?s:.*)\n›", turn
    )


def test_markdown_is_rendered(talk: Terminal) -> None:
    fresh(talk)
    assert re.search(r"n +n²\n─+\n1 +1\n2 +4\n3 +9", talk.do("Make a table of the squares from 1 to 8."))
    assert re.search(r"\n 1 \w+\n 2 \w+\n 3 \w+", talk.do("List five colours."))


def test_every_command(talk: Terminal, tmp_path: Path) -> None:
    """Each is used once, and the list is compared with the table of commands."""
    fresh(talk)
    text = tmp_path / "note.txt"
    text.write_text("The word is kiwi.\n")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "roll", "description": "Roll a die.", "parameters": {"type": "object"}}]))
    saved, written = tmp_path / "out.jsonl", tmp_path / "out.md"
    used = [
        ("/help", r"/quit +leave"),
        ("/help think", r"on \| off \| default"),
        ("/system You are brief.", "The system prompt is: You are brief."),
        ("/system", "You are brief."),
        ("/system clear", "There is no system prompt"),
        ("/title", "no title yet"),
        ("/context", "Nothing was said yet"),
        ("/undo", "nothing to undo"),
        ("/redo", "nothing to redo"),
        ("/voice", "Replies are not spoken"),
        ("/continue", "no reply to continue"),
        ("/expand", "no thought to show"),
        ("What is 2 + 3?", "5"),
        ("/title", "The title is 'What is 2"),
        ("/title Sums", "The title is 'Sums'"),
        ("/status", r"conversation +Sums"),
        ("/model", "At hand: .*sprout"),
        ("/context", r"\d+ of 8,192 tokens .* left"),
        ("/tokens", r'1  "<think>"'),
        ("/tokens 999", "must be from 1 to"),
        ("/expand", r"│ \d"),
        ("/retry", STATISTICS),
        ("/branches", r"2\* +2 messages"),
        ("/switch 1", "1 you"),
        ("/switch next", "one of 2"),
        ("/undo", "Undone"),
        ("/redo", "Redone"),
        ("/continue", "The reply is whole"),
        ("/history", r"1 you\nWhat is 2 \+ 3\?\n\n2 model"),
        ("/history 1", "2 model"),
        ("/branch 1", "Branching: you are after: you: What is 2"),
        ("/branch", "Branching: you are before the first message"),
        ("/undo", "Undone"),
        ("/undo", "Undone: you are after: model"),
        ("/set", "temperature"),
        ("/set top_k 5", "top_k = 5 · the model's default is 20"),
        ("/set top_k=default", "top_k = 20 · the model's default"),
        ("/set top_p 7", r"top_p = 7.0: must be from"),
        ("/set nothing 1", "there is no such parameter"),
        ("/set overflow shorten", "overflow = shorten"),
        ("/set overflow default", "overflow = refuse"),
        ("/params", r"seed +1 +set"),
        ("/preset save mine", "kept as 'mine'"),
        ("/preset load mine", "temperature"),
        ("/preset", "Presets: .*mine"),
        ("/preset delete mine", "is gone"),
        ("/stop", "stop: none"),
        ('/stop "\\n\\n"', r'stop: "\\n\\n"'),
        ("/stop clear", "stop: none"),
        ("/think", "Thinking: the model's default"),
        ("/think off", "Thinking: off"),
        ("What is 3 + 4?", r"(?s)\n[^│]*7.*\n\d+ tokens ·"),
        ("/think on", "Thinking: on"),
        ("/think budget 5", "at most 5 tokens"),
        ("/think effort high", "knows no effort"),
        ("/think default", "Thinking: the model's default"),
        ("/think maybe", "It is /think on, off"),
        ("/collapse off", "in full"),
        ("/collapse", "collapsed"),
        ("/list", r"1\* +Sums"),
        ("/search 2 + 3", r"1 +Sums +user: What is"),
        ("/open 1", "Sums · "),
        ("/open Sums", "Sums · "),
        ("/open nowhere at all", "No conversation has"),
        (f"/save {saved}", "Appended to"),
        (f"/export md {written}", "Written to"),
        (f"/export md {written}", "there already"),
        (f"/import {saved}", "1 taken in"),
        ("/import nothing.jsonl", "No such file"),
        ("/image nothing.png", "No such file"),
        (f"/image {text}", "takes no pictures"),
        (f"/audio {text}", "takes no sound"),
        (f"/file {text}", "goes with the next message"),
        ("/file clear", "Nothing is attached"),
        ("/tools", "No tools are offered"),
        (f"/tools {tools}", "roll Roll a die."),
        ("/tools off", "No tools are offered"),
        ("/result 6", "no call that waits"),
        ("/copy", "characters copied with"),
        ("/edit inline", "edit ›"),
        ("/delete", "Deleted."),
        ("/new", "A new conversation"),
        ("/hepl", "Near it: /help"),
        ("/model nowhere", "No model 'nowhere'|none of the models at hand"),
        ("/model sprout", "context 8,192"),
    ]
    for line, wanted in used:
        if line == "/edit inline":
            talk.enter(line)
            talk.wait("edit › ")
            talk.type(CTRL_C)
            talk.prompt()
            continue
        shown = talk.do(line)
        seen = re.search(wanted, shown) or re.search(wanted, " ".join(shown.split()))
        assert seen, f"{line}: {wanted}\n{talk.shown()}"
    assert json.loads(saved.read_text())["messages"][0]["content"] == "What is 2 + 3?"
    assert "What is 2 + 3?" in written.read_text()
    names = {line[1:].split()[0] for line, _ in used if line.startswith("/")}
    parameters = {command.name for command in table() if command.theme == "Parameters"} - {"temperature"}
    untried = {command.name for command in table()} - names - parameters - {"temperature", "quit"}
    assert untried == set()


def test_a_new_conversation_frees_the_cache_of_the_old_one(talk: Terminal) -> None:
    fresh(talk)
    question = "Which of these words is the longest one: pear, grapefruit, fig?"
    first = talk.do(question)
    assert cached(talk.do("/retry")) > 15
    talk.do("/new")
    assert cached(talk.do(question)) == cached(first) < 10


def cached(shown: str) -> int:
    found = re.search(r"\((\d+)\s+cached\)", shown)
    return int(found[1]) if found else 0


def test_every_parameter_can_be_asked_for_and_set(talk: Terminal) -> None:
    fresh(talk)
    for command in table():
        if command.theme == "Parameters" and "default]" in command.arguments:
            assert f"{command.name} = " in talk.do(f"/{command.name}")
    assert "temperature = 0.5" in talk.do("/temp 0.5")
    assert "max_tokens = none" in talk.do("/max_tokens none")
    assert "must be from" in talk.do("/temperature 9")
    assert "must be a number" in talk.do("/temperature warm")
    assert "temperature = 0.6 · the model's default" in talk.do("/temperature default")


def test_lines_and_pastes(talk: Terminal) -> None:
    """A paste with lines stays one message, indentation is kept."""
    fresh(talk)
    talk.paste("  def f():\n      return 1\n\n  f()")
    talk.wait(r"› +def f\(\):\n +return 1\n\n +f\(\)$")
    talk.type(ENTER)
    talk.until(STATISTICS)
    talk.prompt()
    assert "1 you\n  def f():\n      return 1\n\n  f()\n\n2 model" in talk.do("/history")
    fresh(talk)
    talk.type("one" + ALT_ENTER + "two\\" + ENTER + "three")
    talk.wait(r"› one\n  two\n  three$")
    talk.type(ENTER)
    talk.until(STATISTICS)
    talk.prompt()
    assert "1 you\none\ntwo\nthree\n\n2 model" in talk.do("/history")


def test_slashes(talk: Terminal) -> None:
    fresh(talk)
    assert re.search(STATISTICS, talk.do("/etc/hosts is a file"))
    assert re.search(STATISTICS, talk.do("//help"))
    shown = talk.do("/history")
    assert "/etc/hosts is a file" in shown
    assert "3 you\n/help\n" in shown


def test_completion(talk: Terminal, tmp_path: Path) -> None:
    fresh(talk)
    talk.type("/colla")
    talk.wait("show thoughts in a few")
    talk.type(TAB)
    talk.wait("› /collapse")
    talk.type(" " + TAB)
    talk.wait(lambda shown: re.search(r"\bon\b", shown.rpartition(MARK)[2]) is not None)
    talk.type(CTRL_C)
    talk.prompt()
    talk.type("/set temper")
    talk.wait("0 takes the likeliest")
    talk.type(TAB)
    talk.wait("› /set temperature")
    talk.type(CTRL_C)
    talk.prompt()
    (tmp_path / "a file.json").write_text("[]")
    talk.type(f"/tools {tmp_path}/a")
    talk.type(TAB)
    talk.wait(lambda shown: "a file.json" in shown.replace("\n", ""))
    talk.type(CTRL_C)
    talk.prompt()
    talk.do("Hello there")
    talk.type("/open Hel")
    talk.wait(r"Hello there +\d{4}-")
    talk.type(CTRL_C)
    talk.prompt()


def test_control_c_at_each_stage(talk: Terminal) -> None:
    fresh(talk)
    talk.type("never sent")
    talk.wait("› never sent")
    talk.type(CTRL_C)
    talk.prompt()
    assert "Nothing was said yet" in talk.do("/history")

    talk.enter("What is 123456 + 654321?")  # in a thought
    talk.wait(r"^│ \d")
    talk.type(CTRL_C)
    talk.until("stopped: /continue goes on")
    talk.prompt()
    assert "777777" not in talk.shown()
    assert re.search("777777", talk.do("/continue"))

    talk.enter("Count from 1 to 40.")  # in an answer
    talk.wait(r"1, 2, 3, 4, 5")
    talk.type(CTRL_C)
    talk.until("stopped: /continue goes on")
    talk.prompt()
    last = talk.do("/continue")
    assert re.search(r"(?s)37, 38,\s39,\s40", last)
    assert "stopped" not in last.split("/continue\n")[1]


def test_save_leaves_no_turn_out_behind_a_stopped_reply(talk: Terminal, tmp_path: Path) -> None:
    fresh(talk)
    saved = tmp_path / "stopped.jsonl"
    talk.enter("Count from 1 to 200.")
    talk.until("1, 2, 3")
    talk.type(CTRL_C)
    talk.until("stopped: /continue goes on")
    talk.prompt()
    talk.do("What is 1234 + 5678?")
    assert "1 reply was stopped" in talk.do(f"/save {saved}").replace("\n", " ")
    (line,) = saved.read_text(encoding="utf-8").splitlines()
    asked, stopped, again, reply = json.loads(line)["messages"]
    assert asked["content"] == [{"type": "text", "text": "Count from 1 to 200."}]
    assert stopped["content"][0]["text"].startswith("1, 2, 3")
    assert (stopped["weight"], "weight" in reply) == (0, False)
    assert again["content"] == [{"type": "text", "text": "What is 1234 + 5678?"}]
    assert "6912" in reply["content"][0]["text"]


def test_control_c_in_the_prefill(talk: Terminal) -> None:
    fresh(talk)
    talk.do("/max_tokens 8")
    talk.paste("\n".join(f"{n} apples and {n} pears." for n in range(250)))
    talk.wait("249 pears")
    talk.type(ENTER)
    talk.wait(r"^reading · ")
    talk.type(CTRL_C)
    talk.until(r"0 tokens · .*\nstopped")
    talk.prompt()
    assert re.search(r"length: /continue|tokens/s", talk.do("/continue", 120))


def test_twice_drops_the_reply(talk: Terminal) -> None:
    fresh(talk)
    talk.enter("Count from 1 to 40.")
    talk.wait(r"1, 2, 3")
    talk.type(CTRL_C + CTRL_C)
    talk.wait("The reply was dropped, your message kept")
    talk.prompt()
    shown = talk.do("/history")
    assert "1 you\nCount from 1 to 40." in shown
    assert "2 model" not in shown
    assert "after: model: 1, 2" in talk.do("/undo")
    assert "2 model" in talk.do("/history")


def test_up_edits_the_last_message(talk: Terminal) -> None:
    fresh(talk)
    talk.do("What is 2 + 2?")
    talk.type(UP)
    talk.wait(r"^edit › What is 2 \+ 2\?$")
    talk.type("\x7f\x7f3?")
    talk.enter()
    talk.until(rf"(?s)edit › What is 2 \+ 3\?.*{STATISTICS}")
    talk.prompt()
    assert re.search(r"1 +2 messages +What is 2 \+ 2\?.*\n2\* +2 messages +What is 2 \+ 3\?", talk.do("/branches"))
    talk.type(UP)
    talk.wait(r"^edit › ")
    talk.type(UP)
    talk.wait(r"^› /branches")
    talk.type(CTRL_C)
    talk.prompt()


def test_thoughts_are_toggled(talk: Terminal) -> None:
    fresh(talk)
    talk.do("What is 12 + 13?")
    talk.type(CTRL_T)
    talk.wait(r"│ .*\n(.*\n)*Thoughts are shown in full.")
    talk.prompt()
    shown = talk.do("What is 14 + 15?")
    assert shown.count("│") > 2
    assert "thought for" in shown
    talk.enter("What is 1111 + 2222?")
    talk.wait(r"^thinking · ")
    talk.type(CTRL_T)
    talk.until(STATISTICS)
    talk.prompt()
    assert "│" not in talk.do("What is 16 + 17?").split("thought for")[1]


def test_history_is_searched(talk: Terminal) -> None:
    fresh(talk)
    talk.do("Hello kiwi")
    talk.do("What is 1 + 1?")
    talk.type(CTRL_R + "kiwi")
    talk.wait(r"(?s)Hello kiwi.*kiwi")
    talk.type("\x07")
    talk.type(CTRL_C)
    talk.prompt()


def test_typing_ahead_is_kept(talk: Terminal) -> None:
    fresh(talk)
    talk.enter("Count from 1 to 30.")
    talk.wait("1, 2, 3")
    talk.type("and then")
    talk.until(STATISTICS)
    talk.wait("› and then$")
    talk.type(CTRL_C)
    talk.prompt()


def test_resizing_while_it_streams(talk: Terminal) -> None:
    fresh(talk)
    talk.enter("Count from 1 to 40.")
    talk.wait("1, 2, 3, 4, 5")
    talk.resize(40, 24)
    talk.until(r"tokens/s")
    talk.prompt()
    assert all(len(line) <= 40 for line in talk.shown().splitlines())
    assert re.search(r"37, 38,\s39,\s40", talk.shown())
    talk.resize(80, 24)
    shown = talk.do("/history")
    assert " ".join(str(n) + "," for n in range(1, 40)) in " ".join(shown.split())


def test_tools_by_hand(talk: Terminal, tmp_path: Path) -> None:
    fresh(talk)
    path = tmp_path / "tools.json"
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Weather at a place.", "parameters": city}
    path.write_text(json.dumps([{"type": "function", "function": weather}]))
    assert "get_weather Weather at a place." in talk.do(f"/tools {path}")
    assert re.search(r'calls get_weather\(city="Paris"\)', talk.do("What is the weather in Paris?"))
    assert "get_weather" in talk.do("/result")
    assert re.search(STATISTICS, talk.do('/result {"sky": "sunny", "degrees": 21}'))
    assert re.search(r"(?s)1 you.*2 model.*calls get_weather.*3 tool\n.*sunny.*4 model", talk.do("/history"))


def test_any_script(talk: Terminal) -> None:
    fresh(talk)
    for text in ("日本語のテキスト", "שלום עולם", "naïve café 🎉"):
        talk.do(f"Say {text}")
    shown = talk.do("/history")
    assert all(text in shown for text in ("日本語のテキスト".replace("", "")[:3], "שלום", "café"))


def test_the_history_file_is_private(talk: Terminal, door: Door) -> None:
    fresh(talk)
    files = list(door.folder.rglob("history"))
    if door.name == "local":
        assert [path.stat().st_mode & 0o777 for path in files] == [0o600]
