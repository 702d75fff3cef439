"""Grammars that would take an engine down, or hold it up: refused alone, while others are served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from palaver.constraints import Constraint, Grammar
from palaver.engines.base import Engine
from palaver.engines.grammars import GrammarCache, check_matcher
from palaver.engines.grammars.compiler import GrammarCompiler, GrammarError
from palaver.engines.grammars.sandbox_child import rejection_reason
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.engines.torch import TorchEngine
from palaver.errors import BadParameter, EngineClosed, RequestError
from palaver.generation import Ended, Finish, Prompt, Step
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.tiny import VOCABULARY

pytest.importorskip("llguidance")

PROMPT = Prompt(tuple(b"Answer:"))
DIGITS = Constraint(Grammar.REGEX, "[0-9]{3,5}")
RULES = 4000
NESTED = Constraint(
    Grammar.LARK,
    "\n".join(
        [
            "start: r0",
            *(f"r{i}: r{i + 1} | r{(i * 7) % RULES} r{i + 1}?" for i in range(RULES)),
            f'r{RULES}: "x"',
        ]
    ),
)
"""Overflows the stack of whoever compiles it: llguidance 1.9 ends its process with a segmentation fault."""
OPTIONAL = Constraint(Grammar.REGEX, "(a|b)?" * 30_000)
"""Takes half a minute and gigabytes to compile."""


def deep_schema(depth: int) -> str:
    return '{"type": "object", "properties": {"x": ' * depth + "{}" + "}}" * depth


PATTERNS = {"type": "object", "patternProperties": {f"^p{i:04}[a-z]*$": {"type": "integer"} for i in range(1000)}}
LARGE: dict[str, Any] = {
    "type": "object",
    "properties": {f"name{i}": {"enum": [f"value{i}-{j}" for j in range(20)]} for i in range(300)},
}
CIRCULAR = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
BOUNDED = {
    "pattern properties": Constraint(Grammar.JSON_SCHEMA, json.dumps(PATTERNS)),
    "large": Constraint(Grammar.JSON_SCHEMA, json.dumps(LARGE)),
    "circular": Constraint(Grammar.JSON_SCHEMA, json.dumps(CIRCULAR)),
    "deep": Constraint(Grammar.JSON_SCHEMA, deep_schema(2000)),
    "nested repetition": Constraint(Grammar.REGEX, "(a+)+b"),
    "large repetition": Constraint(Grammar.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "states": Constraint(Grammar.REGEX, "(a|b)*a(a|b){200}"),
    "nested groups": Constraint(Grammar.REGEX, "(" * 50_000 + "a" + ")" * 50_000),
    "surrogate": Constraint(Grammar.REGEX, "a\ud800"),
}


def sampling(constraint: Constraint | None, **settings: Any) -> Sampling:
    return Sampling(temperature=1.0, max_tokens=12, constraint=constraint, seed=1, **settings)


async def reply(engine: Engine, constraint: Constraint | None) -> bytes:
    async with engine.generate(PROMPT, sampling(constraint)) as outputs:
        return b"".join([VOCABULARY[output.token_id] async for output in outputs if isinstance(output, Step)])


@pytest.mark.parametrize("hostile", [NESTED, OPTIONAL], ids=["nested", "optional"])
async def test_a_hostile_grammar_is_refused_and_others_are_served_meanwhile(
    engine: TorchEngine, hostile: Constraint
) -> None:
    refused = [asyncio.create_task(reply(engine, hostile)) for _ in range(3)]
    assert (await reply(engine, DIGITS)).removesuffix(b"<end>").isdigit()
    for task in refused:
        with pytest.raises(BadParameter, match="constraint"):
            await task
    assert await reply(engine, None)


@pytest.mark.slow
async def test_a_hostile_grammar_leaves_the_hosted_engine_alive(tmp_path: Path) -> None:
    async with HostedEngine(EngineSpec("torch", tiny.make("qwen3", tmp_path), tuple(VOCABULARY))) as engine:
        process = engine.process_id
        undisturbed = await reply(engine, None)
        async with engine.generate(PROMPT, sampling(None)) as other:
            for hostile in (NESTED, OPTIONAL):
                with pytest.raises(BadParameter, match="constraint"):
                    await reply(engine, hostile)
            texts = [VOCABULARY[output.token_id] async for output in other if isinstance(output, Step)]
        assert b"".join(texts) == undisturbed
        assert engine.process_id == process


@pytest.mark.parametrize("name", BOUNDED)
async def test_a_large_grammar_is_followed_or_refused(engine: TorchEngine, name: str) -> None:
    try:
        assert await reply(engine, BOUNDED[name])
    except RequestError:
        assert await reply(engine, DIGITS)


async def test_a_rejection_is_cached(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter):
        await reply(engine, NESTED)
    monkeypatch.setattr("palaver.engines.grammars.sandbox.GrammarSandbox.rejection_reason", None)
    with pytest.raises(BadParameter, match="too much time, memory or depth"):
        await reply(engine, NESTED)


async def test_a_grammar_that_exceeds_its_limits_on_the_way_fails_its_request_alone(engine: TorchEngine) -> None:
    """Each letter doubles what the parser has to follow: the first masks are small."""
    ambiguous = Constraint(Grammar.LARK, 'start: s\ns: "a" | s s | s s s | s s s s')
    long = Sampling(temperature=0, max_tokens=400, min_tokens=400, constraint=ambiguous)
    async with engine.generate(PROMPT, Sampling(temperature=0, max_tokens=300, min_tokens=300)) as other:
        async with engine.generate(PROMPT, long) as outputs:
            with pytest.raises(RequestError, match="too complex"):
                async for _ in outputs:
                    pass
        assert [output async for output in other][-1] == Ended(Finish.LENGTH)


async def test_grammars_go_on_when_the_sandbox_dies() -> None:
    cache = GrammarCache(VOCABULARY)
    try:
        await cache.compile(DIGITS)
        process = cache._sandbox._forks.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (await cache.compile(Constraint(Grammar.REGEX, "[a-z]+"))).matcher()
    finally:
        cache.close()
    assert process.poll() is not None
    with pytest.raises(EngineClosed):
        await cache.compile(Constraint(Grammar.REGEX, "[A-Z]+"))


async def test_a_grammar_without_waiters_is_cancelled_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.engines.grammars.cache.MAX_WORKERS", 1)
    cache = GrammarCache(VOCABULARY)
    try:
        many = [Constraint(Grammar.REGEX, f"{OPTIONAL.text}{i}") for i in range(100)]
        waiting = [asyncio.create_task(cache.compile(constraint)) for constraint in many]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert len(cache._jobs) == 1
        await cache.compile(DIGITS)
    finally:
        cache.close()


def test_what_exceeds_a_limit_of_the_library_says_so() -> None:
    compiler = GrammarCompiler(VOCABULARY)
    matcher = compiler.compile(Constraint(Grammar.REGEX, "a")).matcher()
    check_matcher(matcher)
    matcher.consume_token(ord("b"))
    with pytest.raises(RequestError, match="too complex"):
        check_matcher(matcher)
    with pytest.raises(GrammarError):
        compiler.compile(Constraint(Grammar.REGEX, "("))
    assert rejection_reason(compiler, DIGITS) is None
