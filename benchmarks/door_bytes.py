"""The bytes that each API of a server answers, to compare two versions of Palaver.

    python -m benchmarks.door_bytes --code ../earlier earlier.json    # records the version in ../earlier
    python -m benchmarks.door_bytes now.json                          # records this one
    python -m benchmarks.door_bytes --compare earlier.json now.json   # prints what differs; exit status 1

Records a `palaver serve` with the embedded model over its APIs alone, so that it works with every version. Replies are
greedy or have a seed, and steps are compiled, whose bits depend on the text alone. Ids are numbered in the order of
their appearance in an answer. Times, durations and comments in streams are left out.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from websockets.sync.client import connect

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ("--compile", "--max-body", "1", "--socket-grace", "5")
SUM, THINK = "What is 12 + 30?", "What is 417 + 385?"
HEADERS_LEFT_OUT = {"date", "content-length", "server"}
PIXEL = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==")
"""A picture of one pixel: newer versions refuse bytes that are none."""
WEATHER = {
    "name": "get_weather",
    "description": "Weather at a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "Weather.", "input_schema": WEATHER["parameters"]}]
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}

_ID = re.compile(r"(?<![0-9A-Za-z])(?=\d*[a-z])(?:[0-9a-f]{32}|[0-9a-hjkmnp-tv-z]{16})(?![0-9A-Za-z])")
_NUMBER = r"(?:-?\d+(?:\.\d+)?(?:e-?\d+)?)"
_TIME = re.compile(rf'("(?!answer_at)(?:\w+_at|created|now)": ?)(?:{_NUMBER}|"[^"]*")')
_DURATION = re.compile(rf'("(?:\w*seconds|\w*_s|first_token|thinking)": ?){_NUMBER}')
_PING = re.compile(r"(event: ping\ndata: [^\n]*\n\n)(?:event: ping\ndata: [^\n]*\n\n)+")
_COMMENT = re.compile(r"^:[^\n]*\n(?:\n|$)", re.MULTILINE)


class Normalizer:
    """Replaces what differs from run to run in one answer."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        text = _COMMENT.sub("", text.replace("\r\n", "\n"))
        text = _DURATION.sub(r'\1"<seconds>"', _TIME.sub(r'\1"<time>"', text))
        return _ID.sub(self._id, _PING.sub(r"\1", text))

    def _id(self, match: re.Match[str]) -> str:
        return self._ids.setdefault(match[0], f"<id {len(self._ids) + 1}>")


