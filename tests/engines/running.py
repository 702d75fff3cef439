"""Runs a generation to its end, or up to some token, the way a caller would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from palaver.engines.base import Engine
from palaver.generation import Ended, Output, Prefilled, Prompt, Step
from palaver.sampling import Sampling


@dataclass
class Run:
    """What came of it."""

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
    """Stops by leaving after so many tokens of its own."""
    out = Run()
    async with engine.generate(prompt, sampling, choice) as outputs:
        if stop_after == 0:
            return out
        async for output in outputs:
            out.add(output)
            if len(out.ids) == stop_after:
                break
    return out


def continued(prompt: Prompt, said: list[int]) -> Prompt:
    return replace(prompt, reply_ids=(*prompt.reply_ids, *said))
