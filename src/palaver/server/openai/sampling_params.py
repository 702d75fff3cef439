"""The fields of a request as the parameters of a reply, under the names that conversations store them by.

Sampling values, and thinking effort as the template's switches, between the operator's defaults and forced
parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from palaver.chat.model import draw_seed
from palaver.chat.parameters import MEDIA_LIMITS, merge_parameters, sets_thinking
from palaver.errors import BadParameter
from palaver.formats.base import Format
from palaver.formats.effort import is_effort_off
from palaver.sampling import NUMBERS
from palaver.server.openai.reasoning_effort import effort_parameters
from palaver.server.openai.response_format import CONSTRAINT_FIELDS, parse_response_format
from palaver.server.openai.schemas import ChatRequest, CompletionRequest, FillRequest, SamplingFields
from palaver.server.settings import ServerSettings

AUDIO = "audio"
_THINKING_PARAMETERS = ("thinking", "effort", "budget")
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "top_a",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "presence_penalty",
    "frequency_penalty",
    "end_penalty",
    "seed",
    "steps",
    "block_length",
    "remasking",
    "top_k",
    "min_tokens",
)
_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict")
_BUDGET_FIELDS = (
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
    "max_thinking_tokens",
)
_CHAT_PARAMETERS = ("thinking", "effort", "budget", "variables", "thinking_budget")
MAX_TOKEN_IDS = 1024


def sampling_parameters(request: ChatRequest | CompletionRequest | FillRequest) -> dict[str, Any]:
    """The parameters that chat requests, text completions and texts with masks share."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    given["repetition_penalty"] = _repetition_penalty(request)
    given["typical_p"] = _agreed(request, ("typical_p", "typical"))
    given |= _dynamic_temperature(request)
    given["dry_penalty_last_n"] = _dry_range(request)
    breakers = request.dry_sequence_breakers
    given["dry_sequence_breakers"] = [breakers] if isinstance(breakers, str) else breakers
    strings, ids = _stops(request)
    given["stop"] = strings or None
    given["stop_ids"] = ids or None
    given["banned_strings"] = request.banned_strings or None
    given["banned_ids"] = _check_count("banned_token_ids", request.banned_token_ids) or None
    given["logit_bias"] = _biases(request.logit_bias)
    given["max_tokens"] = _agreed(request, _MAX_TOKENS_FIELDS)
    given["constraint"] = None
    if not isinstance(request, FillRequest) and request.model_fields_set & CONSTRAINT_FIELDS:
        given["constraint"] = parse_response_format(request)
    return without_sentinels(given)


