"""The real program at a pseudo-terminal: commands, keys, streaming."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaver.repl.commands import table
from tests import media_files
from tests.repl.conftest import Door
from tests.repl.terminal import ALT_ENTER, CTRL_C, CTRL_R, CTRL_T, ENTER, MARK, TAB, UP, Terminal

STATISTICS = r"\d+ tokens( \(\d+ thinking\))? · [\d.]+ tokens/s · first [\d.]+ s · prompt \d+"


def fresh(terminal: Terminal) -> None:
    """Starts a new conversation with the initial parameters."""
    terminal.type(CTRL_C)
    terminal.prompt()
    terminal.do("/preset load fresh")
    assert "new conversation" in terminal.do("/new").lower()


def test_a_turn(terminal: Terminal) -> None:
    fresh(terminal)
    terminal.enter("What is 1234 + 5678?")
    terminal.wait(r"^Thinking · [\d.]+ s( · \d+ tokens?)?\n│ ")
    terminal.until(STATISTICS)
    shown = terminal.prompt()
    turn = shown[shown.rindex("› What is 1234") :]
    assert re.fullmatch(
        rf"› What is 1234 \+ 5678\?\nThought for [\d.]+ s · \d+ tokens\n\n[^│]*6912[^│]*\n{STATISTICS}(?s:.*)\n›", turn
    )


def test_markdown_is_rendered(terminal: Terminal) -> None:
    fresh(terminal)
    assert re.search(r"n +n²\n─+\n1 +1\n2 +4\n3 +9", terminal.do("Make a table of the squares from 1 to 8."))
    assert re.search(r"\n 1 \w+\n 2 \w+\n 3 \w+", terminal.do("List five colours."))


def test_every_command(terminal: Terminal, tmp_path: Path) -> None:
    """Every command of the table is used at least once."""
    fresh(terminal)
    text = tmp_path / "note.txt"
    text.write_text("The word is kiwi.\n")
    picture, document = tmp_path / "red.png", tmp_path / "trip.pdf"
    picture.write_bytes(media_files.picture())
    document.write_bytes(media_files.pdf("Leaves at nine"))
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "roll", "description": "Roll a die.", "parameters": {"type": "object"}}]))
    saved, written = tmp_path / "out.jsonl", tmp_path / "out.md"
    steps = [
        ("/help", r"/quit +quit; everything is saved"),
        ("/help all", r"/temperature \[NUMBER"),
        ("/help think", r"on \| off \| default"),
        ("/system You are brief.", "System prompt: You are brief."),
        ("/system", "You are brief."),
        ("/system clear", "No system prompt"),
        ("/title", "No title yet"),
        ("/context", "This conversation is empty"),
        ("/undo", "Nothing to undo"),
        ("/redo", "Nothing to redo"),
        ("/voice", "Replies are not spoken"),
        ("/continue", "no reply to continue"),
        ("/expand", "no reply yet"),
        ("/compare", "Type /compare COLUMN COLUMN"),
        ("/compare off", "Messages get one reply again"),
        ("/choose", "No replies are compared"),
        ("What is 2 + 3?", "5"),
        ("/title", 'Title: "What is 2'),
        ("/title Sums", 'Title: "Sums"'),
        ("/status", r"conversation +Sums"),
        ("/model", "Available models: .*sprout"),
        ("/context", r"\d+ of 8,192 tokens .* left"),
        ("/tokens", r'1  "<think>"'),
        ("/tokens 999", "must be between 1 and"),
        ("/expand", r"│ \d"),
        ("/retry", STATISTICS),
        ("/branches", r"2\* +2 messages"),
        ("/switch 1", "1 You"),
        ("/switch next", "2 versions"),
        ("/undo", "Undone"),
        ("/redo", "Redone"),
        ("/continue", "The reply is complete"),
        ("/history", r"1 You\nWhat is 2 \+ 3\?\n\n2 Model"),
        ("/history 1", "2 Model"),
        ("/branch 1", 'Your next message starts a new branch. Now at: "What is 2'),
        ("/branch", "Now at the start of the conversation"),
        ("/undo", "Undone"),
        ("/undo", 'Undone. Now at: ".*5'),
        ("/set", "temperature"),
        ("/set top_k 5", "top_k = 5 · the model's default is 20"),
        ("/set top_k=default", "top_k = 20 · the model's default"),
        ("/set top_p 7", r"top_p must be between 0 and 1 \(got 7.0\)"),
        ("/set nothing 1", "Unknown parameter 'nothing'"),
        ("/set overflow shorten", "overflow = shorten"),
        ("/set overflow default", "overflow = refuse"),
        ("/params", r"seed +1 +set"),
        ("/preset save mine", 'Saved the settings as preset "mine"'),
        ("/preset load mine", "temperature"),
        ("/preset", "Presets: .*mine"),
        ("/preset delete mine", "Deleted preset"),
        ("/stop", "stop: none"),
        ('/stop "\\n\\n"', r'stop: "\\n\\n"'),
        ("/stop clear", "stop: none"),
        ("/think", "Thinking: the model's default"),
        ("/think off", "Thinking: off"),
        ("What is 3 + 4?", r"(?s)\n[^│]*7.*\n\d+ tokens ·"),
        ("/think on", "Thinking: on"),
        ("/think budget 5", "at most 5 tokens"),
        ("/think effort high", "no thinking effort"),
        ("/think default", "Thinking: the model's default"),
        ("/think maybe", "Type /think on, off"),
        ("/collapse off", "in full"),
        ("/collapse", "collapsed"),
        ("/list", r"1\* +Sums"),
        ("/search 2 + 3", r"1 +Sums +You: What is"),
        ("/open 1", "Sums · "),
        ("/open Sums", "Sums · "),
        ("/open nowhere at all", "No conversation matches"),
        (f"/save {saved}", "Added to"),
        (f"/export md {written}", "Saved to"),
        (f"/export md {written}", "already exists"),
        (f"/import {saved}", "Imported 1 conversation"),
        ("/import nothing.jsonl", "No such file"),
        ("/attach nothing.png", "No such file"),
        (f"/attach {picture}", r"does not accept pictures: a vision model is\s+needed for that"),
        (f"/attach {document}", "will be sent with your next message"),
        (str(text), "will be sent with your next message"),
        ("/file clear", "Nothing is attached"),
        ("/listen", "Type /listen FILE"),
        ("/listen nothing.wav", "No such file"),
        ("/tools", "No tools"),
        (f"/tools {tools}", "roll Roll a die."),
        ("/tools off", "No tools"),
        ("/result 6", "No tool call is waiting"),
        ("/copy", r"Copied \d+ characters"),
        ("/edit inline", "edit ›"),
        ("/delete", "Deleted."),
        ("/new", "new conversation"),
        ("/hepl", "Did you mean /help"),
        ("/model nowhere", "Can't find the model 'nowhere'.*sprout is still in use|not available here"),
        ("/model sprout", "context 8,192"),
    ]
    for line, expected in steps:
        if line == "/edit inline":
            terminal.enter(line)
            terminal.wait("edit › ")
            terminal.type(CTRL_C)
            terminal.prompt()
            continue
        shown = terminal.do(line)
        found = re.search(expected, shown) or re.search(expected, " ".join(shown.split()))
        assert found, f"{line}: {expected}\n{terminal.shown()}"
    assert json.loads(saved.read_text())["messages"][0]["content"] == [{"type": "text", "text": "What is 2 + 3?"}]
    assert "What is 2 + 3?" in written.read_text()
    names = {line[1:].split()[0] for line, _ in steps if line.startswith("/")}
    parameters = {command.name for command in table() if command.group == "Parameters"} - {"temperature"}
    untried = {command.name for command in table()} - names - parameters - {"temperature", "quit"}
    assert untried == set()


def test_a_diffusion_reply_comes_into_focus(tmp_path: Path) -> None:
    """The reply has many blocks: a draft is painted, however seldom the terminal gets to paint."""
    door = Door("local", tmp_path, ("sprout-diffusion", "--local", "--data", str(tmp_path)))
    with door.open("--set", "min_tokens=200", "--set", "max_tokens=200") as terminal:
        terminal.prompt()
        terminal.enter("What is 17 + 25?")
        terminal.see(r"[░▒▓]{3}")
        terminal.until(STATISTICS)
        shown = terminal.prompt()
    assert "42" in terminal.transcript()
    assert not re.search("[░▒▓]", shown)


def test_a_new_conversation_frees_the_cache_of_the_old_one(terminal: Terminal) -> None:
    fresh(terminal)
    question = "Which of these words is the longest one: pear, grapefruit, fig?"
    first = terminal.do(question)
    again = cached(terminal.do("/retry"))
    terminal.do("/new")
    assert cached(terminal.do(question)) == cached(first) < again - 15  # all share the system turn


def cached(shown: str) -> int:
    found = re.search(r"\((\d+)\s+cached\)", shown)
    return int(found[1]) if found else 0


def test_every_parameter_can_be_asked_for_and_set(terminal: Terminal) -> None:
    fresh(terminal)
    for command in table():
        if command.group == "Parameters" and "default]" in command.arguments:
            assert f"{command.name} = " in terminal.do(f"/{command.name}")
    assert "temperature = 0.5" in terminal.do("/temp 0.5")
    assert "max_tokens = none" in terminal.do("/max_tokens none")
    assert "must be between 0 and 5" in terminal.do("/temperature 9")
    assert "must be a number" in terminal.do("/temperature warm")
    assert "temperature = 0.6 · the model's default" in terminal.do("/temperature default")


def test_lines_and_pastes(terminal: Terminal) -> None:
    """Pasted lines stay one message with their indentation."""
    fresh(terminal)
    terminal.paste("  def f():\n      return 1\n\n  f()")
    terminal.wait(r"› +def f\(\):\n +return 1\n\n +f\(\)$")
    terminal.type(ENTER)
    terminal.until(STATISTICS)
    terminal.prompt()
    assert "1 You\n  def f():\n      return 1\n\n  f()\n\n2 Model" in terminal.do("/history")
    fresh(terminal)
    terminal.type("one" + ALT_ENTER + "two\\" + ENTER + "three")
    terminal.wait(r"› one\n  two\n  three$")
    terminal.type(ENTER)
    terminal.until(STATISTICS)
    terminal.prompt()
    assert "1 You\none\ntwo\nthree\n\n2 Model" in terminal.do("/history")


def test_slashes(terminal: Terminal) -> None:
    fresh(terminal)
    assert re.search(STATISTICS, terminal.do("/etc/hosts is a file"))
    assert re.search(STATISTICS, terminal.do("//help"))
    shown = terminal.do("/history")
    assert "/etc/hosts is a file" in shown
    assert "3 You\n/help\n" in shown


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose whole path fits into a line of the terminal."""
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        yield Path(folder)


