"""The slash commands, one module per group."""

from palaver.repl.command_table import CommandTable
from palaver.repl.commands import (
    branches,
    compare,
    conversations,
    files,
    help,
    model,
    parameters,
    thinking,
    tools,
    voice,
)


def table() -> CommandTable:
    modules = (conversations, branches, compare, thinking, parameters, tools, files, voice, model, help)
    return CommandTable(module.commands for module in modules)