class Recorder:
    """Sends requests and keeps the answers by name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, dict[str, Any]] = {}
        self._client = httpx.Client(base_url=url, timeout=120)

    def send(self, name: str, method: str, path: str, **request: Any) -> Any:
        """Records the answer, and returns its JSON or its text."""
        response = self._request(method, path, **request)
        headers = {key: value for key, value in response.headers.items() if key not in HEADERS_LEFT_OUT}
        self.keep(name, response.text, response.status_code, headers)
        try:
            return response.json()
        except ValueError:
            return response.text

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Sends it again if it was refused while it was still being sent, and the refusal was lost on the way."""
        for _ in range(20):
            try:
                return self._client.request(method, path, **request)
            except (httpx.ReadError, httpx.WriteError):
                continue
        return self._client.request(method, path, **request)

    def post(self, name: str, path: str, body: Any = None, **request: Any) -> Any:
        return self.send(name, "POST", path, json=body, **request)

    def get(self, name: str, path: str, **request: Any) -> Any:
        return self.send(name, "GET", path, **request)

    def keep(self, name: str, text: str, status: int = 0, headers: dict[str, str] | None = None) -> None:
        assert name not in self.answers, name
        normalize = Normalizer()
        normal = {key: normalize(value) for key, value in sorted((headers or {}).items())}
        self.answers[name] = {"status": status, "headers": normal, "body": normalize(text)}

    def quietly(self, method: str, path: str, **request: Any) -> Any:
        """Without a record."""
        return self._client.request(method, path, **request).json()

    def wait_for_reply(self, id: str) -> None:
        while self.quietly("GET", f"/api/messages/{id}")["reply"]["status"] == "running":
            time.sleep(0.05)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat_completions(recorder: Recorder) -> None:
    def ask(name: str, question: str = SUM, **fields: Any) -> Any:
        body = {"messages": [user(question)], "temperature": 0, "max_tokens": 200, **fields}
        return recorder.post(f"chat {name}", "/v1/chat/completions", body)

    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    ask("plain", model="sprout")
    ask("stream", stream=True, stream_options={"include_usage": True})
    ask("stream without usage", stream=True)
    ask("sampled", temperature=1.0, seed=5, top_p=0.9, top_k=50)
    ask("thinking", THINK, **thinks)
    ask("thinking stream", THINK, **thinks, stream=True)
    ask("no thinking", THINK, chat_template_kwargs={"enable_thinking": False})
    ask("effort", THINK, reasoning_effort="low")
    ask("thinking budget", THINK, **thinks, thinking_budget=8)
    ask("tools", "What is the weather in Paris?", tools=TOOLS)
    ask("tools stream", "What is the weather in Paris?", tools=TOOLS, stream=True)
    ask("tool choice", SUM, tools=TOOLS, tool_choice="required")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history = [
        user("What is the weather in Paris?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 degrees"},
    ]
    ask("tool result", messages=history, tools=TOOLS)
    ask("n", n=2, temperature=1.0, seed=3)
    ask("logprobs", logprobs=True, top_logprobs=2, max_tokens=8)
    ask("logprobs stream", logprobs=True, top_logprobs=1, max_tokens=4, stream=True)
    ask("stop", stop=["42"])
    ask("length", max_tokens=3)
    ask("json schema", response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}})
    ask("regex", guided_regex="[a-z]{3}")
    ids = ask("token ids", return_token_ids=True, max_tokens=4)["choices"][0]["token_ids"]
    begun = {"role": "assistant", "content": "12 + 30"}
    ask("continue text", messages=[user(SUM), begun], continue_final_message=True)
    ask("continue ids", messages=[user(SUM), {**begun, "token_ids": ids}], continue_final_message=True)
    thought = {"role": "assistant", "content": None, "reasoning_content": "12+30, from the right:"}
    ask("continue thought", messages=[user(SUM), thought], continue_final_message=True)
    kept = ask("conversation", metadata={"conversation": "new"})
    ask("conversation again", "And 40 + 2?", metadata={"conversation": kept["metadata"]["conversation"]})
    ask("ignored fields", user="me", service_tier="auto")
    recorder.post("tokenize", "/v1/tokenize", {"prompt": "Hello there"})
    recorder.post("tokenize messages", "/v1/tokenize", {"messages": [user("Hi")]})
    recorder.post("detokenize", "/v1/detokenize", {"tokens": ids})
    recorder.post("apply template", "/v1/apply-template", {"messages": [user("Hi")]})


def completions(recorder: Recorder) -> None:
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    recorder.post("completions plain", "/v1/completions", body)
    recorder.post("completions stream", "/v1/completions", {**body, "stream": True})
    recorder.post("completions ids", "/v1/completions", {**body, "prompt": [1, 274, 201], "logprobs": 2, "echo": True})
    recorder.post("completions many", "/v1/completions", {**body, "prompt": ["Hello", "Good"], "n": 2, "seed": 1})


