"""The commands of the terminal, by theme."""

from palaver.repl.commands import branches, conversations, files, help, model, parameters, thoughts, tools, voice
from palaver.repl.table import Table


def table() -> Table:
    themes = (conversations, branches, thoughts, parameters, tools, files, voice, model, help)
    return Table(module.commands for module in themes)
