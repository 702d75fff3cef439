"""`palaver formats`: shows what was learned from a chat template, and tests it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import report_errors
from palaver.errors import BadParameter

if TYPE_CHECKING:
    from palaver.formats.facts import Facts

formats = typer.Typer(help=strings.FORMATS, no_args_is_help=True)

_PHASE_COLOURS = {"header": "dim", "marker": "cyan", "thinking": "yellow", "answer": "green", "call": "magenta"}


@formats.command(help=strings.FORMATS_SHOW)
def show(
    what: Annotated[str, typer.Argument(metavar="MODEL|TEMPLATE", help=strings.FORMAT_SOURCE)],
    as_json: Annotated[bool, typer.Option("--json", help=strings.FACTS_JSON)] = False,
) -> None:
    """Show what was learned of a format: an example turn, the switches, the tool calls, the evidence."""
    with report_errors():
        facts = _load_facts(what)
        if as_json:
            import json

            from palaver.formats.facts import facts_to_json

            print(json.dumps(facts_to_json(facts), ensure_ascii=False, indent=2))
        else:
            _print_page(what, facts)


def _load_facts(what: str) -> Facts:
    from palaver.commands.format_trials import STRINGS, PieceTokenizer, control_strings
    from palaver.formats.learn.learner import learn
    from palaver.formats.loader import load_format, load_gguf_format
    from palaver.formats.template import Template
    from palaver.gguf import read_gguf
    from palaver.models.resolver import find_gguf, resolve_folder

    file = find_gguf(what)
    if file is not None:
        return load_gguf_format(read_gguf(file)).facts
    path = Path(what)
    if not path.is_file():
        return load_format(resolve_folder(what, weights=False)).facts
    source = path.read_text(encoding="utf-8", errors="replace")
    return learn(Template(source, path.name), STRINGS, PieceTokenizer(control_strings(source)).control)


def _print_page(what: str, facts: Facts) -> None:
    from rich.console import Console
    from rich.text import Text

    from palaver.commands.format_report import (
        describe_continuation,
        describe_facts,
        describe_unlearned,
        describe_variables,
        example_turn,
    )

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(strings.FORMAT_TITLE.format(name=what), "bold"))
    turn = Text()
    for span in example_turn(facts):
        turn.append(span.text, _PHASE_COLOURS[span.kind])
    console.print(Text(strings.FORMAT_TURN), Text(", ".join(_PHASE_COLOURS), "dim"))
    console.print(turn)
    for title, rows in (
        (strings.FORMAT_FACTS, describe_facts(facts)),
        (
            strings.FORMAT_VARIABLES,
            describe_variables(facts) if facts.switches else [strings.FORMAT_NO_VARIABLES],
        ),
        (strings.FORMAT_CONTINUATION, describe_continuation(facts)),
    ):
        console.print(Text(f"\n{title}", "bold"))
        for name, value in rows:
            console.print(Text(f"  {name}: "), Text(value, "cyan"), sep="", end="\n")
    missing = describe_unlearned(facts)
    console.print(Text(f"\n{strings.FORMAT_UNLEARNED}", "bold"))
    for line in missing or [strings.FORMAT_COMPLETE]:
        console.print(Text(f"  {line}"))
    console.print(Text(f"\n{strings.FORMAT_EVIDENCE}", "bold"))
    for evidence in facts.evidence:
        console.print(
            Text(f"  {evidence.about or 'all'}: {evidence.fact} ({evidence.confidence}): "),
            Text(repr(evidence.seen[:200]), "dim"),
            sep="",
        )


@formats.command(help=strings.FORMATS_CHECK)
def check(
    templates: Annotated[Path, typer.Argument(metavar="TEMPLATES_DIR")],
    cases: Annotated[Path, typer.Argument(metavar="CASES_JSONL")],
) -> None:
    """Replay recorded cases whole, by character and in random cuts, with control strings as tokens and as text."""
    from palaver.commands.format_trials import CaseReplay, load_cases

    with report_errors():
        _check_folder(templates)
        if not cases.is_file():
            raise BadParameter("CASES_JSONL", str(cases), strings.NO_FILE)
        replay = CaseReplay(templates)
        passed, total = defaultdict[str, int](int), defaultdict[str, int](int)
        for number, case in enumerate(load_cases(cases)):
            failed = [result for result in replay.results(case, number) if result.error]
            total[case["template"]] += 1
            passed[case["template"]] += not failed
            if failed:
                splits = ", ".join(
                    (strings.CASE_TOKENS if one.tokens else strings.CASE_TEXT).format(split=one.split) for one in failed
                )
                fields = {"number": number, "template": case["template"], "splits": splits}
                print(strings.CASE_FAILED.format(error=failed[0].error, **fields))
    for name in sorted(total):
        print(strings.CASES_OF_TEMPLATE.format(passed=passed[name], total=total[name], template=name))
    complete = sum(passed[name] == total[name] for name in total)
    counts = {"passed": sum(passed.values()), "total": sum(total.values())}
    print(strings.CASES_PASSED.format(complete=complete, templates=len(total), **counts))
    if complete != len(total):
        raise typer.Exit(1)


@formats.command(help=strings.FORMATS_ROUNDTRIP)
def roundtrip(
    templates: Annotated[Path, typer.Argument(metavar="TEMPLATES_DIR")],
    cases: Annotated[Path | None, typer.Option("--cases", help=strings.CASES)] = None,
) -> None:
    """Cut replies at every event, continue them from their text, and compare with the uncut bytes."""
    from palaver.commands.format_trials import load_cases, run_roundtrips

    with report_errors():
        _check_folder(templates)
        exact, count, tried = 0, 0, set()
        reasons: dict[str, set[str]] = defaultdict(set)
        for trial in run_roundtrips(templates, load_cases(cases) if cases else ()):
            if not trial.expressed:
                reasons[f"{trial.template}: {trial.why}"].add(trial.kind)
                continue
            exact, count = exact + trial.exact, count + trial.count
            tried.add(trial.template)
            if trial.exact < trial.count:
                fields = {"template": trial.template, "kind": trial.kind, "exact": trial.exact}
                print(strings.ROUNDTRIP_FAILED.format(count=trial.count, why=trial.why, **fields))
    print(strings.ROUNDTRIP_NOT_COUNTED)
    for reason, kinds in sorted(reasons.items()):
        print(f"  {reason} ({', '.join(sorted(kinds))})")
    print(strings.ROUNDTRIP_PASSED.format(exact=exact, count=count, templates=len(tried)))
    if exact != count:
        raise typer.Exit(1)


def _check_folder(templates: Path) -> None:
    if not templates.is_dir() or not any(templates.glob("*.jinja")):
        raise BadParameter("TEMPLATES_DIR", str(templates), strings.NO_TEMPLATES)
