"""The command line: output, exit status and error messages."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from palaver.cli import app
from palaver.commands.options import parse_size
from palaver.store import open_store
from tests.models import make_model

SHORT = ("--set", "max_tokens=8", "--set", "seed=1")


def run(*arguments: object, input: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy', 'huggingface_hub', 'mcp', 'httpx'}"
    code = f"import sys, palaver.cli; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert run("--help").exit_code == 0
    assert "palaver" in run("--version").output


def test_the_arguments_of_a_command_import_no_pydantic() -> None:
    """An engine process starts once they are parsed: that must not wait for validators of parameters."""
    code = """
import sys, typer
from palaver.cli import app
command = typer.main.get_command(app)
with command.make_context("palaver", ["ask"]) as context:
    ask = command.get_command(context, "ask")
    given = ask.make_context("ask", ["Hi", "--model", "it", "--device", "cpu", "--exact", "--set", "seed=1"]).params
names = ("question", "model", "exact", "set_", "var", "think", "server")
print("pydantic" in sys.modules, *(given[name] for name in names))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "False Hi it True ['seed=1'] () default None\n", result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ("--think", "perhaps"),
        ("--gpu-layers", "few"),
        ("--gpu-layers", "-1"),
        ("--threads", "0"),
        ("--model",),
        ("--what",),
    ],
)
def test_wrong_arguments_are_refused(wrong: tuple[str, ...]) -> None:
    result = run("ask", "Hi", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output


@pytest.mark.parametrize("command", [("ask", "Hi"), ("chat",)])
def test_a_flag_with_the_value_0_is_not_ignored(command: tuple[str, ...]) -> None:
    result = run(*command, "--server", "http://127.0.0.1:1", "--gpu-layers", "0")
    assert result.exit_code == 2
    assert "--server can't be combined with --gpu-layers" in result.stderr


def test_ask_prints_the_answer_on_stdout_and_thinking_on_stderr(tiny_model: Path) -> None:
    result = run("ask", "Hi", "-m", tiny_model, *SHORT)
    assert result.exit_code == 0, result.output
    reply = json.loads(run("ask", "Hi", "-m", tiny_model, *SHORT, "--json").stdout)
    assert result.stdout == reply["answer"] + "\n"
    assert reply["finish"] == "length"
    assert reply["seed"] == 1
    assert len(reply["token_ids"]) == reply["usage"]["reply_tokens"] == 8


def test_ask_takes_the_question_from_a_pipe(tiny_model: Path) -> None:
    typed = run("ask", "Hi", "-m", tiny_model, *SHORT, "--json")
    piped = run("ask", "-m", tiny_model, *SHORT, "--json", input="Hi\n")
    assert json.loads(typed.stdout)["token_ids"] == json.loads(piped.stdout)["token_ids"]


def test_ask_completes_text_as_it_is(tiny_model: Path) -> None:
    result = run("ask", "Once upon", "--raw", "-m", tiny_model, *SHORT, "--json")
    assert json.loads(result.stdout)["usage"]["prompt_tokens"] == len("Once upon")


def test_chat_reads_a_line_a_turn(tiny_model: Path) -> None:
    result = run(
        "chat", tiny_model, *SHORT, input="Hi\n\n/continue\n/retry\n//slash\n/help\n/new\nagain\n/quit\nnever\n"
    )
    assert result.exit_code == 0, result.output
    assert "never" not in result.output
    assert "/help all lists every command" in result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_empty(tmp_path: Path, tiny_model: Path, closed: str) -> None:
    command = f'echo "Hello" | "$0" -m palaver chat "$1" --data "$2" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, tiny_model, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_failing_turn_does_not_end_the_chat(tiny_model: Path) -> None:
    result = run("chat", tiny_model, *SHORT, input="/continue\n" + "x" * 600 + "\nHi\n")
    assert result.exit_code == 1
    assert "no reply to continue" in result.stderr
    assert "maximum context length is 512" in result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["ask", "Hi", "-m", "nowhere"], 1, "Can't find the model 'nowhere'"),
        (["ask", "Hi", "-m", "../etc/passwd"], 1, "Can't find the model"),
        (["ask", "  "], 2, "empty"),
        (["ask"], 2, "empty"),
        (["ask", "Hi", "--set", "top_p=7"], 2, "top_p must be between 0 and 1 (got 7.0)"),
        (["ask", "Hi", "--set", "top_p=nan"], 2, "top_p"),
        (["ask", "Hi", "--set", "seed=1.5"], 2, "whole number"),
        (["ask", "Hi", "--set", "warmth=1"], 2, "Unknown parameter 'warmth'. Known parameters: temperature"),
        (["ask", "Hi", "--set", "warm"], 2, "NAME=VALUE"),
        (["ask", "Hi", "--template", "missing.jinja"], 2, "no such file"),
        (["ask", "Hi", "--attach", "missing.txt"], 2, "--attach 'missing.txt': No such file"),
        (["ask", "Hi", "--attach", "/"], 2, "Is a directory"),
        (["ask", "Hi", "--attach", "/dev/zero"], 2, "at most 128 MB"),
        (["ask", "Hi", "--attach", "/dev/null"], 2, "null is empty"),
        (["ask", "Hi", "--schema", "missing.json"], 2, "--schema 'missing.json': No such file"),
        (["ask", "Hi", "--think", "maybe"], 2, "maybe"),
        (["chat", "a", "--model", "b"], 2, "conflicts with the model"),
        (["sing"], 2, "sing"),
    ],
)
def test_bad_requests(arguments: list[str], status: int, sentence: str) -> None:
    result = run(*arguments)
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.exit_code == status


