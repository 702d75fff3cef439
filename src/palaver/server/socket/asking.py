"""From a message that opens a turn to what is asked of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import merge_parameters, resolve_parameters
from palaver.chat.reply_stream import ReplyRequest
from palaver.constraints import Grammar
from palaver.errors import BadParameter
from palaver.messages import Role
from palaver.sampling import NUMBERS, STRINGS
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.remembering import Remembered
from palaver.server.openai.wishes import without_sentinels
from palaver.server.settings import ServerSettings
from palaver.server.socket.conversing import messages_of
from palaver.server.socket.fields import Opening
from palaver.server.socket.reading import UNKNOWN

OURS = {"max_new_tokens": "max_tokens", "length_penalty": "end_penalty"}
"""Names of the protocol for parameters that have another one here; both are taken."""
_LISTS = ("logit_bias", "banned_ids", "stop_ids", "constraint")
GENERATION = frozenset((*OURS, *NUMBERS, *STRINGS, *_LISTS, "do_sample")) - {"logprobs"}
DEFAULTS = {"max_tokens": 256, "end_penalty": 1.1, "thinking": False}
"""The protocol's own, for what neither a request nor the operator names."""
MAX_LISTED = 1024
THEIRS = {
    **{name: f"generation.{name}" for name in GENERATION},
    **{ours: f"generation.{theirs}" for theirs, ours in OURS.items()},
    **{f"constraint ({grammar})": "generation.constraint" for grammar in Grammar},
    "think": "enable_thinking",
    "thinking": "enable_thinking",
}
"""What the protocol calls the parameters that may be wrong."""


def asked(opening: Opening, model: Model, settings: ServerSettings, owner: str, remembered: Remembered) -> ReplyRequest:
    """May take a while: not for the event loop. Raises whatever makes the reply impossible."""
    messages = messages_of(opening, settings.limits.messages)
    with in_their_words(THEIRS):
        decided = resolve_parameters(
            model.engine.info.defaults, wanted_of(opening, model, settings), draw_seed(), datetime.now()
        )
    past = remembered.past(owner, messages, (None,) * sum(one.role is Role.ASSISTANT for one in messages))
    return ReplyRequest(messages, decided.sampling, (), replace(decided.options, calls=False), 0, owner, past)


def wanted_of(opening: Opening, model: Model, settings: ServerSettings) -> dict[str, Any]:
    """The parameters of the reply."""
    given = {**_generation(opening.generation), "thinking": opening.enable_thinking, "spoken": _spoken(opening)}
    chosen = {name: value for name, value in given.items() if value is not None}
    return _thinking(merge_parameters(DEFAULTS, settings.defaults, chosen, settings.forced), model)


def _spoken(opening: Opening) -> bool | None:
    """Whether the text is to be fit for speech. One that must follow a grammar can't be made so."""
    if not opening.tts.enabled and not opening.use_tts_template:
        return None
    if opening.generation.get("constraint") is not None:
        raise BadParameter("generation.constraint", "...", "does not go with a reply that is spoken")
    return True


def _generation(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in GENERATION:
            raise BadParameter(f"generation.{name[:80]}", "...", UNKNOWN)
        ours = OURS.get(name, name)
        if ours in found and found[ours] != value:
            raise BadParameter(f"generation.{name}", value, "contradicts its other name")
        if value is not None:
            found[ours] = value
    for name in _LISTS[1:3]:
        if isinstance(ids := found.get(name), list) and len(ids) > MAX_LISTED:
            raise BadParameter(f"generation.{name}", f"{len(ids)} ids", f"at most {MAX_LISTED} are taken")
    return without_sentinels(_sampled(found))


def _sampled(found: dict[str, Any]) -> dict[str, Any]:
    """`do_sample` says whether tokens are drawn at all; without, the likeliest one is taken."""
    wanted = found.pop("do_sample", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise BadParameter("generation.do_sample", wanted, "must be true or false")
    return {**found, "temperature": 0} if wanted is False else found


def _thinking(parameters: dict[str, Any], model: Model) -> dict[str, Any]:
    """Thinking that is not wanted is switched off; where a template has no switch, the thought is closed at once."""
    wanted = parameters["thinking"]
    if model.format.thinking_switch is not None or not isinstance(wanted, bool) or (wanted and not model.format.thinks):
        return parameters
    others = {name: value for name, value in parameters.items() if name != "thinking"}
    return {**others, "thinking_budget": 0} if model.format.thinks and not wanted else others
