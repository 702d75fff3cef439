"""What a branch says to a model: the system prompt first, consecutive messages of the user as one."""

from __future__ import annotations

from collections.abc import Iterable

from palaver.messages import Message, Part, Role, Text, system


def prompt(system_prompt: str, messages: Iterable[Message]) -> tuple[Message, ...]:
    said = merged(messages)
    return (system(system_prompt), *said) if system_prompt else said


def merged(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Neighbouring messages of the user become one, a blank line between their texts. The record stays as it is."""
    done: list[Message] = []
    for message in messages:
        if done and message.role is Role.USER and done[-1].role is Role.USER:
            done[-1] = Message(Role.USER, _joined(done[-1].parts, message.parts))
        else:
            done.append(message)
    return tuple(done)


def _joined(first: tuple[Part, ...], second: tuple[Part, ...]) -> tuple[Part, ...]:
    if first and second and isinstance(first[-1], Text) and isinstance(second[0], Text):
        return (*first[:-1], Text(f"{first[-1].text}\n\n{second[0].text}"), *second[1:])
    return (*first, *second)