def _without(folder: Path, pattern: str) -> Path:
    for path in folder.glob(pattern):
        path.unlink()
    return folder


def test_a_model_that_is_not_there_is_reported_once(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    refused = subprocess.run(
        [sys.executable, "-m", "palaver", "chat", str(missing), "--data", str(tmp_path / "data")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.count("nothing") == 1, refused.stderr
    assert "not recovered" not in refused.stderr


def test_bad_models(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    no_weights = _without(make_model(tmp_path / "no-weights"), "*.safetensors")
    pickled = _without(make_model(tmp_path / "pickled"), "*.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"weights": [1.0]}))
    no_template = make_model(tmp_path / "no-template", template=None)
    raising = make_model(tmp_path / "raising", template="a\n{{ raise_exception('roles must alternate') }}")
    broken = make_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not tensors")
    for folder, sentence in [
        (empty, "no config.json"),
        (no_weights, "contains no weights"),
        (pickled, "pickle"),
        (no_template, "no chat template"),
        (raising, "line 2) failed: roles must alternate"),
        (broken, "broken"),
    ]:
        result = run("ask", "Hi", "-m", folder)
        assert sentence in result.stderr, folder
        assert result.exit_code == 1
        assert "Traceback" not in result.output
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_prompt_beyond_the_context_names_both_counts(tiny_model: Path) -> None:
    result = run("ask", "x" * 600, "-m", tiny_model)
    assert result.exit_code == 1
    assert "618 tokens" in result.stderr
    assert "512" in result.stderr


def test_a_template_can_be_given(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", template=None)
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert run("ask", "Hi", "-m", folder, "--template", template, *SHORT).exit_code == 0


def test_the_memory_of_the_cache_is_set_and_the_error_names_the_flag(tiny_model: Path) -> None:
    result = run("chat", tiny_model, *SHORT, "--kv-cache-memory", "8KiB", "--max-num-seqs", 2, input="Hello there\n")
    assert "give the cache more memory with --kv-cache-memory" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-cache-memory", "much"), "must be a size such as 512MiB or 8GiB"),
        (("--kv-cache-memory", "0"), "must be more than 0"),
        (("--kv-cache-memory", "9999TiB"), "are free on cpu"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
    ],
)
def test_limits_that_make_no_sense(flags: tuple[str, ...], message: str, tiny_model: Path) -> None:
    result = run("chat", tiny_model, *SHORT, *flags, input="Hello there\n")
    assert result.exit_code != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("2k", 2000), ("4GB", 4 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--kv-cache-memory", text) == size


@pytest.mark.parametrize("flag", ["--no-compile", None])
def test_inspect_says_which_steps_run(flag: str | None, tiny_model: Path) -> None:
    result = run("inspect", tiny_model, *([flag] if flag else []))
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("computation: "))
    assert line.endswith("few operations") == (flag is not None)


def test_without_a_compiler_the_speed_is_named_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no earlier build
    result = run("ask", "Hi", "-m", tiny_model, *SHORT)
    assert result.exit_code == 0
    assert result.stderr.count("with gcc or clang installed") == 1
    assert "no C compiler was found" in run("inspect", tiny_model).stdout
    refused = run("ask", "Hi", "-m", tiny_model, *SHORT, "--compile")
    assert refused.exit_code == 1
    assert "Leave out --compile" in refused.stderr


def diffusion_model(folder: Path, tiny_model: Path, **settings: object) -> Path:
    """The tiny model as one that denoises. It has learned nothing, so any token can be its mask."""
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    diffusion = {"mask_token_id": 5, "tokens": 12, "block_length": 4, **settings}
    (folder / "config.json").write_text(json.dumps({**config, "diffusion": diffusion}))
    return folder


def test_an_approximate_cache_is_an_option_that_says_so(tmp_path: Path, tiny_model: Path) -> None:
    model = diffusion_model(tmp_path / "model", tiny_model)
    inspected = run("inspect", model, "--approximate-cache")
    assert "prompt cache: approximate: " in inspected.stdout, inspected.output
    assert "/exact/denoiser-" in inspected.stdout
    data, sampling = ("--data", tmp_path / "data"), ("--set", "temperature=0.9", "--set", "seed=1")
    said = run("chat", model, "--local", "--approximate-cache", *sampling, *data, input="Hi\n")
    assert said.exit_code == 0, said.output
    with open_store(tmp_path / "data") as store:
        (conversation,) = store.conversations.list(store.users.ensure().id)
    lines = run("replay", conversation.id, *data).stdout.splitlines()
    assert lines[0].startswith("Generated by: diffusion-approximate/torch-")
    assert lines[1:] == ["Replayed by: the same", "Identical: 12 tokens"]


def test_an_approximate_cache_is_refused_where_it_has_no_use(tmp_path: Path, tiny_model: Path) -> None:
    exact = diffusion_model(tmp_path / "exact", tiny_model, attention="block_causal")
    for model, sentence in (
        (exact, "the blocks of this model see nothing behind them"),
        (tiny_model, "is for a folder of a diffusion model"),
    ):
        refused = run("ask", "Hi", "-m", model, "--approximate-cache")
        assert refused.exit_code == 2
        assert "--approximate-cache" in refused.stderr
        assert sentence in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_fill_writes_the_text_with_its_masks_filled() -> None:
    """By the shipped model: what is around a mask stays, and one seed gives one text."""
    masked = ("fill", "17 + [MASK:2] = 42.", "--set", "seed=1", "--set", "temperature=0.7")
    filled = run(*masked)
    assert filled.exit_code == 0, filled.output
    assert filled.stdout.startswith("17 + ")
    assert filled.stdout.endswith(" = 42.\n")
    assert "[MASK" not in filled.stdout
    assert run(*masked).stdout == filled.stdout


def test_the_example_of_fill_is_filled_right_by_the_default_model() -> None:
    text = "8+7=15: [MASK], carry [MASK]"
    assert text in (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    help = " ".join(run("fill", "--help").stdout.split())
    assert text in help
    assert "Default: sprout-diffusion." in help
    assert run("fill", text).stdout == "8+7=15: 5, carry 1\n"


def test_fill_refuses_in_a_sentence(tiny_model: Path) -> None:
    for arguments, status, sentence in (
        (("nothing to fill",), 2, "must have at least one [MASK]"),
        (("a [MASK:0]",), 2, "must be from 1 to 10,000 tokens long"),
        (("a [MASK]", "--set", "max_tokens=4"), 2, "is not for texts with masks"),
        (("a [MASK]", "-m", tiny_model, "--engine", "diffusion"), 1, "names no mask token"),
    ):
        refused = run("fill", *arguments)
        assert refused.exit_code == status, refused.output
        assert sentence in refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("fill", "caf\udce9 [MASK]"), "TEXT"),
        (("fill", "a [MASK]", "--set", "stop=caf\udce9"), "--set"),
        (("chat", "--local", "--system", "caf\udce9"), "--system"),
        (("chat", "--local", "--set", "stop=caf\udce9"), "--set"),
    ],
)
def test_an_argument_that_is_not_utf8_is_named(tmp_path: Path, arguments: tuple[str, ...], name: str) -> None:
    data = () if arguments[0] == "fill" else ("--data", tmp_path)
    refused = run(*arguments, *data, input="Hi\n")
    assert (refused.exit_code, refused.stderr) == (2, f"palaver: The text of {name} is not UTF-8.\n")


def test_a_causal_model_named_as_diffusion_is_refused(tiny_model: Path) -> None:
    for command in (("ask", "Hi", "-m", tiny_model), ("chat", tiny_model, "--local"), ("inspect", tiny_model)):
        refused = run(*command, "--engine", "diffusion", input="Hi\n")
        assert refused.exit_code == 1, refused.output
        assert "names no mask token, so it can't be run as a diffusion model" in refused.stderr


def test_a_training_configuration_with_diffusion_is_chatted_with(tmp_path: Path, tiny_model: Path) -> None:
    """axolotl's configuration says that the folder is a diffusion model, and how it is denoised."""
    configuration = tmp_path / "training.yml"
    configuration.write_text(
        f"base_model: {tiny_model}\noutput_dir: {tiny_model}\n"
        "plugins:\n  - axolotl.integrations.diffusion.DiffusionPlugin\n"
        "diffusion:\n  mask_token_id: 5\n  num_diffusion_steps: 4\n  generation_max_length: 12\n"
        "  generation_temperature: 0.9\n"
    )
    drawn = ("--set", "seed=3")
    asked = json.loads(run("ask", "Hi", "-m", configuration, *drawn, "--json").stdout)
    again = json.loads(run("ask", "Hi", "-m", configuration, *drawn, "--json").stdout)
    assert asked["token_ids"] == again["token_ids"]
    assert 0 < len(asked["token_ids"]) <= 12
    cooler = json.loads(run("ask", "Hi", "-m", configuration, *drawn, "--set", "temperature=0", "--json").stdout)
    assert cooler["token_ids"] != asked["token_ids"], "the temperature of the configuration is not read"
    data = ("--data", tmp_path / "data")
    said = run("chat", configuration, "--local", *drawn, *data, input="Hi\n")
    assert said.exit_code == 0, said.output
    assert asked["answer"].strip() in said.stdout
    inspected = run("inspect", configuration).stdout
    assert "diffusion" in inspected
    assert "prompt cache: none: every token sees the whole text" in inspected
