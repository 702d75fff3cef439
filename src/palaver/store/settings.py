"""What made a reply: everything that must be known to make it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
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
    fingerprints: tuple[tuple[int, str], ...] = ()
    """The engines that computed it (`EngineInfo.fingerprint`), each with its first token. Nothing is known of tokens
    before the first of them, such as those of replies that were stored before fingerprints were."""

    answer_at: int | None = None
    """How many tokens the reply had when somebody asked for the answer: there an open thought was closed."""

    def continued_by(self, fingerprint: str, tokens: int) -> Settings:
        """The settings of the same reply, computed by this engine from so many tokens on."""
        before = tuple(part for part in self.fingerprints if part[0] < tokens)
        if not fingerprint or (before and before[-1][1] == fingerprint):
            return replace(self, fingerprints=before)
        return replace(self, fingerprints=(*before, (tokens, fingerprint)))


def to_json(settings: Settings) -> dict[str, Any]:
    """Without the model and the tokenizer, which are columns."""
    return {
        "sampling": sampling_to_json(settings.sampling),
        "options": dict(settings.options),
        "tools": [asdict(tool) for tool in settings.tools],
        "choice": settings.choice,
        **({"answer_at": settings.answer_at} if settings.answer_at is not None else {}),
        **({"fingerprints": [list(part) for part in settings.fingerprints]} if settings.fingerprints else {}),
    }


def from_json(model: str, tokenizer: str, value: Mapping[str, Any]) -> Settings:
    return Settings(
        model=model,
        sampling=sampling_from_json(value["sampling"]),
        tokenizer=tokenizer,
        options=value["options"],
        tools=tuple(Tool(**tool) for tool in value["tools"]),
        choice=value["choice"],
        answer_at=value.get("answer_at"),
        fingerprints=tuple((start, made_by) for start, made_by in value.get("fingerprints", ())),
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
