"""Sampling parameters of a reply, their bounds and how they are parsed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from palaver.constraints import Constraint
from palaver.errors import BadParameter, UnknownParameter

MAX_STRINGS = 64
MAX_STRING = 1000
"""Characters of a stop string or a banned one."""
MAX_BIASES = 1024
"""Entries of `logit_bias`, and of each list of token ids."""
MAX_TOKENS = 1_000_000
MAX_SEED = 2**63 - 1
OFF_WORDS = ("none", "null", "off", "false")


Remasking = Literal["confidence", "entropy"]
"""The tokens that are likeliest, or those whose distributions are the narrowest."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Everything that decides the tokens of a reply besides the prompt. Counts and positions refer to the complete
    reply, including the tokens from before a stop."""

    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_a: float = 0.0
    dynatemp_range: float = 0.0
    """Above 0: the temperature lies between `temperature` minus and plus this, by how even the distribution is. The
    filters then see the distribution at temperature 1, as in llama.cpp."""
    dynatemp_exponent: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    """0: DRY is off. Otherwise it is over prompt and reply, as in llama.cpp."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """-1: all tokens; 0: off."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    repetition_penalty: float = 1.0
    """Over prompt and reply, as the transformers library does."""
    presence_penalty: float = 0.0
    """Over the reply alone, like frequency_penalty."""
    frequency_penalty: float = 0.0
    end_penalty: float = 1.0
    """Divides a positive logit of an end-of-turn token, multiplies a negative one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_ids: tuple[int, ...] = ()
    banned_strings: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    thinking_budget: int | None = None
    """After this many thinking tokens the thinking is closed with the model's own end marker."""
    seed: int = 0
    logprobs: int = 0
    """The number of alternatives reported for each token."""
    constraint: Constraint | None = None
    """A grammar for the answer. It does not apply to thinking."""
    spoken: bool = False
    """The answer is for speech: characters that can't be spoken are banned, except in thinking and tool calls."""
    steps: int | None = None
    """Diffusion models: the steps in which a block is denoised, at most one for each of its tokens. None: the model's
    own."""
    block_length: int | None = None
    """Diffusion models: the tokens of a block; the last one of a reply may be shorter. None: the model's own."""
    remasking: Remasking = "confidence"
    """Diffusion models: which tokens a step shows."""

    @property
    def filter_temperature(self) -> float:
        """The temperature at which top_k, top_p and the other filters see the distribution."""
        return 1.0 if self.dynatemp_range > 0 else self.temperature

    def dynamic_temperature(self, evenness: float) -> float:
        """`evenness`: the entropy of the distribution relative to the greatest possible one."""
        low = max(0.0, self.temperature - self.dynatemp_range)
        high = self.temperature + self.dynatemp_range
        return low + (high - low) * float(min(1.0, max(0.0, evenness)) ** self.dynatemp_exponent)


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """A numeric parameter: its type and its bounds."""

    name: str
    read: type[int] | type[float]
    bounds: tuple[float, float]
    meaning: str
    nullable: bool = False

    def check(self, value: Any) -> Any:
        if value is None:
            if self.nullable:
                return None
            raise BadParameter(self.name, value, "must have a value")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadParameter(self.name, value, "must be a number")
        if self.read is int and value != int(value):
            raise BadParameter(self.name, value, "must be a whole number")
        low, high = self.bounds
        if not low <= value <= high:
            raise BadParameter(self.name, value, f"must be between {self.format(low)} and {self.format(high)}")
        return self.read(value)

    def format(self, bound: float) -> str:
        return f"{int(bound):,}" if self.read is int else f"{bound:g}"

    def parse(self, text: str) -> Any:
        """The value that a user typed. Words such as `none` turn a parameter off that can be off."""
        word = text.strip().lower()
        if self.nullable and word in ("", *OFF_WORDS):
            return None
        if word in OFF_WORDS and self.name not in ("temperature", "seed"):
            return getattr(Sampling(), self.name)
        try:
            return self.check(self.read(text))
        except (ValueError, OverflowError):
            kind = "a whole number" if self.read is int else "a number"
            raise BadParameter(self.name, text, f"must be {kind}") from None


def _parameter(name: str, read: type[int] | type[float], low: float, high: float, meaning: str) -> SamplingParameter:
    return SamplingParameter(name, read, (low, high), meaning, name in NULLABLE)


