"""A request's fields as the parameters of a reply: the same names that conversations keep theirs under."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from palaver.chat.parameters import merged
from palaver.errors import BadParameter
from palaver.formats.switches import Switch
from palaver.server.openai.constrained import constraint_of
from palaver.server.openai.fields import ChatRequest, CompletionRequest, SamplingFields
from palaver.server.openai.voicing import is_spoken
from palaver.server.settings import ServerSettings

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "end_penalty",
    "seed",
    "min_tokens",
)
_BUDGETS = (
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
    "max_thinking_tokens",
)
MAX_LISTED = 1024


def sampling_parameters(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """What both kinds of request share."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    given["top_k"] = 0 if request.top_k == -1 else request.top_k
    strings, ids = _stops(request)
    given["stop"] = strings or None
    given["stop_ids"] = ids or None
    given["banned_strings"] = request.banned_strings or None
    given["banned_ids"] = _listed("banned_token_ids", request.banned_token_ids) or None
    given["logit_bias"] = _biases(request.logit_bias)
    given["max_tokens"] = request.max_tokens
    given["constraint"] = constraint_of(request)
    return given


def chat_parameters(request: ChatRequest, settings: ServerSettings, switches: Iterable[Switch]) -> dict[str, Any]:
    """All that a chat request decides, but for its tools and messages; the operator's word goes before and after."""
    given = sampling_parameters(request)
    given["max_tokens"] = _agreed(request, ("max_completion_tokens", "max_tokens"))
    given["thinking_budget"] = _budget(request)
    given["thinking"], given["effort"] = _thinking(request), _effort(request)
    given["variables"] = _variables(request, settings, {switch.name for switch in switches})
    given["response_prefix"] = request.response_prefix or None
    given["healing"] = request.token_healing or None
    given["logprobs"] = _alternatives(request)
    given["one_call"] = _one_call(request) or None
    given["spoken"] = is_spoken(request) or None
    return decided_by(settings, given)


def decided_by(settings: ServerSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    return merged(
        settings.defaults, {name: value for name, value in given.items() if value is not None}, settings.forced
    )


def _stops(request: SamplingFields) -> tuple[list[str], list[int]]:
    stop = request.stop if isinstance(request.stop, list) else [] if request.stop is None else [request.stop]
    ids = [*(one for one in stop if isinstance(one, int)), *(request.stop_token_ids or ())]
    return [one for one in stop if isinstance(one, str)], _listed("stop_token_ids", ids) or []


def _listed(name: str, ids: list[int] | None) -> list[int] | None:
    if ids is not None and len(ids) > MAX_LISTED:
        raise BadParameter(name, f"{len(ids)} ids", f"at most {MAX_LISTED} are taken")
    return ids


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    found = {}
    for token, bias in (biases or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise BadParameter("logit_bias", token, "is no token id")
        if not -100 <= bias <= 100:
            raise BadParameter("logit_bias", bias, "must be from -100 to 100")
        found[int(token)] = bias
    return found or None


def _agreed(request: ChatRequest, names: Collection[str]) -> Any:
    """The value of whichever of these names is given; two that differ contradict each other."""
    said = {name: value for name in names if (value := getattr(request, name)) is not None}
    if len(set(said.values())) > 1:
        raise BadParameter(list(said)[1], list(said.values())[1], f"contradicts {next(iter(said))}")
    return next(iter(said.values()), None)


def _budget(request: ChatRequest) -> int | None:
    budget: int | None = _agreed(request, _BUDGETS)
    if budget is None and request.thinking is not None:
        budget = request.thinking.budget_tokens
    if budget is None and request.reasoning is not None:
        budget = request.reasoning.max_tokens
    return None if budget == -1 else budget


def _thinking(request: ChatRequest) -> bool | None:
    if request.enable_thinking is not None:
        return request.enable_thinking
    if request.thinking is not None and request.thinking.type != "adaptive":
        return request.thinking.type == "enabled"
    return request.reasoning.enabled if request.reasoning is not None else None


def _effort(request: ChatRequest) -> str | None:
    return request.reasoning_effort or (request.reasoning.effort if request.reasoning is not None else None)


def _variables(request: ChatRequest, settings: ServerSettings, known: Collection[str]) -> dict[str, Any] | None:
    """Only those that the format learned as switches, unless the operator allows others."""
    given = {**(request.template_vars or {}), **(request.chat_template_kwargs or {})}
    for name, value in given.items():
        if name not in known and not settings.any_variables:
            has = ", ".join(sorted(known)) or "none"
            raise BadParameter(f"chat_template_kwargs.{name}", value, f"this model's switches are: {has}")
    return given or None


def _one_call(request: ChatRequest) -> bool:
    """The older form has room for one."""
    return request.parallel_tool_calls is False or (bool(request.functions) and not request.tools)


def _alternatives(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise BadParameter("top_logprobs", request.top_logprobs, "needs logprobs to be true")
    return request.top_logprobs if request.logprobs else None