def without_sentinels(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the values that mean "off", "random" or "no limit" on other servers."""
    plain = dict(given)
    if plain.get("seed") == -1:
        plain["seed"] = draw_seed()
    if plain.get("top_k") == -1:
        plain["top_k"] = 0
    if plain.get("max_tokens") == -1:
        plain["max_tokens"] = None
    if plain.get("top_p") == 0:
        plain |= {"top_p": None, "temperature": 0}
    return plain


def chat_parameters(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    """All parameters of a chat request except tools and messages, merged with the operator's."""
    given = sampling_parameters(request)
    given |= _thinking_parameters(request, settings, format)
    given["response_prefix"] = request.response_prefix or None
    given["healing"] = request.token_healing or None
    given["logprobs"] = _top_logprobs(request)
    given["one_call"] = _one_call(request) or None
    given["spoken"] = is_spoken(request) or None
    given["media"] = request.media and request.media.model_dump(include=set(MEDIA_LIMITS), exclude_none=True)
    return operator_parameters(settings.defaults, _without_none(given), settings.forced, format)


def completion_parameters(request: CompletionRequest, settings: ServerSettings) -> dict[str, Any]:
    """The parameters of a text completion, which has no thinking parameters."""
    given = {**sampling_parameters(request), "logprobs": request.logprobs}
    decided = merge_parameters(settings.defaults, _without_none(given), settings.forced)
    return {name: value for name, value in decided.items() if name not in _CHAT_PARAMETERS}


def fill_parameters(request: FillRequest) -> dict[str, Any]:
    """The parameters of a text with masks."""
    return _without_none(sampling_parameters(request))


def ignores_effort(request: ChatRequest, settings: ServerSettings, format: Format) -> bool:
    """Whether the request names an effort that the model has no switch for."""
    effort = _effort(request)
    return effort is not None and not effort_parameters(effort, _explicit_thinking(request, settings, format), format)


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _thinking_parameters(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    given, effort = _explicit_thinking(request, settings, format), _effort(request)
    from_effort = effort_parameters(effort, given, format) if effort is not None else {}
    return given | {name: value for name, value in from_effort.items() if given.get(name) is None}


def _explicit_thinking(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    return {
        "thinking": _thinking(request),
        "thinking_budget": _budget(request),
        "variables": _variables(request, settings, {switch.name for switch in format.switches}),
    }


def _repetition_penalty(request: SamplingFields) -> float | None:
    penalty: float | None = _agreed(request, ("repetition_penalty", "repeat_penalty"))
    return 1.0 if request.repeat_last_n == 0 else penalty


def _dynamic_temperature(request: SamplingFields) -> dict[str, Any]:
    """Both ways to give it: a range around the temperature, or its bounds, which are nothing where they are equal."""
    given: dict[str, Any] = {
        "dynatemp_range": request.dynatemp_range,
        "dynatemp_exponent": _agreed(request, ("dynatemp_exponent", "temp_exponent")),
    }
    low, high = request.min_temp, request.max_temp
    if low is None and high is None:
        return given
    if low is None or high is None:
        raise BadParameter("min_temp" if high is None else "max_temp", None, "min_temp and max_temp go together")
    if not 0 <= low <= high:
        raise BadParameter("min_temp", low, "must be from 0 to max_temp")
    if request.dynatemp_range is not None:
        raise BadParameter("dynatemp_range", request.dynatemp_range, "is given by min_temp and max_temp already")
    if low < high:
        given["dynatemp_range"] = (high - low) / 2
        if request.temperature != 0:
            given["temperature"] = (low + high) / 2
    return given


def _dry_range(request: SamplingFields) -> int | None:
    if request.dry_range is not None and request.dry_penalty_last_n is not None:
        raise BadParameter("dry_range", request.dry_range, "dry_penalty_last_n is the same and given too")
    return -1 if request.dry_range == 0 else request.dry_range if request.dry_range else request.dry_penalty_last_n


def _stops(request: SamplingFields) -> tuple[list[str], list[int]]:
    stop = request.stop if isinstance(request.stop, list) else [] if request.stop is None else [request.stop]
    ids = [*(one for one in stop if isinstance(one, int)), *(request.stop_token_ids or ())]
    return [one for one in stop if isinstance(one, str)], _check_count("stop_token_ids", ids) or []


def _check_count(name: str, ids: list[int] | None) -> list[int] | None:
    if ids is not None and len(ids) > MAX_TOKEN_IDS:
        raise BadParameter(name, f"{len(ids)} ids", f"at most {MAX_TOKEN_IDS} are taken")
    return ids


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    found = {}
    for token, bias in (biases or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise BadParameter("logit_bias", token, "is not a token id")
        if not -100 <= bias <= 100:
            raise BadParameter("logit_bias", bias, "must be from -100 to 100")
        found[int(token)] = bias
    return found or None


def _agreed(request: SamplingFields, names: Collection[str]) -> Any:
    """The one value of several names for the same field. Raises BadParameter where they differ."""
    given = {name: value for name in names if (value := getattr(request, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise BadParameter(list(given)[1], list(given.values())[1], f"contradicts {next(iter(given))}")
    return next(iter(given.values()), None)


def _budget(request: ChatRequest) -> int | None:
    budget: int | None = _agreed(request, _BUDGET_FIELDS)
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
    """Template variables: only the switches of the format, unless the operator allows others."""
    given = {**(request.template_vars or {}), **(request.chat_template_kwargs or {})}
    for name, value in given.items():
        if name not in known and not settings.any_variables:
            has = ", ".join(sorted(known)) or "none"
            raise BadParameter(f"chat_template_kwargs.{name}", value, f"this model's switches are: {has}")
    return given or None


def _one_call(request: ChatRequest) -> bool:
    """`functions`, the legacy form of tools, allows one call."""
    return request.parallel_tool_calls is False or (bool(request.functions) and not request.tools)


def _top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise BadParameter("top_logprobs", request.top_logprobs, "needs logprobs to be true")
    if request.top_logprobs is not None:
        replace(NUMBERS["logprobs"], name="top_logprobs").check(request.top_logprobs)  # an error has the API's name
    return request.top_logprobs if request.logprobs else None


def is_spoken(request: ChatRequest) -> bool:
    """Whether the reply is to be audio too."""
    return AUDIO in (request.modalities or ())


def operator_parameters(
    defaults: Mapping[str, Any], given: Mapping[str, Any], forced: Mapping[str, Any], format: Format
) -> dict[str, Any]:
    """Merges a request's parameters with the operator's: it overrides the defaults and is overridden by the forced.

    Several parameters control thinking, so one of a higher layer replaces all of them in a lower one.
    """
    if any(given.get(name) is not None for name in _THINKING_PARAMETERS) or sets_thinking(given, format):
        defaults = {name: value for name, value in defaults.items() if name not in _THINKING_PARAMETERS}
    if "thinking" in forced:
        given = _without_conflicts(given, forced["thinking"], format)
    return {**_supported(defaults, format), **given, **_supported(forced, format)}


def _without_conflicts(given: Mapping[str, Any], thinking: bool, format: Format) -> dict[str, Any]:
    """The request's parameters without those that contradict the operator's `thinking`."""
    switch, effort = format.thinking_switch, given.get("effort")
    left = {name: value for name, value in given.items() if name != "thinking"}
    if effort is not None and (not thinking or is_effort_off(effort)):
        del left["effort"]
    if thinking and left.get("thinking_budget") == 0:
        del left["thinking_budget"]
    if switch is not None and switch.name in (left.get("variables") or {}):
        left["variables"] = {name: value for name, value in left["variables"].items() if name != switch.name}
    return left


def _supported(operators: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """The operator's parameters apply to every model: without a switch, a thinking budget of 0 stands for off."""
    thinking = operators.get("thinking")
    if thinking is None or format.thinking_switch is not None:
        return dict(operators)
    others = {name: value for name, value in operators.items() if name != "thinking"}
    return {**others, "thinking_budget": 0} if format.thinks and not thinking else others