NULLABLE = ("max_tokens", "thinking_budget", "steps", "block_length")
NUMBERS = {
    p.name: p
    for p in (
        _parameter("temperature", float, 0, 5, "0 takes the likeliest token, higher is more varied"),
        _parameter("top_k", int, 0, 1_000_000, "only the k likeliest tokens; 0 is off"),
        _parameter("top_p", float, 0, 1, "only the likeliest tokens that together reach this probability"),
        _parameter("min_p", float, 0, 1, "only tokens at least this likely relative to the likeliest"),
        _parameter("typical_p", float, 0, 1, "only tokens about as surprising as expected, up to this probability"),
        _parameter("top_a", float, 0, 1, "only tokens at least this times the square of the greatest probability"),
        _parameter("dynatemp_range", float, 0, 5, "the temperature varies by so much, with how sure the model is"),
        _parameter("dynatemp_exponent", float, 0, 10, "above 1 keeps the varying temperature low for longer"),
        _parameter("xtc_probability", float, 0, 1, "how often the likeliest tokens are excluded (XTC)"),
        _parameter("xtc_threshold", float, 0, 1, "which are excluded: all at least this likely, but for the last"),
        _parameter("dry_multiplier", float, 0, 100, "above 0 makes longer repetitions less likely (DRY)"),
        _parameter("dry_base", float, 1, 10, "how quickly DRY grows with the length of a repetition"),
        _parameter("dry_allowed_length", int, 1, 1000, "repetitions shorter than this are free of DRY"),
        _parameter("dry_penalty_last_n", int, -1, MAX_TOKENS, "how many tokens DRY looks back; -1 is all, 0 is off"),
        _parameter("repetition_penalty", float, 0.01, 10, "above 1 makes tokens seen before less likely"),
        _parameter("presence_penalty", float, -2, 2, "above 0 makes tokens said in this reply less likely"),
        _parameter("frequency_penalty", float, -2, 2, "the same, by how often they were said"),
        _parameter("end_penalty", float, 0.01, 100, "above 1 makes the end of the reply less likely"),
        _parameter("min_tokens", int, 0, MAX_TOKENS, "the reply doesn't end before so many tokens"),
        _parameter("max_tokens", int, 1, MAX_TOKENS, "the reply is cut after so many tokens"),
        _parameter("thinking_budget", int, 0, MAX_TOKENS, "a thought is closed after so many tokens"),
        _parameter("steps", int, 1, 10_000, "diffusion models denoise a block in so many steps"),
        _parameter("block_length", int, 1, 100_000, "diffusion models denoise so many tokens at once"),
        _parameter("seed", int, 0, MAX_SEED, "the same seed gives the same reply"),
        _parameter("logprobs", int, 0, 20, "how many alternatives are reported for each token"),
    )
}
CHOICES: dict[str, tuple[str, ...]] = {"remasking": get_args(Remasking)}
"""Parameters that are one of a few words."""
STRINGS = {
    "stop": "text that ends the answer",
    "banned_strings": "text that is never said",
    "dry_sequence_breakers": "text that ends a repetition for DRY",
}


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """Parses one `name=value` setting. `stop` adds one string."""
    if name in NUMBERS:
        return name, NUMBERS[name].parse(text)
    if name in STRINGS:
        return name, check_strings(name, (text,))
    if name in CHOICES:
        return name, check_choice(name, text.strip().lower())
    raise UnknownParameter(name, text, (*NUMBERS, *STRINGS, *CHOICES))


def check_choice(name: str, value: Any) -> Any:
    if value not in CHOICES[name]:
        raise BadParameter(name, value, f"must be {' or '.join(CHOICES[name])}")
    return value


def check_strings(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    if len(values) > MAX_STRINGS:
        raise BadParameter(name, f"{len(values)} strings", f"at most {MAX_STRINGS} are taken")
    if any(not value for value in values):
        raise BadParameter(name, "", "must not be empty")
    if (longest := max(map(len, values), default=0)) > MAX_STRING:
        raise BadParameter(name, f"{longest} characters", f"at most {MAX_STRING} are taken")
    return values


def check_sampling(sampling: Sampling) -> Sampling:
    """The same sampling. Raises BadParameter for the first value out of bounds."""
    for name, parameter in NUMBERS.items():
        parameter.check(getattr(sampling, name))
    for name in STRINGS:
        check_strings(name, getattr(sampling, name))
    for name in CHOICES:
        check_choice(name, getattr(sampling, name))
    for name in ("logit_bias", "banned_ids", "stop_ids"):
        if (count := len(getattr(sampling, name))) > MAX_BIASES:
            raise BadParameter(name, f"{count} entries", f"at most {MAX_BIASES} are taken")
    return sampling


def apply_settings(defaults: Sampling, settings: Mapping[str, Any]) -> Sampling:
    """The model's defaults, overridden by the settings."""
    return check_sampling(replace(defaults, **settings))