def errors(recorder: Recorder) -> None:
    path, body = "/v1/chat/completions", {"messages": [user("Hi")]}
    recorder.send("error no json", "POST", path, content="{", headers={"content-type": "application/json"})
    recorder.send("error no content type", "POST", path, content="{}", headers={"content-type": "text/plain"})
    recorder.post("error no messages", path, {})
    recorder.post("error wrong type", path, {"messages": "Hi"})
    recorder.post("error wrong role", path, {"messages": [{"role": "nobody", "content": "Hi"}]})
    recorder.post("error unknown field", path, {**body, "no_such_field": 1})
    recorder.post("error out of bounds", path, {**body, "temperature": 9})
    recorder.post("error unknown variable", path, {**body, "chat_template_kwargs": {"no_such_variable": 1}})
    recorder.post("error bad schema", path, {**body, "guided_json": {"type": "no-such-type"}})
    recorder.post("error bad grammar", path, {**body, "guided_regex": "("})
    recorder.post("error unknown model", path, {**body, "model": "no/such"})
    recorder.post("error too long", path, {"messages": [user("word " * 20_000)]})
    recorder.post("error too large", path, {"messages": [user("x" * (2 << 20))]})
    recorder.post("error unknown conversation", path, {**body, "metadata": {"conversation": "no-such"}})
    recorder.get("error unknown path", "/v1/no-such")
    recorder.get("error method", path)
    recorder.post("error embeddings", "/v1/embeddings", {"input": "Hi"})
    recorder.get("error unknown conversation by id", "/api/conversations/no-such")
    recorder.post("error unknown field under api", "/api/conversations", {"no_such_field": 1})
    recorder.post("error bad parameter under api", "/api/conversations", {"parameters": {"temperature": 9}})
    recorder.post("error anthropic", "/v1/messages", {"messages": [user("Hi")]})
    recorder.post("error anthropic unknown field", "/v1/messages", {"max_tokens": 5, **body, "no_such_field": 1})
    recorder.post("error responses", "/v1/responses", {})
    recorder.post("error responses unknown", "/v1/responses", {"input": "Hi", "previous_response_id": "resp_none"})
    recorder.get("error foreign host", "/health", headers={"host": "evil.example"})
    recorder.get("error foreign origin", "/v1/models", headers={"origin": "http://evil.example"})