def test_completion(terminal: Terminal, short_path: Path) -> None:
    fresh(terminal)
    terminal.type("/colla")
    terminal.wait("collapse thoughts to a few")
    terminal.type(TAB)
    terminal.wait("› /collapse")
    terminal.type(" " + TAB)
    terminal.wait(lambda shown: re.search(r"\bon\b", shown.rpartition(MARK)[2]) is not None)
    terminal.type(CTRL_C)
    terminal.prompt()
    terminal.type("/set temper")
    terminal.wait("0 takes the likeliest")
    terminal.type(TAB)
    terminal.wait("› /set temperature")
    terminal.type(CTRL_C)
    terminal.prompt()
    (short_path / "a file.json").write_text("[]")
    terminal.type(f"/tools {short_path}/a")
    terminal.type(TAB)
    terminal.wait(lambda shown: "a file.json" in shown.replace("\n", ""))
    terminal.type(CTRL_C)
    terminal.prompt()
    terminal.do("Hello there")
    terminal.type("/open Hel")
    terminal.wait(r"Hello there +\d{4}-")
    terminal.type(CTRL_C)
    terminal.prompt()


def test_control_c_at_each_stage(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    terminal.type("never sent")
    terminal.wait("› never sent")
    terminal.type(CTRL_C)
    terminal.prompt()
    assert "Nothing here yet" in terminal.do("/history")

    with door.crawling():
        terminal.enter("What is 123456 + 654321?")  # in a thought
        terminal.wait(r"^│ \d")
        terminal.stop()
    assert "777777" not in terminal.shown()
    assert re.search("777777", terminal.do("/continue"))

    with door.crawling():
        terminal.enter("Count from 1 to 40.")  # in an answer
        terminal.wait(r"1, 2, 3, 4, 5")
        terminal.stop()
    last = terminal.do("/continue")
    assert re.search(r"(?s)37, 38,\s39,\s40", last)
    assert "Stopped" not in last.split("/continue\n")[1]


def test_save_leaves_no_turn_out_behind_a_stopped_reply(terminal: Terminal, door: Door, tmp_path: Path) -> None:
    fresh(terminal)
    saved = tmp_path / "stopped.jsonl"
    with door.crawling():
        terminal.enter("Count from 1 to 200.")
        terminal.wait(lambda shown: "1, 2, 3" in shown.rpartition("› Count from")[2])
        terminal.stop()
    terminal.do("What is 1234 + 5678?")
    assert "1 reply was stopped" in terminal.do(f"/save {saved}").replace("\n", " ")
    (line,) = saved.read_text(encoding="utf-8").splitlines()
    asked, stopped, again, reply = json.loads(line)["messages"]
    assert asked["content"] == [{"type": "text", "text": "Count from 1 to 200."}]
    assert stopped["content"][0]["text"].startswith("1, 2, 3")
    assert (stopped["weight"], "weight" in reply) == (0, False)
    assert again["content"] == [{"type": "text", "text": "What is 1234 + 5678?"}]
    assert "6912" in reply["content"][0]["text"]


def test_control_c_right_after_enter(terminal: Terminal) -> None:
    """It stops the reply, or gives an unsent message back to the prompt. It never ends the program."""
    endings = (f"Cancelled.\n{MARK} Count from 1 to 200.", f"Stopped. /continue picks up where it left off.\n\n{MARK}")
    for _ in range(8):
        fresh(terminal)
        terminal.enter("Count from 1 to 200.")
        terminal.type(CTRL_C)
        terminal.wait(lambda shown: shown.endswith(endings))


def test_control_c_in_the_prefill(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    terminal.do("/max_tokens 8")
    terminal.paste("\n".join(f"{n} apples and {n} pears." for n in range(250)))
    terminal.wait("249 pears")
    with door.crawling():
        terminal.type(ENTER)
        terminal.wait(r"^Reading · ")
        terminal.type(CTRL_C)
        terminal.until(r"0 tokens · .*\nStopped")
        terminal.prompt()
    assert re.search(r"length limit|tokens/s", terminal.do("/continue", 120))


def test_twice_drops_the_reply(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    with door.crawling():
        terminal.enter("Count from 1 to 40.")
        terminal.wait(r"1, 2, 3")
        terminal.type(CTRL_C + CTRL_C)
        assert "Reply dropped, your message kept" in terminal.prompt()
    shown = terminal.do("/history")
    assert "1 You\nCount from 1 to 40." in shown
    assert "2 Model" not in shown
    assert 'Now at: "1, 2' in terminal.do("/undo")
    assert "2 Model" in terminal.do("/history")


def test_up_edits_the_last_message(terminal: Terminal) -> None:
    fresh(terminal)
    terminal.do("What is 2 + 2?")
    terminal.type(UP)
    terminal.wait(r"^edit › What is 2 \+ 2\?$")
    terminal.type("\x7f\x7f3?")
    terminal.enter()
    terminal.until(rf"(?s)edit › What is 2 \+ 3\?.*{STATISTICS}")
    terminal.prompt()
    assert re.search(r"1 +2 messages +What is 2 \+ 2\?.*\n2\* +2 messages +What is 2 \+ 3\?", terminal.do("/branches"))
    terminal.type(UP)
    terminal.wait(r"^edit › ")
    terminal.type(UP)
    terminal.wait(r"^› /branches")
    terminal.type(CTRL_C)
    terminal.prompt()


def test_thoughts_are_toggled(terminal: Terminal) -> None:
    fresh(terminal)
    terminal.do("What is 12 + 13?")
    terminal.type(CTRL_T)
    terminal.wait(r"│ .*\n(.*\n)*Thoughts are shown in full.")
    terminal.prompt()
    shown = terminal.do("What is 14 + 15?")
    assert shown.count("│") > 2
    assert "Thought for" in shown
    terminal.enter("What is 1111 + 2222?")
    terminal.wait(r"^Thinking · ")
    terminal.type(CTRL_T)
    terminal.until(STATISTICS)
    terminal.prompt()
    assert "│" not in terminal.do("What is 16 + 17?").split("Thought for")[1]


def test_history_is_searched(terminal: Terminal) -> None:
    fresh(terminal)
    terminal.do("Hello kiwi")
    terminal.do("What is 1 + 1?")
    terminal.type(CTRL_R + "kiwi")
    terminal.wait(r"(?s)Hello kiwi.*kiwi")
    terminal.type("\x07")
    terminal.type(CTRL_C)
    terminal.prompt()


def test_typing_ahead_is_kept(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    with door.crawling():
        terminal.enter("Count from 1 to 30.")
        terminal.wait("1, 2, 3")
        terminal.type("and then")
    terminal.until(STATISTICS)
    terminal.wait("› and then$")
    terminal.type(CTRL_C)
    terminal.prompt()


def test_resizing_while_it_streams(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    with door.crawling():
        terminal.enter("Count from 1 to 40.")
        terminal.wait("1, 2, 3, 4, 5")
        terminal.resize(40, 24)
    terminal.until(r"tokens/s")
    terminal.prompt()
    assert all(len(line) <= 40 for line in terminal.shown().splitlines())
    assert re.search(r"37, 38,\s39,\s40", terminal.shown())
    terminal.resize(80, 24)
    shown = terminal.do("/history")
    assert " ".join(str(n) + "," for n in range(1, 40)) in " ".join(shown.split())


def test_tools_by_hand(terminal: Terminal, tmp_path: Path) -> None:
    fresh(terminal)
    path = tmp_path / "tools.json"
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Weather at a place.", "parameters": city}
    path.write_text(json.dumps([{"type": "function", "function": weather}]))
    assert "get_weather Weather at a place." in terminal.do(f"/tools {path}")
    assert re.search(r'calls get_weather\(city="Paris"\)', terminal.do("What is the weather in Paris?"))
    assert "get_weather" in terminal.do("/result")
    assert re.search(STATISTICS, terminal.do('/result {"sky": "sunny", "degrees": 21}'))
    assert re.search(r"(?s)1 You.*2 Model.*calls get_weather.*3 Tool\n.*sunny.*4 Model", terminal.do("/history"))


def test_two_tools_of_the_demo_run_after_one_answer(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    added = terminal.do("/tools add demo")
    if door.name != "local":  # a command is code that runs
        assert "only its operator can add one" in added
        return
    assert "demo__clock" in added
    assert "summarize text=…" in terminal.do("/tools attach demo")
    assert "all will be sent with your next message" in terminal.do("/tools attach demo notes://all")
    terminal.do("/attach clear")
    terminal.do("/temperature 0")
    terminal.enter("What time is it, and what is 17 * 23?")
    terminal.wait(r"Run demo__clock, demo__calculate\? ")
    shown = terminal.transcript()
    assert 'calls clock()\ncalls calculate(expression="17 * 23")' in shown
    assert shown.count('(expression="17 * 23")') == 1
    terminal.type("y\r")
    terminal.until("calculate: 391")
    shown = terminal.prompt()
    time = re.search(r"clock: (.+)", terminal.transcript())
    assert time is not None
    answer = " ".join(shown[shown.rindex("calculate: 391") + len("calculate: 391") :].split())
    assert time[1].strip() in answer
    assert "391" in answer
    assert "demo is removed." in terminal.do("/tools remove demo")


def test_any_script(terminal: Terminal) -> None:
    fresh(terminal)
    terminal.do("/max_tokens 40")
    for text in ("日本語のテキスト", "שלום עולם", "naïve café 🎉"):
        terminal.do(f"Say {text}")
    shown = terminal.do("/history")
    assert all(text in shown for text in ("日本語のテキスト".replace("", "")[:3], "שלום", "café"))


def test_the_history_file_is_private(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    files = list(door.folder.rglob("history"))
    if door.name == "local":
        assert [path.stat().st_mode & 0o777 for path in files] == [0o600]
