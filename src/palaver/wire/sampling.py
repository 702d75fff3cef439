"""What decided a reply: sampling, tools, settings."""

from __future__ import annotations

from typing import Any

from palaver import constraints, messages, sampling, store
from palaver.wire.base import Told


class Constraint(Told):
    grammar: constraints.Grammar
    text: str


class Sampling(Told):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    end_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    banned_ids: tuple[int, ...]
    banned_strings: tuple[str, ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    max_tokens: int | None
    thinking_budget: int | None
    seed: int
    logprobs: int
    constraint: Constraint | None
    spoken: bool = False

    @classmethod
    def of(cls, value: sampling.Sampling) -> Sampling:
        return cls.model_validate(value)

    def value(self) -> sampling.Sampling:
        held = self.constraint and constraints.Constraint(self.constraint.grammar, self.constraint.text)
        return sampling.Sampling(**{**dict(self), "constraint": held})


class Tool(Told):
    """A function offered to the model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]

    @classmethod
    def of(cls, tool: messages.Tool) -> Tool:
        return cls(name=tool.name, description=tool.description, parameters=dict(tool.parameters))

    def value(self) -> messages.Tool:
        return messages.Tool(self.name, self.description, self.parameters)


class Settings(Told):
    """All that must be known to make a reply again."""

    model: str
    sampling: Sampling
    tokenizer: str
    options: dict[str, Any]
    tools: list[Tool]
    choice: int
    fingerprints: tuple[tuple[int, str], ...] = ()
    """The engines that computed it, each with its first token."""

    @classmethod
    def of(cls, settings: store.ReplySettings) -> Settings:
        return cls(
            model=settings.model,
            sampling=Sampling.of(settings.sampling),
            tokenizer=settings.tokenizer,
            options=dict(settings.options),
            tools=[Tool.of(tool) for tool in settings.tools],
            choice=settings.choice,
            fingerprints=settings.fingerprints,
        )

    def value(self) -> store.ReplySettings:
        tools, sampling = tuple(tool.value() for tool in self.tools), self.sampling.value()
        return store.ReplySettings(
            self.model, sampling, self.tokenizer, self.options, tools, self.choice, self.fingerprints
        )
