"""A request's fields as the parameters of a reply: the same names that conversations keep theirs under."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from palaver.chat.model import draw_seed
from palaver.chat.parameters import merge_parameters
from palaver.errors import BadParameter
from palaver.formats.base import Format
from palaver.server.openai.audio import is_spoken
from palaver.server.openai.response_format import parse_response_format
from palaver.server.openai.schemas import ChatRequest, CompletionRequest, RequestFields, SamplingFields
from palaver.server.openai.thinking import follow_effort, operator_parameters
from palaver.server.settings import ServerSettings

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "end_penalty",
    "seed",
    "top_k",
    "min_tokens",
)
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_BUDGETS = (
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
    "max_thinking_tokens",
)
_OF_CHATS = ("thinking", "effort", "budget", "variables", "thinking_budget")
MAX_LISTED = 1024


def sampling_parameters(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """What both kinds of request share."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    given["repetition_penalty"] = _repetition_penalty(request)
    strings, ids = _stops(request)
    given["stop"] = strings or None
    given["stop_ids"] = ids or None
    given["banned_strings"] = request.banned_strings or None
    given["banned_ids"] = _listed("banned_token_ids", request.banned_token_ids) or None
    given["logit_bias"] = _biases(request.logit_bias)
    given["max_tokens"] = _agreed(request, _LIMITS)
    given["constraint"] = parse_response_format(request)
    return without_sentinels(given)


def without_sentinels(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values that other servers take for "off", "random" or "no limit", as what they mean."""
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
    """All that a chat request decides, but for its tools and messages; the operator's word goes before and after."""
    given = sampling_parameters(request)
    given |= _thinking_parameters(request, settings, format)
    given["response_prefix"] = request.response_prefix or None
    given["healing"] = request.token_healing or None
    given["logprobs"] = _alternatives(request)
    given["one_call"] = _one_call(request) or None
    given["spoken"] = is_spoken(request) or None
    return operator_parameters(settings.defaults, _set(given), settings.forced, format)


def completion_parameters(request: CompletionRequest, settings: ServerSettings) -> dict[str, Any]:
    """The same for text that is completed: nothing is known of its thoughts."""
    given = {**sampling_parameters(request), "logprobs": request.logprobs}
    decided = merge_parameters(settings.defaults, _set(given), settings.forced)
    return {name: value for name, value in decided.items() if name not in _OF_CHATS}


def ignores_effort(request: ChatRequest, settings: ServerSettings, format: Format) -> bool:
    """Whether the request names an effort that the model can't follow."""
    effort = _effort(request)
    return effort is not None and not follow_effort(effort, _without_effort(request, settings, format), format)


def _set(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _thinking_parameters(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    given, effort = _without_effort(request, settings, format), _effort(request)
    followed = follow_effort(effort, given, format) if effort is not None else {}
    return given | {name: value for name, value in followed.items() if given.get(name) is None}


def _without_effort(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    return {
        "thinking": _thinking(request),
        "thinking_budget": _budget(request),
        "variables": _variables(request, settings, {switch.name for switch in format.switches}),
    }


def _repetition_penalty(request: SamplingFields) -> float | None:
    penalty: float | None = _agreed(request, ("repetition_penalty", "repeat_penalty"))
    return 1.0 if request.repeat_last_n == 0 else penalty


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


def _agreed(request: SamplingFields, names: Collection[str]) -> Any:
    """The value of whichever of these names is given; two that differ contradict each other."""
    said = {name: value for name in names if (value := getattr(request, name, None)) is not None}
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


_THEIRS = {
    "think": "enable_thinking",
    "effort": "reasoning_effort",
    "budget": "thinking_budget",
    "stop_ids": "stop_token_ids",
    "banned_ids": "banned_token_ids",
    "constraint (json_schema)": "response_format",
    "constraint (regex)": "response_format.regex",
    "constraint (lark)": "response_format.grammar",
    "constraint": "response_format",
}


@contextmanager
def api_field_names(theirs: Mapping[str, str] = _THEIRS) -> Iterator[None]:
    """Inside, a BadParameter is raised under the name of the request's field."""
    try:
        yield
    except BadParameter as error:
        if error.name not in theirs:
            raise
        raise BadParameter(theirs[error.name], error.value, error.why) from error


IGNORED = frozenset(
    (
        "cache_prompt",
        "guided_decoding_backend",
        "id_slot",
        "litellm_call_id",
        "max_tool_calls",
        "moderation",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "timeout",
        "user",
        "verbosity",
        "web_search_options",
    )
)
"""They change no reply: hints for speed, style or accounting, which clients send by themselves."""

HEADER = "x-palaver-ignored"
"""The response header that names the fields without effect."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "detokenize": (True,),
    "strict": (None,),
    "add_special_tokens": (False,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}
"""These mean nothing when they ask for what is done anyway."""


@dataclass(frozen=True, slots=True)
class ToleratedFields:
    """What one API's clients may send although it is not looked at."""

    ignored: Collection[str] = IGNORED
    harmless: Mapping[str, Sequence[Any]] = field(default_factory=lambda: _HARMLESS)


OPENAI = ToleratedFields()


def check_unknown_fields(fields: RequestFields, where: str = "", tolerated: ToleratedFields = OPENAI) -> None:
    """Raises BadParameter for the first field that would change the reply, or that nobody knows."""
    for name, value in (fields.model_extra or {}).items():
        if value is None or name in tolerated.ignored or value in tolerated.harmless.get(name, ()):
            continue
        raise BadParameter(where + name, _short(value), "this field is not supported")


def ignored_fields(fields: RequestFields, tolerated: ToleratedFields = OPENAI) -> list[str]:
    """The fields of a request that were sent and have no effect."""
    sent = {**{name: getattr(fields, name) for name in type(fields).model_fields}, **(fields.model_extra or {})}
    return [name for name, value in sent.items() if value is not None and name in tolerated.ignored]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    return {HEADER: ", ".join(names)} if names else {}


def check_nested_fields(fields: RequestFields, where: str = "", tolerated: ToleratedFields = OPENAI) -> None:
    """The same for everything inside."""
    check_unknown_fields(fields, where, tolerated)
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        if isinstance(value, RequestFields):
            check_nested_fields(value, f"{where}{name}.", tolerated)
        elif isinstance(value, list):
            for place, one in enumerate(value):
                if isinstance(one, RequestFields):
                    check_nested_fields(one, f"{where}{name}[{place}].", tolerated)


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
