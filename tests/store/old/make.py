"""Makes the files of this folder: a data folder of an earlier version, its exports, and what it read from both.

Made with commit 889d96d, schema revision 0007. To make them again:

    git worktree add --detach ../earlier 889d96d
    cd ../earlier
    PYTHONPATH=src:. python ../palaver/tests/store/old/make.py ../palaver/tests/store/old

`data.tar.xz` is the data folder as kill -9 left it, with SQLite's write-ahead log. `expected.json` is what the earlier
version's own functions returned for a copy of it. Ids and times come from counters; those of the turns can differ.
The modules of the earlier version have other names now, so they are imported by name and not type-checked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

CLIENTS = ("terminal", "page-1", "new")
SEARCHES = ("weather", "東京", '"two words"', "thought", "café", "nothing of this")
KEYS = "keys.txt"
"""The texts of the keys, which the store does not have. One a line."""
SUFFIXES = {"jsonl": "jsonl", "branches": "jsonl", "tree": "json", "markdown": "md", "sharegpt": "json"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SAMPLING: Mapping[str, Any] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "end_penalty": 2.0,
    "logit_bias": ((5, -100.0), (7, 1.5)),
    "banned_ids": (3, 4),
    "banned_strings": ("never", "不"),
    "stop": ("\n\n", "END"),
    "stop_ids": (9,),
    "min_tokens": 2,
    "max_tokens": 64,
    "thinking_budget": 16,
    "seed": 2**63 - 1,
    "logprobs": 5,
    "spoken": True,
}
OPTIONS: Mapping[str, Any] = {
    "thinking": True,
    "effort": "high",
    "budget": 128,
    "variables": {"date_string": "1 May", "deep": [1, {"x": None}]},
    "now": "2026-01-02T03:04:05+00:00",
    "calls": False,
    "must_call": ["get_weather"],
    "one_call": True,
    "response_prefix": "Well, ",
    "unsplit": True,
    "healing": True,
    "json_answer": True,
}
PARAMETERS: Mapping[str, Any] = {
    **{name: list(value) if isinstance(value, tuple) else value for name, value in SAMPLING.items()},
    "logit_bias": {"5": -100, "7": 1.5},
    "constraint": {"grammar": "json_schema", "text": '{"type": "object"}'},
    "thinking": False,
    "effort": "low",
    "budget": 7,
    "variables": {"a": 1},
    "calls": True,
    "must_call": ["get_weather"],
    "one_call": False,
    "response_prefix": "So: ",
    "json_answer": False,
    "healing": False,
    "tools": [{"name": "get_weather", "description": "Weather at a place.", "parameters": WEATHER}],
    "overflow": "shorten",
    "choice": 2,
    "system": "Answer in rhymes.",
    "note": {"client": "x", "numbers": [1, 2.5]},
}
PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")


def plain(value: Any) -> Any:
    """A value as JSON: dataclasses as objects without their tag, parts of a message by class, NaN as a string."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {one.name: plain(getattr(value, one.name)) for one in fields(value) if one.name != "type"}
        part = type(value).__name__ if type(value).__module__ == "palaver.messages" else None
        return {"type": part, **found} if part not in (None, "Tool", "Message") else found
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, str | int | float | bool | None):
        return str(value) if isinstance(value, str) else value
    return [plain(one) for one in value]


def earlier(module: str) -> Any:
    return import_module(module)


def use_counters() -> None:
    """Ids, secrets and times that are the same in every run."""
    numbers, ticks = random.Random(7), itertools.count(1_760_000_000)
    secrets.randbits = lambda k: numbers.getrandbits(k)
    secrets.token_urlsafe = lambda nbytes=32: numbers.randbytes(nbytes or 32).hex()
    time.time_ns = lambda: next(ticks) * 1_000_000_000 + 123_456_789
    socket.gethostname = lambda: "earlier"


