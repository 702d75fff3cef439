"""Stops and continues replies of any OpenAI-compatible server, many times at random places and in every phase, and
counts how many came out equal to the uncut ones.

    python -m benchmarks.hammer --url http://127.0.0.1:8080/v1 --rounds 1000
    python -m benchmarks.hammer --url http://127.0.0.1:8081/v1 --way text     # a server that takes no token ids
    python -m benchmarks.hammer --peer llama.cpp --way text                   # one that benchmarks/peers.py can start
    python -m benchmarks.hammer --peer gguf --gguf q8_0                       # Palaver with a GGUF file

`ids`: chunks have token ids (`return_token_ids`), and a partial reply is sent back with them.
`text`: a partial reply is sent back as text, with `continue_final_message`.
`bare`: as `text`, without that field, for servers that do not know it.
A stop is a connection that is closed, as a person's or a program's is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTIONS = (
    "What is 12 + 30?",
    "What is 417 + 385?",
    "Spell the word palaver backwards.",
    "How many letters does the word conversation have?",
    "Hello! Who are you?",
    "What is 9 times 8?",
    "What is the weather in Paris?",
    "What is the weather in Rome and in Oslo?",
)


class RequestFailed(Exception):
    """The server answered with an error: a reply that did not come out at all."""


@dataclass
class Reply:
    """A reply as its client has it so far."""

    thinking: str = ""
    answer: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    chunks: int = 0

    @property
    def phase(self) -> str:
        if self.calls:
            return "call"
        return "answer" if self.answer else "thinking" if self.thinking else "start"

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.chunks += 1
        self.thinking += delta.get("reasoning_content") or delta.get("reasoning") or ""
        self.answer += delta.get("content") or ""
        self.ids += choice.get("token_ids") or ()
        for call in delta.get("tool_calls") or ():
            entry = self.calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            entry["id"] = entry["id"] or call.get("id") or ""
            entry["name"] = entry["name"] or function.get("name") or ""
            entry["arguments"] += function.get("arguments") or ""
        self.finish = choice.get("finish_reason") or self.finish

    def same_as(self, other: Reply, by_ids: bool) -> bool:
        mine, theirs = (([c["name"], c["arguments"]] for c in reply.calls.values()) for reply in (self, other))
        texts = (self.thinking, self.answer, list(mine)) == (other.thinking, other.answer, list(theirs))
        return texts and self.finish == other.finish and (not by_ids or self.ids == other.ids)

    def message(self, by_ids: bool) -> dict[str, Any]:
        value: dict[str, Any] = {"role": "assistant", "content": self.answer or None}
        if self.thinking:
            value["reasoning_content"] = self.thinking
        if self.calls:
            value["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in self.calls.values()
            ]
        return {**value, "token_ids": self.ids} if by_ids else value


@dataclass
class Hammer:
    client: httpx.AsyncClient
    model: str
    way: str
    max_tokens: int
    random: random.Random
    uncut: dict[str, Reply] = field(default_factory=dict)
    cuts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def by_ids(self) -> bool:
        return self.way == "ids"

    async def round(self, number: int) -> bool:
        """Cuts one reply several times. Returns whether it equals the uncut one."""
        request = self._request(number)
        try:
            return await self._cut(request)
        except (RequestFailed, httpx.HTTPError) as error:
            self.failures.append(f"{request['messages'][0]['content']!r} {error!r}")
            return False

    async def _cut(self, request: dict[str, Any]) -> bool:
        key = json.dumps(request, sort_keys=True)
        if key not in self.uncut:
            self.uncut[key] = await self._receive(request, Reply(), None)
        whole = self.uncut[key]
        reply = Reply()
        for _ in range(self.random.randint(1, 4)):
            reply = await self._receive(request, reply, self.random.randint(1, max(1, whole.chunks - reply.chunks)))
            if reply.finish:
                break
            self.cuts[reply.phase] += 1
        if not reply.finish:
            reply = await self._receive(request, reply, None)
        if reply.same_as(whole, self.by_ids):
            return True
        self.failures.append(f"{request['messages'][0]['content']!r} {reply} instead of {whole}")
        return False

    def _request(self, number: int) -> dict[str, Any]:
        question = QUESTIONS[number % len(QUESTIONS)]
        sampled = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number % 16}
        tools = {"tools": [WEATHER]} if "weather" in question else {}
        fields = {"model": self.model, "messages": [{"role": "user", "content": question}], "stream": True}
        return {**fields, **sampled, **tools, "max_tokens": self.max_tokens}

    async def _receive(self, request: dict[str, Any], reply: Reply, stop_after: int | None) -> Reply:
        """Continues the reply to its end, or for `stop_after` chunks."""
        body = dict(request)
        if reply.chunks:
            body["messages"] = [*request["messages"], reply.message(self.by_ids)]
            body |= {} if self.way == "bare" else {"continue_final_message": True, "add_generation_prompt": False}
        if self.by_ids:
            body["return_token_ids"] = True
        body["max_tokens"] = max(1, self.max_tokens - len(reply.ids))
        count = 0
        async with self.client.stream("POST", "chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RequestFailed(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RequestFailed(f"mid-stream: {event}")
                for choice in event["choices"]:
                    reply.add(choice)
                count += 1
                if stop_after is not None and count >= stop_after:
                    break
        return reply


async def run(options: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        if options.peer:
            from benchmarks.peers import STARTS, HttpPeer, gguf_file, prepare

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prepare(folder, endless=False)
            peer = await STARTS[options.peer](stack, folder, options.gguf)
            assert isinstance(peer, HttpPeer), "an engine in this process is no server"
            options.url = f"{peer.url}/v1"
            names = {"llama.cpp": options.model, "gguf": str(gguf_file(folder, options.gguf))}
            options.model = names.get(options.peer, str(folder))
        return await hammer_url(options)


async def hammer_url(options: argparse.Namespace) -> int:
    headers = {"authorization": f"Bearer {options.key}"}
    limits = httpx.Limits(max_connections=options.parallel)
    url = options.url.rstrip("/") + "/"
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
        hammer = Hammer(client, options.model, options.way, options.max_tokens, random.Random(options.seed))
        gate = asyncio.Semaphore(options.parallel)

        async def one(number: int) -> bool:
            async with gate:
                return await hammer.round(number)

        started = time.monotonic()
        equal = sum(await asyncio.gather(*(one(number) for number in range(options.rounds))))
    phases = ", ".join(f"{count} in {phase}" for phase, count in sorted(hammer.cuts.items()))
    seconds = time.monotonic() - started
    print(f"{equal} of {options.rounds} replies equal to the uncut ones ({options.way}, {seconds:.0f} s)")
    print(f"{sum(hammer.cuts.values())} cuts: {phases}")
    for failure in hammer.failures[: options.show]:
        print(" ", failure[:600])
    return 0 if equal == options.rounds else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1", help="up to and with /v1")
    parser.add_argument("--peer", choices=("palaver", "gguf", "llama.cpp", "transformers"), help="start this one")
    parser.add_argument("--gguf", choices=("f32", "f16", "q8_0", "q4_0"), default="f32", help="for llama.cpp and gguf")
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--key", default="none")
    parser.add_argument("--way", choices=("ids", "text", "bare"), default="ids")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1, help="of the places that are cut")
    parser.add_argument("--show", type=int, default=5, help="how many failures are shown")
    raise SystemExit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
