"""The demo tool server (`palaver tools demo`): a clock, a calculator, dice and notes in a file of its own.

It needs no network and is safe to run: the calculator evaluates numbers only, the notes are one text file.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import secrets
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

P = ParamSpec("P")
NAME = "demo"
NOTES = "demo-notes.txt"
MAX_EXPRESSION = 200
MAX_NUMBER = 10**100
MAX_NOTES_BYTES = 64 << 10
_DICE = re.compile(r"(\d{0,3})d(\d{1,4})", re.IGNORECASE)
_OPERATORS: dict[type[ast.AST], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def run_server(notes: Path, port: int | None = None) -> None:
    """Serves over stdio or, with a port, over HTTP on this machine alone. Returns when its input ends."""
    server = build_server(notes)
    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)


def build_server(notes: Path) -> MCPServer:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

    def explained(function: Callable[P, str]) -> Callable[P, str]:
        """The message of a ValueError is for the model; the SDK hides it from clients."""

        @wraps(function)
        def run(*values: P.args, **named: P.kwargs) -> str:
            try:
                return function(*values, **named)
            except ValueError as error:
                raise ToolError(str(error)) from None

        return run

    server = MCPServer(NAME, instructions="A clock, a calculator, dice and notes.")
    reads = ToolAnnotations(read_only_hint=True)

    @server.tool(description="Tells the date and the time of day.", annotations=reads, structured_output=False)
    def clock() -> str:
        return datetime.now().strftime("%A, %d %B %Y, %H:%M")

    @server.tool(
        description="Computes an arithmetic expression, such as 17 * 23.", annotations=reads, structured_output=False
    )
    @explained
    def calculate(expression: str) -> str:
        return calculate_expression(expression)

    @server.tool(description="Rolls dice, such as 2d6.", annotations=reads, structured_output=False)
    @explained
    def roll_dice(dice: str) -> str:
        return roll(dice)

    @server.tool(description="Writes a note into a file.", structured_output=False)
    @explained
    def add_note(text: str) -> str:
        return write_note(notes, text)

    @server.tool(description="Reads all notes.", annotations=reads, structured_output=False)
    def read_notes() -> str:
        return notes.read_text(encoding="utf-8").strip() if notes.exists() else "There are no notes."

    @server.resource("notes://all", name="notes", description="All notes.", mime_type="text/plain")
    def all_notes() -> str:
        return read_notes()

    @server.prompt(description="Asks for a summary of a text.")
    def summarize(text: str) -> str:
        return f"Summarize this in one sentence: {text}"

    return server


def calculate_expression(text: str) -> str:
    """The value of an arithmetic expression. Raises ValueError for anything else, and for results without end."""
    plain = text.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").replace(",", "").strip(" =?")
    if len(plain) > MAX_EXPRESSION:
        raise ValueError(f"An expression has at most {MAX_EXPRESSION} characters.")
    try:
        value = _evaluate(ast.parse(plain, mode="eval").body)
    except (SyntaxError, RecursionError, OverflowError, TypeError, MemoryError):
        raise ValueError(f"{text!r} is not an arithmetic expression.") from None
    except ZeroDivisionError:
        raise ValueError("Division by zero.") from None
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _evaluate(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_evaluate(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            one, other = _evaluate(left), _evaluate(right)
            if isinstance(sign, ast.Pow) and abs(other) > 300:
                raise ValueError("The exponent is too large.")
            return _bounded(_OPERATORS[type(sign)](one, other))
        case _:
            raise TypeError


def _bounded(value: int | float) -> int | float:
    if not isinstance(value, int | float) or abs(value) > MAX_NUMBER:
        raise ValueError("The number is too large.")
    return value


def roll(dice: str) -> str:
    found = _DICE.fullmatch(dice.strip())
    if found is None or not 1 <= int(found[1] or 1) <= 100 or int(found[2]) < 1:
        raise ValueError(f"{dice!r} are no dice: write 2d6 for two dice with six sides.")
    rolled = [secrets.randbelow(int(found[2])) + 1 for _ in range(int(found[1] or 1))]
    return str(rolled[0]) if len(rolled) == 1 else f"{' + '.join(map(str, rolled))} = {sum(rolled)}"


def write_note(path: Path, text: str) -> str:
    line = " ".join(text.split())
    if not line:
        raise ValueError("The note is empty.")
    if path.exists() and path.stat().st_size + len(line.encode()) > MAX_NOTES_BYTES:
        raise ValueError("There is no room for more notes.")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
        file.write(f"{line}\n")
    return f"Noted: {line}"
