"""`palaver formats show | check | roundtrip`: what they print and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from palaver.commands.formats import formats
from tests.formats.families import FAMILIES, TOOLS
from tests.formats.unseen import FOLDER
from tests.formats.variations import VARIATIONS

RUNNER = CliRunner()
CHOSEN = ("JSON in tags", "tags, opened by the prompt", "no thinking")


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    folder = tmp_path / "templates"
    folder.mkdir()
    for name in CHOSEN:
        (folder / f"{name}.jinja").write_text(FAMILIES[name].source, encoding="utf-8")
    return folder


def recorded(path: Path, wrong: bool = False) -> Path:
    """Cases in the recorded form, from what our own families' replies mean."""
    lines = []
    for name in CHOSEN:
        for case in FAMILIES[name].replies:
            if not case.as_text or "\0" in case.text:
                continue
            calls = [{"function": {"name": n, "arguments": json.dumps(a)}} for n, a in case.calls]
            answer = "wrong" if wrong else case.answer
            expected = {
                "content": answer,
                "reasoning_content": case.thinking,
                "tool_calls": calls,
            }
            tools = [{"function": {"name": t.name, "parameters": t.parameters}} for t in TOOLS]
            lines.append({
                "template": name, "input": case.text, "expect": [expected],
                "messages": [{"role": "user", "content": "q"}],
                "tools": tools if FAMILIES[name].calls else None, "enable_thinking": case.thinks is not False,
                "reasoning_format": "auto" if FAMILIES[name].thinking else "none",
                "tool_choice": 0, "continue": 0, "json_schema": "", "is_partial": False,
            })  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_show_tells_a_person_what_is_known(templates: Path) -> None:
    done = RUNNER.invoke(formats, ["show", str(templates / "JSON in tags.jinja")])
    assert done.exit_code == 0
    for words in (
        "<tool_call>",
        "enable_thinking",
        "reasoning_content",
        "Evidence",
        "(seen)",
        "in mid-thought",
        "Nothing is missing",
    ):
        assert words in done.output


def test_show_tells_what_the_template_may_be_told() -> None:
    done = RUNNER.invoke(formats, ["show", str(FOLDER / "fjord.jinja")])
    assert done.exit_code == 0
    for words in (
        "strength (effort): text ('low', 'medium', 'high'); changes the text before the conversation; "
        "the default is 'medium'",
        "think (thinking): boolean",
        "switches.strength: strength (effort) changes",
        "(inferred)",
        "no_tools: no tools are passed as",
    ):
        assert words in done.output
    done = RUNNER.invoke(formats, ["show", "--json", str(FOLDER / "cobalt.jinja")])
    switch = json.loads(done.output)["switches"]["max_thought_tokens"]
    assert (switch["kind"], switch["type"], switch["default"], switch["off"]) == ("budget", "integer", 4096, 0)


def test_show_says_what_could_not_be_learned(templates: Path) -> None:
    done = RUNNER.invoke(formats, ["show", str(templates / "no thinking.jinja")])
    assert done.exit_code == 0
    assert "its thoughts are part of the answer" in done.output
    assert "calls are shown as text" in done.output


def test_show_explains_frames_sections_and_first_lines(tmp_path: Path) -> None:
    for name, words in (
        ("a first line, closed by a tag", ["the prompt writes its first line", "Here is how I see it:\nRain or not?"]),
        ("named sections, JSON calls", ["<|begin|>NAME<|of|> ... <|finish|>NAME<|of|>"]),
        ("text beside calls, control tokens", ["around an answer with calls after it: '<|note|>\\n' before it"]),
        ("recipients, tags", ["to=user<|message|>Let me check.<|next|><|start|>assistant to=get_weather<|message|>"]),
    ):
        path = tmp_path / "template.jinja"
        path.write_text(VARIATIONS[name].source, encoding="utf-8")
        done = RUNNER.invoke(formats, ["show", str(path)])
        assert [one for one in words if one not in done.output] == [], done.output


def test_show_as_json(templates: Path) -> None:
    done = RUNNER.invoke(formats, ["show", "--json", str(templates / "JSON in tags.jinja")])
    values = json.loads(done.output)
    assert values["calls"]["family"] == "json_calls"
    assert {item["confidence"] for item in values["evidence"]} <= {"seen", "inferred", "convention", "given"}


def test_check_counts_cases_and_templates(templates: Path, tmp_path: Path) -> None:
    done = RUNNER.invoke(formats, ["check", str(templates), str(recorded(tmp_path / "cases.jsonl"))])
    assert done.exit_code == 0, done.output
    found = re.fullmatch(r"(\d+) of (\d+) cases, 3 of 3 templates", done.output.splitlines()[-1])
    assert found
    assert found[1] == found[2]


def test_check_fails_where_a_case_does(templates: Path, tmp_path: Path) -> None:
    done = RUNNER.invoke(formats, ["check", str(templates), str(recorded(tmp_path / "cases.jsonl", wrong=True))])
    assert done.exit_code == 1
    assert "0 of 3 templates" in done.output.splitlines()[-1]
    assert "expected" in done.output


def test_roundtrip_counts_continuations(templates: Path) -> None:
    done = RUNNER.invoke(formats, ["roundtrip", str(templates)])
    assert done.exit_code == 0, done.output
    found = re.fullmatch(r"(\d+) of (\d+) continuations byte-exact over 3 templates", done.output.splitlines()[-1])
    assert found
    assert found[1] == found[2]
    assert "no thinking: it renders no thinking" in done.output


def test_a_folder_without_templates_is_refused(tmp_path: Path) -> None:
    for command in (["check", str(tmp_path), "x"], ["roundtrip", str(tmp_path)]):
        done = RUNNER.invoke(formats, command)
        assert done.exit_code != 0


def test_roundtrip_lists_a_template_that_cannot_chat(templates: Path) -> None:
    source = "{% set query = messages | selectattr('role', 'eq', 'query') | first %}{{ query.content + documents[0] }}"
    (templates / "reranker.jinja").write_text(source, encoding="utf-8")
    done = RUNNER.invoke(formats, ["roundtrip", str(templates)])
    assert done.exit_code == 0, done.output
    assert "reranker: it can't chat: " in done.output
    assert done.output.splitlines()[-1].endswith("over 3 templates")