def responses(recorder: Recorder) -> None:
    def ask(name: str, question: Any = SUM, **fields: Any) -> Any:
        body = {"input": question, "temperature": 0, "max_output_tokens": 200, **fields}
        return recorder.post(f"responses {name}", "/v1/responses", body)

    plain = ask("plain", model="sprout")
    ask("stream", stream=True)
    ask("not stored", store=False)
    ask("not stored stream", store=False, stream=True)
    ask("thinking", THINK, enable_thinking=True)
    ask("thinking stream", THINK, enable_thinking=True, stream=True)
    ask("summary", THINK, enable_thinking=True, reasoning={"summary": "auto"})
    ask("tools", "What is the weather in Paris?", tools=[{"type": "function", **WEATHER}])
    ask("tools stream", "What is the weather in Paris?", tools=[{"type": "function", **WEATHER}], stream=True)
    ask("schema", text={"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}})
    ask("next", "And 40 + 2?", previous_response_id=plain["id"])
    ask("length", max_output_tokens=3)
    ask("logprobs", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    background = ask("background", background=True)
    recorder.wait_for_reply(background["id"].removeprefix("resp_"))
    recorder.get("responses background ended", f"/v1/responses/{background['id']}")
    recorder.get("responses get", f"/v1/responses/{plain['id']}")
    recorder.get("responses stream again", f"/v1/responses/{plain['id']}?stream=true&starting_after=3")
    recorder.get("responses items", f"/v1/responses/{plain['id']}/input_items")
    recorder.post("responses cancel", f"/v1/responses/{plain['id']}/cancel")
    recorder.post("responses input tokens", "/v1/responses/input_tokens", {"input": SUM})
    recorder.send("responses delete", "DELETE", f"/v1/responses/{plain['id']}")
    recorder.get("responses deleted", f"/v1/responses/{plain['id']}")


def anthropic(recorder: Recorder) -> None:
    def ask(name: str, question: str = SUM, **fields: Any) -> Any:
        body = {"max_tokens": 200, "messages": [user(question)], "temperature": 0, **fields}
        return recorder.post(f"anthropic {name}", "/v1/messages", body)

    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    ask("plain", model="sprout")
    ask("stream", stream=True)
    thought = ask("thinking", THINK, **thinking)
    ask("thinking stream", THINK, **thinking, stream=True)
    ask("no thinking", THINK, thinking={"type": "disabled"})
    called = ask("tools", "What is the weather in Paris?", tools=ANTHROPIC_TOOLS)
    ask("tools stream", "What is the weather in Paris?", tools=ANTHROPIC_TOOLS, stream=True)
    ask("tool choice", tools=ANTHROPIC_TOOLS, tool_choice={"type": "any"})
    history = [user("What is the weather in Paris?"), {"role": "assistant", "content": called["content"]}]
    uses = [block for block in called["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "sunny"} for one in uses]
    ask("tool result", messages=[*history, {"role": "user", "content": results or "Thanks."}], tools=ANTHROPIC_TOOLS)
    ask("continue", messages=[user(SUM), {"role": "assistant", "content": "The answer is"}])
    ask("history", messages=[user(THINK), {"role": "assistant", "content": thought["content"]}, user("And 1 more?")])
    ask("stop", stop_sequences=["42"])
    ask("length", max_tokens=3)
    ask("system", system=[{"type": "text", "text": "Be brief."}])
    recorder.post("anthropic count", "/v1/messages/count_tokens", {"messages": [user(SUM)]})
    recorder.get("anthropic models", "/v1/models", headers={"anthropic-version": "2023-06-01"})


def web_socket(recorder: Recorder) -> None:
    address = recorder.url.replace("http", "ws", 1) + "/ws/chat"

    def talk(name: str, *frames: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends a frame, reads up to the end of its turn, sends the next."""
        seen: list[str] = []
        with connect(address, max_size=None) as socket:
            for frame in frames:
                socket.send(json.dumps(frame))
                while True:
                    text = str(socket.recv(60))
                    if json.loads(text)["type"] == "queued":
                        continue  # depends on the load
                    seen.append(text)
                    if json.loads(text)["type"] in ("done", "error"):
                        break
        recorder.keep(f"socket {name}", "\n".join(seen))
        return [json.loads(text) for text in seen]

    turn: dict[str, Any] = {"messages": [user(SUM)], "generation": {"temperature": 0}}
    done = talk("plain", turn)[-1]
    answer = {"role": "assistant", "content": done["text"]}
    talk("next", turn, {**turn, "messages": [user(SUM), answer, user("And 40 + 2?")]})
    talk("thinking", {**turn, "messages": [user(THINK)], "enable_thinking": True})
    talk("not streaming", {**turn, "streaming": False})
    talk("conversation", {**turn, "conversation": "new"})
    talk("sampled", {**turn, "generation": {"temperature": 1.0, "seed": 4, "max_new_tokens": 20}})
    talk("resume", {"type": "resume", "turn_id": done["turn_id"], "after": 2})
    talk("error", {"messages": []}, {"type": "no-such"}, {**turn, "no_such_field": 1}, {**turn, "generation": {"x": 1}})
    talk("error parts", {"messages": [{"role": "user", "content": [{"type": "image", "data": "AAAA"}]}]})


def conversations(recorder: Recorder) -> None:
    get, post = recorder.get, recorder.post
    fields = {"title": "Trip", "system": "Be brief.", "tags": ["travel"], "parameters": {"temperature": 0.0, "seed": 1}}
    talk = post("api create", "/api/conversations", fields)["id"]
    post("api create once", "/api/conversations", fields, headers={"idempotency-key": "a"})
    post("api create twice", "/api/conversations", fields, headers={"idempotency-key": "a"})
    place = f"/api/conversations/{talk}"
    recorder.send("api patch", "PATCH", place, json={"title": "Another trip"})
    message = {"role": "user", "parts": [{"type": "text", "text": SUM}]}
    said = post("api say", f"{place}/say", {"parent": None, "message": message})
    reply = said["reply"]["id"]
    recorder.wait_for_reply(reply)
    get("api message", f"/api/messages/{reply}")
    get("api path", f"/api/messages/{reply}/path")
    get("api events", f"/api/turns/{reply}/events")
    get("api events after", f"/api/turns/{reply}/events", headers={"last-event-id": "3"})
    get("api events of many", f"/api/events?turns={reply}:3")
    get("api events beyond", f"/api/turns/{reply}/events?after=99999")
    get("api tokens", f"/api/turns/{reply}/tokens")
    get("api raw", f"/api/turns/{reply}/raw")
    parent = said["message"]["id"]
    thinks = {"thinking": True, "max_tokens": 12}
    cut = post("api reply", f"{place}/replies", {"parent": parent, "parameters": thinks})["id"]
    recorder.wait_for_reply(cut)
    get("api cut", f"/api/messages/{cut}")
    get("api cut events", f"/api/turns/{cut}/events")
    post("api continue", f"/api/turns/{cut}/continue")
    recorder.wait_for_reply(cut)
    get("api continued", f"/api/messages/{cut}")
    forked = post("api fork", f"/api/turns/{reply}/fork", {"tokens": 3})["id"]
    recorder.wait_for_reply(forked)
    get("api forked", f"/api/messages/{forked}")
    tools = {"tools": [WEATHER]}
    asks = {"role": "user", "parts": [{"type": "text", "text": "What is the weather in Paris?"}]}
    called = post("api tools", f"{place}/say", {"parent": reply, "message": asks, "parameters": tools})["reply"]["id"]
    recorder.wait_for_reply(called)
    get("api called", f"/api/messages/{called}")
    get("api called events", f"/api/turns/{called}/events")
    edited = post("api edit", f"/api/messages/{parent}/edit", {"parts": [{"type": "text", "text": "Hello there"}]})[
        "id"
    ]
    get("api siblings", f"/api/messages/{edited}/siblings")
    post("api append", f"{place}/messages", {"parent": called, "message": message})
    get("api nodes", f"{place}/nodes")
    get("api newest leaf", f"{place}/newest-leaf?start={parent}")
    post("api gauge", f"{place}/gauge", {"leaf": reply})
    recorder.send("api move", "PUT", f"{place}/cursor", json={"client": "laptop", "to": parent})
    recorder.send("api move again", "PUT", f"{place}/cursor", json={"client": "laptop", "to": reply})
    post("api undo", f"{place}/cursor/undo", {"client": "laptop"})
    post("api redo", f"{place}/cursor/redo", {"client": "laptop"})
    post("api nothing to redo", f"{place}/cursor/redo", {"client": "laptop"})
    get("api cursor", f"{place}/cursor?client=other")
    for form in ("jsonl", "branches", "tree", "markdown", "sharegpt"):
        get(f"api export {form}", f"{place}/export?form={form}")
    line = json.dumps({"messages": [user("Hello"), {"role": "assistant", "content": "Hi"}]})
    recorder.send("api import", "POST", "/api/import", content=line, headers={"content-type": "text/plain"})
    bytes_ = {"content-type": "application/octet-stream"}
    digest = recorder.send("api put blob", "POST", "/api/blobs", content=PIXEL, headers=bytes_)["digest"]
    get("api blob", f"/api/blobs/{digest}?type=image/gif")
    recorder.send(
        "api save preset", "PUT", "/api/presets", json={"name": "careful", "parameters": {"temperature": 0.2}}
    )
    get("api presets", "/api/presets")
    post("api delete preset", "/api/presets/delete", {"name": "careful"})
    get("api tags", "/api/tags")
    get("api search", "/api/search?query=weather&limit=20")
    get("api list", "/api/conversations?limit=3")
    recorder.send("api delete", "DELETE", place)
    get("api deleted", place)
    post("api undelete", f"{place}/undelete")
    post("api forget", f"{place}/forget")
    changes(recorder)


def changes(recorder: Recorder) -> None:
    """The stream of changes while a conversation is made, changed and deleted."""

    def change() -> None:
        talk = recorder.quietly("POST", "/api/conversations", json={"title": "Watched"})["id"]
        recorder.quietly("PATCH", f"/api/conversations/{talk}", json={"title": "Watched again"})
        recorder.quietly("POST", f"/api/conversations/{talk}/messages", json={"parent": None, "message": message})

    message = {"role": "user", "parts": [{"type": "text", "text": "Watched"}]}
    lines: list[str] = []
    with httpx.stream("GET", f"{recorder.url}/api/events?changes=true", timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            lines.append(line)
            if len(lines) == 1:
                changer = Thread(target=change)
                changer.start()
            if len(lines) == 4:
                break
    changer.join()
    recorder.keep("api changes", "\n".join(lines))


def operation(recorder: Recorder) -> None:
    recorder.get("models", "/v1/models")
    recorder.get("model", "/v1/models/sprout")
    recorder.get("api model", "/api/model")
    recorder.get("api models", "/api/models")
    recorder.get("api ready", "/api/model/ready?wait=1")
    recorder.get("health", "/health")
    recorder.get("voices", "/v1/audio/voices")
    recorder.get("openapi", "/openapi.json")
    text = httpx.get(f"{recorder.url}/metrics").text
    names = sorted({line for line in text.splitlines() if line.startswith("# TYPE")})
    recorder.keep("metrics names", "\n".join(names))


DOORS = {
    "chat": chat_completions,
    "completions": completions,
    "errors": errors,
    "responses": responses,
    "anthropic": anthropic,
    "socket": web_socket,
    "api": conversations,
    "operation": operation,
}


@contextmanager
def server(code: Path, options: Sequence[str]) -> Iterator[str]:
    """A `palaver serve` of the code in that checkout."""
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--data", data, *options]
        environment = {**os.environ, "PYTHONPATH": str(code / "src")}
        log = Path(data) / "log.txt"
        with log.open("w") as output, subprocess.Popen(command, stderr=output, env=environment, cwd=data) as process:
            try:
                yield _ready(log, process)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def _ready(log: Path, process: subprocess.Popen[bytes]) -> str:
    while not (found := re.search(r"http://[^\s/]+", log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    while httpx.get(f"{found[0]}/health", timeout=30).status_code != 200:
        time.sleep(0.2)
    return found[0]


def record(code: Path, output: Path, options: Sequence[str], doors: Sequence[str]) -> None:
    with server(code, options) as url:
        recorder = Recorder(url)
        for name in doors:
            DOORS[name](recorder)
    output.write_text(json.dumps(recorder.answers, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(recorder.answers)} answers in {output}")


def compare(before: Path, after: Path, lines: int) -> int:
    """Prints the differences. Returns their number."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    for name in different:
        print(f"=== {name}")
        shown = list(_differences(_lines(old.get(name)), _lines(new.get(name))))
        print("\n".join(shown[:lines]) or "only the spaces between values differ")
        if len(shown) > lines:
            print(f"... {len(shown) - lines} lines more")
    print(f"{len(different)} of {len({**old, **new})} answers differ")
    return len(different)


def _differences(old: list[str], new: list[str]) -> Iterator[str]:
    """Lines with - and +. Of lines that were changed in place, the part that differs and a little around it."""
    for kind, start, end, other_start, other_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        removed, added = old[start:end], new[other_start:other_end]
        if kind == "equal":
            continue
        if len(removed) == len(added):
            pairs = [_cut(*pair) for pair in zip(removed, added, strict=True)]
            removed, added = [one for one, _ in pairs], [other for _, other in pairs]
        yield from (f"- {line[:300]}" for line in removed)
        yield from (f"+ {line[:300]}" for line in added)


def _cut(one: str, other: str) -> tuple[str, str]:
    start = max(0, _same(one, other) - 40)
    end = max(0, _same(one[start:][::-1], other[start:][::-1]) - 20)
    return f"…{one[start : len(one) - end]}", f"…{other[start : len(other) - end]}"


def _same(one: str, other: str) -> int:
    """The number of characters at the start that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))


def _lines(answer: dict[str, Any] | None) -> list[str]:
    if answer is None:
        return []
    head = [f"status {answer['status']}", *(f"{name}: {value}" for name, value in answer["headers"].items())]
    return [*head, *(one for line in answer["body"].split("\n") for one in _pretty(line))]


def _pretty(line: str) -> list[str]:
    """A body of JSON over several lines; an event of a stream stays on one."""
    try:
        value = json.loads(line)
    except ValueError:
        return [line]
    return json.dumps(value, ensure_ascii=False, indent=1).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument(
        "--code", type=Path, default=ROOT, metavar="FOLDER", help="the checkout to record; default: this"
    )
    parser.add_argument("--options", default=" ".join(OPTIONS), help="of `palaver serve`")
    parser.add_argument("--only", nargs="+", choices=DOORS, help="some of the APIs; default: all")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--lines", type=int, default=60, help="of each difference, at most")
    options = parser.parse_args()
    if options.compare:
        before, after = options.compare
        sys.exit(1 if compare(before, after, options.lines) else 0)
    if options.output is None:
        parser.error("name a file to write, or --compare two")
    record(options.code.resolve(), options.output, options.options.split(), options.only or tuple(DOORS))


if __name__ == "__main__":
    main()
