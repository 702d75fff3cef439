"""What made a reply: everything that must be known to make it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from palaver.constraints import Constraint, Grammar
from palaver.messages import Tool
from palaver.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    sampling: Sampling
    """The seed is in it."""
    tokenizer: str = ""
    """The tokenizer's fingerprint: token ids mean something only where it is the same."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The template's options, as JSON can say them."""
    tools: tuple[Tool, ...] = ()
    choice: int = 0


def to_json(settings: Settings) -> dict[str, Any]:
    """Without the model and the tokenizer, which are columns."""
    return {
        "sampling": sampling_to_json(settings.sampling),
        "options": dict(settings.options),
        "tools": [asdict(tool) for tool in settings.tools],
        "choice": settings.choice,
    }


def from_json(model: str, tokenizer: str, value: Mapping[str, Any]) -> Settings:
    return Settings(
        model=model,
        sampling=sampling_from_json(value["sampling"]),
        tokenizer=tokenizer,
        options=value["options"],
        tools=tuple(Tool(**tool) for tool in value["tools"]),
        choice=value["choice"],
    )


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from the plainest sampling, so that a new parameter changes no old record."""
    plain = Sampling()
    return {
        one.name: asdict(value) if isinstance(value, Constraint) else value
        for one in fields(Sampling)
        if (value := getattr(sampling, one.name)) != getattr(plain, one.name)
    }


def sampling_from_json(value: Mapping[str, Any]) -> Sampling:
    return Sampling(**{name: _restored(name, one) for name, one in value.items()})


def _restored(name: str, value: Any) -> Any:
    if name == "constraint":
        return Constraint(Grammar(value["grammar"]), value["text"])
    if name == "logit_bias":
        return tuple((int(token), float(bias)) for token, bias in value)
    return tuple(value) if isinstance(value, list) else value
