"""Records the screens of docs/terminal.md by running the program at a pseudo-terminal.

    PYTHONPATH=src python3 -m docs.make_screens

Each section from `<!-- screen: NAME -->` to `<!-- end -->` in the guide is replaced by the screen of that name.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.repl.terminal import CTRL_C, CTRL_D, Terminal

SOURCE = Path(__file__).parents[1] / "src"
GUIDE = Path(__file__).with_name("terminal.md")
Recorder = Callable[[Terminal, Path], str]


def first(terminal: Terminal, folder: Path) -> str:
    whole = terminal.transcript()
    return whole[: whole.index("›")] + terminal.do("What is 1234 + 5678?")


def markdown(terminal: Terminal, folder: Path) -> str:
    return terminal.do("Make a table of the squares from 1 to 6.")


def thinking(terminal: Terminal, folder: Path) -> str:
    terminal.do("/new")
    terminal.enter("What is 123456 + 654321?")
    live = terminal.wait(r"(?s)123456 \+ 654321\?\nThinking.*│.*\n│.*\n│")
    live = live[live.rindex("› What is 123456") :]
    terminal.until("tokens/s")
    terminal.prompt()
    return live


def expanded(terminal: Terminal, folder: Path) -> str:
    return "\n".join(terminal.do(line) for line in ("/expand", "/think off", "/think effort high"))


def stopped(terminal: Terminal, folder: Path) -> str:
    terminal.do("/new")
    terminal.enter("Count from 1 to 40.")
    terminal.wait("9, 10")
    terminal.type(CTRL_C)
    terminal.until(r"Stopped. /continue")
    shown = terminal.prompt()
    return shown[shown.rindex("› Count") :].removesuffix("›") + terminal.do("/continue")


def branches(terminal: Terminal, folder: Path) -> str:
    terminal.do("/new")
    terminal.do("/seed default")
    parts = [terminal.do("Tell me a fact."), terminal.do("/retry"), terminal.do("/branches"), terminal.do("/switch 1")]
    return "\n".join(parts) + "\n" + terminal.do("/undo")


def parameters(terminal: Terminal, folder: Path) -> str:
    lines = ("/temperature", "/temp 0.2", "/set top_p=7", '/stop "END"', "/preset save careful", "/hepl")
    return "\n".join(terminal.do(line) for line in lines)


def tokens(terminal: Terminal, folder: Path) -> str:
    terminal.do("/new")
    terminal.do("/think off")
    terminal.do("Tell me a fact.")
    shown = terminal.do("/tokens")
    return "\n".join([*shown.splitlines()[:9], "…"]) + "\n" + terminal.do("/context")


def tools(terminal: Terminal, folder: Path) -> str:
    city = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
    text = f'[{{"name": "get_weather", "description": "Weather at a place.", "parameters": {city}}}]'
    (folder / "tools.json").write_text(text)
    terminal.do("/new")
    lines = ("/tools tools.json", "What is the weather in Paris?", '/result {"sky": "sunny", "degrees": 21}')
    return "\n".join(terminal.do(line) for line in lines)


def saved(terminal: Terminal, folder: Path) -> str:
    terminal.do("/new")
    terminal.do("What is 2 + 3?")
    shown = terminal.do("/save sums.jsonl")
    return f"{shown}\n$ cat sums.jsonl\n{(folder / 'sums.jsonl').read_text().strip()}"


SCREENS: dict[str, Recorder] = {
    record.__name__: record
    for record in (first, markdown, thinking, expanded, stopped, branches, parameters, tokens, tools, saved)
}


def main() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--local", "--data", str(folder / "data"), "--set", "seed=1"]
        command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', name, sys.executable, "-m", "palaver", "chat", *flags]
        with Terminal(command, rows=40, environment={"PYTHONPATH": str(SOURCE)}) as terminal:
            terminal.wait(" is ready · ", 120)
            terminal.prompt()
            terminal.do("/preset save start")
            for name, record in SCREENS.items():
                terminal.do("/preset load start")
                guide = insert_screen(guide, name, record(terminal, folder))
            terminal.type(CTRL_D)
            terminal.wait_for_exit()
    GUIDE.write_text(guide, encoding="utf-8")


def insert_screen(guide: str, name: str, shown: str) -> str:
    """The guide with the section replaced by the screen. Empty prompts are left out."""
    lines = [line for line in shown.splitlines() if line.strip() != "›"]
    screen = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    section = re.compile(rf"(<!-- screen: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert section.search(guide), f"the guide has no place for {name}"
    return section.sub(lambda found: f"{found[1]}```text\n{screen}\n```\n{found[2]}", guide)


if __name__ == "__main__":
    main()
