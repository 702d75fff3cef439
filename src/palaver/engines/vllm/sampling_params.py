"""What vLLM's own sampler can do of a request: its parameters, by name, and which ones it can't have.

Used by the native mode and by servers elsewhere, which have no sampler but vLLM's. In the exact mode it chooses greedy
tokens alone (`needs_own_sampling`)."""

from __future__ import annotations

from typing import Any

from palaver.engines.base import Capability
from palaver.engines.core.token_stream import TokenRequest
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.sampling import Sampling

BAN = -100.0
"""The lowest bias that vLLM takes."""
MAX_TEMPERATURE = 2.0
"""The highest that vLLM takes."""
MIN_TOP_P = 1e-6
"""For 0, which vLLM refuses: only the likeliest token, too."""
SEED_STEP = 0x9E3779B9
"""Between the seeds of two choices."""
SUPPORTED = frozenset(
    "temperature top_k top_p min_p repetition_penalty logit_bias banned_ids min_tokens max_tokens stop stop_ids seed"
    " logprobs thinking_budget".split()
)
ONLY_WITH_ANOTHER = frozenset(
    "dynatemp_exponent xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers".split()
)
"""Parameters without effect unless another one is set."""
WITHOUT_EFFECT_ON_GREEDY = frozenset(
    "max_tokens stop stop_ids seed logprobs top_k top_p min_p typical_p top_a dynatemp_range dynatemp_exponent"
    " xtc_probability xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers".split()
)
"""Parameters that change nothing in the choice of a greedy token."""
VLLM_SAMPLER = "vLLM's own sampler"
"""The sampler's name in messages."""
NO_SUCH_RULE = "{sampler} chooses the tokens here, and it has no such rule over a continued reply"
DRAWS_ANEW = "{sampler} draws anew after a stop; greedy replies continue exactly"
DRAWS_BY_POSITION = (
    "vLLM's newer model runner draws by seed and position, so that a sampled reply should go on as the uncut one, but"
    " this was never tried; greedy replies continue exactly"
)


def needs_own_sampling(prompt: Prompt, sampling: Sampling) -> bool:
    """Whether a token may be another one than the likeliest: then Palaver's sampling has to choose it."""
    if prompt.healing or prompt.answer_at is not None or prompt.phases.held is not None:
        return True
    neutral = Sampling(temperature=0)
    names = set(Sampling.__dataclass_fields__) - WITHOUT_EFFECT_ON_GREEDY
    return any(getattr(sampling, name) != getattr(neutral, name) for name in names)


def native_lacks(draws_by_position: bool, sampler: str = VLLM_SAMPLER) -> dict[Capability, str]:
    """What this sampler can't do. `draws_by_position`: with vLLM's newer model runner, which needs a GPU."""
    no_such_rule = NO_SUCH_RULE.format(sampler=sampler)
    return {
        Capability.CONSTRAINTS: f"{sampler} starts a grammar at the first token, not with the answer",
        Capability.TOKEN_HEALING: no_such_rule,
        Capability.FILTERS: no_such_rule,
        Capability.EXACT_CONTINUATION: DRAWS_BY_POSITION if draws_by_position else DRAWS_ANEW.format(sampler=sampler),
    }


def check_native(
    prompt: Prompt, sampling: Sampling, max_temperature: float = MAX_TEMPERATURE, sampler: str = VLLM_SAMPLER
) -> None:
    """Raises BadParameter for a parameter that this sampler would ignore or refuse."""
    neutral, no_such_rule = Sampling(), NO_SUCH_RULE.format(sampler=sampler)
    for name in Sampling.__dataclass_fields__:
        value = getattr(sampling, name)
        if name not in SUPPORTED | ONLY_WITH_ANOTHER and value != getattr(neutral, name):
            raise BadParameter(name, value, f"the engine of this model can't do this: {no_such_rule}.")
    if sampling.temperature > max_temperature:
        reason = f"the engine of this model can't do this: {sampler} takes at most {max_temperature:g}."
        raise BadParameter("temperature", sampling.temperature, reason)


def native_parameters(request: TokenRequest) -> dict[str, Any]:
    """vLLM's `SamplingParams` of a request. `min_tokens` and `max_tokens` count the tokens that are added."""
    sampling = request.sampling
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.banned_ids, BAN)
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": max(MIN_TOP_P, sampling.top_p),
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {token_id: max(BAN, min(-BAN, value)) for token_id, value in bias.items()} or None,
        "min_tokens": min(request.max_tokens, max(0, sampling.min_tokens - len(request.prompt.reply_ids))),
        "seed": (sampling.seed + request.choice * SEED_STEP) % 2**63,
        **common_parameters(request),
    }


def common_parameters(request: TokenRequest) -> dict[str, Any]:
    """Parameters that both samplers share."""
    return {
        "max_tokens": request.max_tokens,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,
        "logprobs": request.sampling.logprobs,
        "detokenize": False,
    }