class Maker:
    def __init__(self, store: Any) -> None:
        self.store = store
        self.owner = store.users.ensure().id
        self.lease = store.leases.open()
        self.m, self.g, self.s = earlier("palaver.messages"), earlier("palaver.generation"), earlier("palaver.store")
        self.sampling = earlier("palaver.sampling").Sampling
        self.constraints = earlier("palaver.constraints")

    def conversation(self, title: str = "", **more: Any) -> str:
        return str(self.store.conversations.create(self.owner, title=title, **more).id)

    def say(self, talk: str, parent: str | None, *parts: Any, role: str = "user", key: str | None = None) -> str:
        parts = tuple(self.m.Text(part) if isinstance(part, str) else part for part in parts)
        message = self.m.Message(self.m.Role(role), parts)
        return str(self.store.messages.append(talk, parent, message, key=key).id)

    def steps(self, ids: Iterable[int], drawn: bool = False) -> tuple[Any, ...]:
        """Log-probabilities of which some are no 32-bit floats."""

        def step(number: int) -> Any:
            others = tuple(self.g.Alternative(number + add, -0.1 - add / 3) for add in range(number % 7))
            if not drawn:
                return self.g.Step(number, -0.1 * number, others)
            return self.g.Step(number, -0.1 * number, others, -0.05 * number, others[:2])

        return tuple(map(step, ids))

    def reply(
        self,
        talk: str,
        parent: str | None,
        *parts: Any,
        status: str = "done",
        tokens: Iterable[Any] = (),
        error: str | None = None,
        **settings: Any,
    ) -> str:
        made_by = self.s.Settings("a/model", settings.pop("sampling", self.sampling(seed=3)), "abc", **settings)
        reply = self.store.replies.start(self.lease, talk, parent, made_by)
        tokens = tuple(tokens)
        for start in range(0, len(tokens), 3):
            self.store.replies.append(self.lease, [self.s.Piece(reply.id, start, tokens[start : start + 3])])
        parts = tuple(self.m.Text(part) if isinstance(part, str) else part for part in parts)
        usage = earlier("palaver.events").Usage(20, 5, len(tokens), 2)
        ending = self.s.Ending(self.s.Status(status), parts, usage, {"seconds": 0.25, "first": 0.1}, error)
        return str(self.store.replies.finish(self.lease, reply.id, ending).id)

    def make(self) -> None:
        self.every_part()
        self.branches()
        self.endings()
        self.every_setting()
        self.texts()
        self.imports()
        self.users()

    def every_part(self) -> None:
        m = self.m
        talk = self.conversation("The weather", system="Be brief.\nBe kind.", tags=("work", "über", "東京"))
        question = self.say(talk, None, "What is this, and the weather?", m.Image("image/png", PNG), key="sent-once")
        thought = m.Thinking("Look at the picture; first a call.")
        inner = m.ToolCall("call_0", "get_weather", '{"city": "東京"}', True)
        call = m.ToolCall("call_1", "get_weather", '{"city": "Par')
        tools = (m.Tool("get_weather", "Weather at a place.", WEATHER), m.Tool("now", "", {"type": "object"}))
        answer = self.reply(
            talk, question, thought, inner, m.Thinking("More."), "I look.", call,
            tokens=self.steps(range(40), drawn=True), tools=tools, options={"thinking": True},
        )  # fmt: skip
        results = m.ToolResult("call_0", "sunny", "get_weather"), m.ToolResult("call_1", "", "")
        result = self.say(talk, answer, *results, role="tool")
        last = self.reply(talk, result, m.Thinking(""), "It is sunny in 東京.", tokens=self.steps((1, 2, 300)))
        more = m.Audio("audio/wav", b"RIFF" + bytes(40)), m.Video("video/mp4", bytes(range(64)))
        self.say(talk, last, "And these?", *more)
        self.store.replies.annotate(last, {"note": {"response": "resp_1"}})

    def branches(self) -> None:
        m, store = self.m, self.store
        talk = self.conversation()
        first = self.say(talk, None, "Hello, two words")
        one = self.reply(talk, first, "Hi.", tokens=self.steps((10, 11)))
        two = self.reply(talk, first, "Hey.", tokens=self.steps((12, 13, 14)), choice=1)
        below = self.say(talk, one, "How are you?")
        self.reply(talk, below, "Fine.", tokens=self.steps(range(100, 160)))
        edited = store.messages.edit(first, (m.Text("Good morning"),)).id
        self.reply(talk, edited, "Good morning to you.", tokens=self.steps((15,)))
        changed = store.messages.edit(two, (m.Thinking("I was told what to say."), m.Text("Hey there."))).id
        self.say(talk, changed, "A message below an edited reply")
        self.say(talk, None, "A second root")
        for client, places in (("terminal", (first, one, two)), ("page-1", (below, None, edited, changed))):
            for place in places:
                store.cursors.move(talk, client, place)
        for _ in range(2):
            store.cursors.undo(talk, "terminal")
        for _ in range(3):
            store.cursors.undo(talk, "page-1")
        store.cursors.redo(talk, "page-1")
        store.conversations.move_head(talk, store.conversations.get(talk).head_id, below)

    def endings(self) -> None:
        talk = self.conversation("How replies end", parameters={"temperature": 0.0, "thinking": False})
        parent = self.say(talk, None, "Count.")
        self.reply(talk, parent, "1 2", status="stopped", tokens=self.steps((1, 2)))
        self.reply(talk, parent, "1 2 3", status="length", tokens=self.steps((1, 2, 3)))
        self.reply(talk, parent, "1", status="failed", tokens=self.steps((1,)), error="The engine died.")
        self.reply(talk, parent, status="stopped")
        given = earlier("palaver.store.tokens").given((1, 2, 3))
        again = self.reply(talk, parent, "1 2 3 4", status="stopped", tokens=(*given, *self.steps((4,))))
        self.store.replies.resume(self.lease, again, "resume-key")
        ending = self.s.Ending(self.s.Status.INTERRUPTED, (self.m.Text("1 2 3 4"),))
        self.store.replies.finish(self.lease, again, ending)

    def every_setting(self) -> None:
        grammar = self.constraints.Grammar
        constraints = [self.constraints.Constraint(grammar(name), f"a {name}") for name in ("json_schema", "regex")]
        constraints.append(self.constraints.Marked(grammar.LARK, 'start: <[7]> "a"', (7,), "tools"))
        talk = self.conversation("Settings", parameters=PARAMETERS, key="made-once")
        parent = self.say(talk, None, "Reply with every setting.")
        for name, value in SAMPLING.items():
            self.reply(talk, parent, name, sampling=self.sampling(**{name: value}))
        for one in constraints:
            self.reply(talk, parent, one.text, sampling=self.sampling(constraint=one))
        whole = self.sampling(**SAMPLING, constraint=constraints[0])
        self.reply(talk, parent, "all", sampling=whole, options=OPTIONS, choice=3)

    def texts(self) -> None:
        talk = self.conversation("", tags=("work",))
        parent: str | None = None
        for text in (
            "\n\n  ## A heading, café and more words than a title can hold, so that it is cut\n```\ncode\n```",
            "null \\u0000, \u2028, \U0001f44b\U0001f3fd, <think>not a thought</think>, \\## User",
            "## User\n\n<details>\n\n---\n",
            "東京の天気は？",
        ):
            parent = self.say(talk, parent, text)
            parent = self.reply(talk, parent, text[::-1], tokens=self.steps(range(len(text))))
        deleted = self.conversation("Deleted", tags=("gone",))
        self.reply(deleted, self.say(deleted, None, "Delete the weather."), "Done.", tokens=self.steps((1,)))
        self.store.conversations.delete(deleted)
        self.conversation("Empty")

    def imports(self) -> None:
        transcripts = earlier("palaver.transcripts")
        text = '{"conversations": [{"from": "human", "value": "Imported?"}, {"from": "gpt", "value": "Imported."}]}'
        for transcript in transcripts.read(text).transcripts:
            transcripts.keep(self.store, self.owner, transcript)

    def users(self) -> None:
        ann = self.store.users.ensure("ann").id
        other = self.store.conversations.create(ann, title="Ann's own").id
        self.say(other, None, "Words of ann about the weather")
        keys = [self.store.keys.add(self.owner, admin=True), self.store.keys.add(ann)]
        self.store.keys.revoke(keys[1][0].id)
        (self.store.folder / KEYS).write_text("\n".join(text for _, text in keys))
        self.store.presets.save(self.owner, "brief", "Be brief.", {"temperature": 0.2, "stop": ["\n"]})
        self.store.presets.save(self.owner, "über 東京", "", PARAMETERS)
        self.store.presets.save(ann, "brief", "Be long.", {})


