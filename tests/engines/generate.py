"""Runs a generation to its end, or for some tokens, as a caller would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from palaver.engines.base import Engine
from palaver.generation import Ended, Output, Prefilled, Prompt, Step
from palaver.sampling import Sampling


@dataclass
class Run:
    """The outputs of one generation."""

    ids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prefilled: Prefilled | None = None
    ended: Ended | None = None

    def add(self, output: Output) -> None:
        match output:
            case Step():
                self.ids.append(output.token_id)
                self.steps.append(output)
            case Prefilled():
                self.prefilled = output
            case Ended():
                self.ended = output


async def run(
    engine: Engine, prompt: Prompt, sampling: Sampling, choice: int = 0, stop_after: int | None = None
) -> Run:
    """Leaves the generation after `stop_after` tokens."""
    out = Run()
    async with engine.generate(prompt, sampling, choice) as outputs:
        if stop_after == 0:
            return out
        async for output in outputs:
            out.add(output)
            if len(out.ids) == stop_after:
                break
    return out


def continued(prompt: Prompt, token_ids: list[int]) -> Prompt:
    """The prompt that continues a reply after these tokens."""
    return replace(prompt, reply_ids=(*prompt.reply_ids, *token_ids))
