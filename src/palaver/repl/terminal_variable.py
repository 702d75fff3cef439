"""The template variable `terminal`: tells a chat template that the user is at a terminal.

Only templates that have it get it. Sprout's has it: the model then names commands instead of the page's buttons.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from palaver.chat.interface import Chat, ModelCard, ModelState
from palaver.chat.parameters import merge_parameters
from palaver.errors import PalaverError

VARIABLE = "terminal"


async def add_terminal_variable(
    chat: Chat, parent_id: str | None, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The overrides of a turn, with the variable if its model's template has it.

    `settings` are the parameters of the conversation, `parent_id` is the last message before the reply. A branch keeps
    what the model's last reply in it had: another value changes the beginning of the prompt, and all of it would be
    computed again.
    """
    parameters = merge_parameters(settings, overrides)
    with suppress(PalaverError):  # the turn reports it
        card = await _model_of_turn(chat, parameters.get("model", ""))
        if _has_variable(card) and await _had_variable(chat, parent_id, card.name):
            return {**overrides, "variables": {VARIABLE: True, **parameters.get("variables", {})}}
    return dict(overrides)


async def _model_of_turn(chat: Chat, name: str) -> ModelCard:
    """Waits only where the turn would: for the first model. While another one is loaded its card has no switches."""
    card = await chat.model(name)
    if name or card.state is not ModelState.LOADING:
        return card
    in_use = next(iter(await chat.models()), "")
    if in_use and (await chat.model(in_use)).state is ModelState.READY:
        return card
    return await chat.wait_until_ready()


def _has_variable(card: ModelCard) -> bool:
    return any(switch.name == VARIABLE and switch.type == "boolean" for switch in card.switches)


async def _had_variable(chat: Chat, parent_id: str | None, model: str) -> bool:
    """Whether the model's last reply in the branch had the variable, or there is no such reply."""
    path = () if parent_id is None else await chat.path(parent_id)
    replies = [one.reply for one in path if one.reply is not None and one.reply.settings.model == model]
    return not replies or VARIABLE in replies[-1].settings.options.get("variables", {})