async def take_turns(store: Any) -> None:
    """Turns of the earlier version's service. The last is left running, by kill -9."""
    making = earlier("tests.chat.making")
    user = earlier("palaver.messages").user
    async with making.serving(store) as stage:
        talk = await stage.chat.create(system="Be kind.", title="Turns")
        said = await stage.chat.say(talk.id, None, user("Wave!"), parameters={"seed": 5, "temperature": 0.5})
        await making.entries(stage.chat, said.reply.id)
    async with making.serving(store, held=True) as stage:
        again = await stage.chat.say(talk.id, said.reply.id, user("Again!"), parameters={"seed": 6})
        await making.until(stage.chat, again.reply.id, 2)
        await stage.chat.stop(again.reply.id)
        await making.entries(stage.chat, again.reply.id)
        killed = await stage.chat.say(talk.id, again.reply.id, user("Once more!"), parameters={"seed": 7})
        await making.until(stage.chat, killed.reply.id, 2)
        while len(await asyncio.to_thread(store.replies.token_ids, killed.reply.id)) < 4:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def make_data(folder: Path) -> None:
    """Fills the data folder in a process that is killed."""
    if (child := os.fork()) == 0:
        use_counters()
        store = earlier("palaver.store").open_store(folder)
        Maker(store).make()
        asyncio.run(take_turns(store))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it was to be killed"


