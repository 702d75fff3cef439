"""The slash commands, one module per group."""

from palaver.repl.command_table import CommandTable
from palaver.repl.commands import (
    attachments,
    branches,
    compare,
    conversations,
    help,
    import_export,
    model,
    parameters,
    thinking,
    tools,
    voice,
)


def table() -> CommandTable:
    files = (import_export, attachments)
    modules = (conversations, branches, compare, thinking, parameters, tools, *files, voice, model, help)
    return CommandTable(module.commands for module in modules)
