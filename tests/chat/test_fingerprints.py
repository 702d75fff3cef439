"""Every reply stores which engine computed it; a continuation by another engine gives a notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model import Model, build_model, load_model_format
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.cli import app
from palaver.engines.base import Fingerprint
from palaver.engines.host.supervisor import ReportProgress
from palaver.engines.torch import EngineOptions, load
from palaver.events import Started, fold
from palaver.messages import user
from palaver.models.resolver import ResolvedModel
from palaver.sampling import Sampling
from palaver.store import Store, StoredMessage, open_store
from palaver.store.encoding import ReplySettings, decode_settings, encode_settings
from tests.chat.scripted_service import Stage, read_entries

SHORT = {"max_tokens": 6, "seed": 1, "temperature": 1.0}
OWN_CODE = EngineOptions(compiled=False, fused=False)
FUSED = EngineOptions(compiled=False)


@asynccontextmanager
async def serving(store: Store, folder: Path, options: EngineOptions, resume: bool = False) -> AsyncIterator[Stage]:
    """A service on the real engine."""

    async def load_model(name: str, report: ReportProgress) -> Model:
        tokenizer, format = load_model_format(ResolvedModel(folder), LoadOptions())
        engine = await asyncio.to_thread(load, folder, vocabulary=tokenizer.vocabulary, options=options)
        return build_model(str(folder), engine, format, tokenizer)

    models = ModelPool(load_model)
    models.load(str(folder))
    async with Service(store, models, resume=resume) as service:
        await models.ready()
        owner = await asyncio.to_thread(store.users.ensure)
        yield Stage(service.chat(owner.id), service)
        await models.unload()


async def cut_short(stage: Stage) -> StoredMessage:
    conversation = await stage.chat.create_conversation()
    sent = await stage.chat.send_message(conversation.id, None, user("Hi"), parameters=SHORT)
    await read_entries(stage.chat, sent.reply.id)
    return await stage.chat.message(sent.reply.id)


def fingerprints(reply: StoredMessage) -> tuple[tuple[int, str], ...]:
    assert reply.reply is not None
    return reply.reply.settings.fingerprints


async def continued(stage: Stage, reply: StoredMessage) -> tuple[StoredMessage, str]:
    """The reply after it went on, and the notice its readers were shown."""
    await stage.chat.continue_reply(reply.id)
    received = [entry.event for entry in await read_entries(stage.chat, reply.id)]
    (started,) = [event for event in received if isinstance(event, Started)]
    assert fold(received).notices == ((started.notice,) if started.notice else ())
    return await stage.chat.message(reply.id), started.notice


async def test_a_reply_that_another_engine_continues_says_so(tmp_path: Path, tiny_model: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, tiny_model, FUSED) as stage:
            begun = await cut_short(stage)
            card = await stage.chat.model()
            assert card.fingerprint.startswith("fused/")
            assert fingerprints(begun) == ((0, card.fingerprint),)
            same, notice = await continued(stage, begun)
            assert not notice
            assert fingerprints(same) == fingerprints(begun)
        async with serving(store, tiny_model, OWN_CODE) as stage:
            other = (await stage.chat.model()).fingerprint
            assert other.startswith("library/")
            changed, notice = await continued(stage, same)
            assert notice.startswith(
                f"The first 12 tokens were computed by {card.fingerprint}, which is not loaded. {other}"
            )
            assert fingerprints(changed) == ((0, card.fingerprint), (12, other))
            again, notice = await continued(stage, changed)
            assert not notice
            assert fingerprints(again) == fingerprints(changed)


async def test_a_sibling_that_another_engine_starts_says_so(tmp_path: Path, tiny_model: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, tiny_model, FUSED) as stage:
            begun = await cut_short(stage)
        async with serving(store, tiny_model, OWN_CODE) as stage:
            other = (await stage.chat.model()).fingerprint
            fork = await stage.chat.fork_reply(begun.id, 4)
            received = [entry.event for entry in await read_entries(stage.chat, fork.id)]
            assert [event.notice != "" for event in received if isinstance(event, Started)] == [True]
            assert fingerprints(fork) == (*fingerprints(begun), (4, other))


async def test_an_orphan_is_continued_by_another_engine(tmp_path: Path, tiny_model: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, tiny_model, FUSED) as stage:
            conversation = await stage.chat.create_conversation()
            long = {"max_tokens": 400, "seed": 1, "temperature": 1.0}
            sent = await stage.chat.send_message(conversation.id, None, user("Hi"), parameters=long)
            async with stage.chat.events(sent.reply.id) as stream:
                async for entry in stream:
                    if entry.number:
                        break
            await stage.service.turns.park(leave=True)
        begun = len(store.replies.token_ids(sent.reply.id))
        async with serving(store, tiny_model, OWN_CODE, resume=True) as stage:
            await stage.service.recovered.wait()
            received = [entry.event for entry in await read_entries(stage.chat, sent.reply.id)]
            ((_, first), (start, second)) = fingerprints(await stage.chat.message(sent.reply.id))
            assert (first.split("/")[0], start, second.split("/")[0]) == ("fused", begun, "library")
            assert any(isinstance(event, Started) and event.notice for event in received)


async def test_an_old_reply_has_no_fingerprint_and_no_notice(tmp_path: Path, tiny_model: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, tiny_model, FUSED) as stage:
            begun = await cut_short(stage)
            with store.database.write_transaction() as connection:  # as it was stored before
                connection.exec_driver_sql("UPDATE replies SET settings = json_remove(settings, '$.fingerprints')")
            old = await stage.chat.message(begun.id)
            assert fingerprints(old) == ()
            later, notice = await continued(stage, old)
            assert not notice
            assert [start for start, _ in fingerprints(later)] == [6]


def test_replay_loads_the_engine_that_made_the_reply(tmp_path: Path, tiny_model: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [*map(str, arguments), "--data", str(tmp_path)], input="Hi\n")
        assert result.exit_code == 0, result.output
        return result.stdout

    run("chat", tiny_model, "--local", "--exact", "--no-compile", "--set", "max_tokens=6", "--set", "seed=1")
    with open_store(tmp_path) as store:
        owner = store.users.ensure()
        (conversation,) = store.conversations.list(owner.id)
    lines = run("replay", conversation.id).splitlines()
    assert lines[0].startswith("Generated by: fused/torch-")
    assert "/exact/" in lines[0]
    assert lines[1:] == ["Replayed by: the same", "Identical: 6 tokens"]


def test_fingerprints_are_written_and_read() -> None:
    one = Fingerprint("fused", "torch-2.13.0+cpu-AVX512", "cpu", "float32", "batched", "sampler-1")
    assert str(one) == "fused/torch-2.13.0+cpu-AVX512/cpu/float32/batched/sampler-1"
    assert Fingerprint.parse(str(one)) == one
    assert Fingerprint.parse("scripted") is None
    assert str(Fingerprint("a/b", "NVIDIA H200", *"cdef")).count("/") == 5


@pytest.mark.parametrize(
    ("before", "tokens", "after"),
    [
        ((), 0, ((0, "new"),)),
        ((), 7, ((7, "new"),)),
        (((0, "new"),), 7, ((0, "new"),)),
        (((0, "old"),), 7, ((0, "old"), (7, "new"))),
        (((0, "old"), (7, "other")), 7, ((0, "old"), (7, "new"))),
        (((0, "new"), (7, "other")), 5, ((0, "new"),)),
    ],
)
def test_which_engine_computed_which_tokens(
    before: tuple[tuple[int, str], ...], tokens: int, after: tuple[tuple[int, str], ...]
) -> None:
    settings = ReplySettings("model", Sampling(), fingerprints=before).continued_by("new", tokens)
    assert settings.fingerprints == after
    assert decode_settings("model", "", encode_settings(settings)) == settings