def describe(store: Any) -> dict[str, Any]:
    """What the earlier version's own functions return for the store."""
    users = store.users.all()
    ids = {user.name: store.conversations.ids(user.id) for user in users}
    return {
        "users": plain(users),
        "keys": plain(store.keys.all()),
        "found_keys": [plain(store.keys.find(text)) for text in (store.folder / KEYS).read_text().split()],
        "presets": {user.name: plain(store.presets.all(user.id)) for user in users},
        "tags": {user.name: plain(store.conversations.tags(user.id)) for user in users},
        "listed": {user.name: plain(store.conversations.list(user.id)) for user in users},
        "deleted": {user.name: plain(store.conversations.list(user.id, deleted=True)) for user in users},
        "searches": {
            user.name: {query: plain(store.search.find(user.id, query)) for query in SEARCHES} for user in users
        },
        "conversations": {id: describe_conversation(store, id) for found in ids.values() for id in found},
    }


def describe_conversation(store: Any, id: str) -> dict[str, Any]:
    messages = store.messages.everything(id)
    options = earlier("palaver.chat.parameters").options_from_json
    return {
        "conversation": plain(store.conversations.get(id)),
        "nodes": plain(store.messages.nodes(id)),
        "messages": plain(messages),
        "contents": [plain(store.messages.full(message)) for message in messages],
        "tokens": {message.id: plain(store.replies.tokens(message.id)) for message in messages if message.reply},
        "options": {
            message.id: plain(options(message.reply.settings.options)) for message in messages if message.reply
        },
        "newest_leaf": store.messages.newest_leaf(id),
        "cursors": {client: plain(store.cursors.get(id, client)) for client in CLIENTS},
    }


def write_exports(store: Any, folder: Path) -> dict[str, Any]:
    """Writes every conversation in every format, and returns what the earlier version reads from the files."""
    transcripts, read = earlier("palaver.transcripts"), {}
    shutil.rmtree(folder, ignore_errors=True)
    for user in store.users.all():
        for id in store.conversations.ids(user.id):
            for format in transcripts.Format:
                text = transcripts.write(transcripts.take(store, id), format)
                if text:
                    path = folder / f"{id}.{format}.{SUFFIXES[format]}"
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(text.encode(errors="replace"))
                    read[path.name] = _read(path)
    return read


def _read(path: Path) -> Any:
    """None if the earlier version can't read its own file."""
    try:
        return plain(earlier("palaver.transcripts").read(path.read_bytes().decode()))
    except earlier("palaver.errors").RequestError:
        return None


def main() -> None:
    here = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        data, copy = Path(name) / "data", Path(name) / "copy"
        make_data(data)
        with tarfile.open(here / "data.tar.xz", "w:xz", preset=9) as archive:
            archive.add(data, ".", filter=_anonymous)
        shutil.copytree(data, copy)
        socket.gethostname = lambda: "earlier"
        with earlier("palaver.store").open_store(copy) as store:
            expected = {**describe(store), "read": write_exports(store, here / "exports")}
    (here / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, sort_keys=True) + "\n")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without owners and times, and without the file of SQLite's shared memory, which is no data."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith("-shm") else entry


if __name__ == "__main__":
    main()
