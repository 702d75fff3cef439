"""A reply that heals the seam of a partial reply is stopped, continued and replayed between the bytes of the seam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from palaver.chat.continuation import replay
from palaver.chat.local_chat import LocalChat
from palaver.chat.reply_request import PartialReply
from palaver.engines.torch import EngineOptions
from palaver.messages import assistant, user
from palaver.models.resolver import resolve_folder
from palaver.store import StoredMessage, open_store
from tests.chat.scripted_service import Stage, read_entries
from tests.chat.test_fingerprints import serving

BEGINNING = "You can contin"
OPTIONS = EngineOptions(compiled=False)


def letters_only(vocabulary: tuple[bytes, ...], healing: bytes) -> list[int]:
    """The tokens to ban, so that the bytes are written letter by letter."""
    ends = [healing[at:] for at in range(len(healing))]
    return [
        token_id
        for token_id, data in enumerate(vocabulary)
        if len(data) > 1 and any(end.startswith(data) or data.startswith(end) for end in ends)
    ]


async def start(stage: Stage, **parameters: Any) -> StoredMessage:
    conversation = await stage.chat.create_conversation()
    chosen = {"healing": True, "thinking": False, "seed": 3, **parameters}
    partial = PartialReply(assistant(BEGINNING))
    assert isinstance(stage.chat, LocalChat)
    started = await stage.chat.start_replies(conversation, None, (user("Hi"),), (chosen,), partial=partial)
    await read_entries(stage.chat, started.replies[0].id)
    return await stage.chat.message(started.replies[0].id)


async def test_a_stop_between_the_bytes_of_a_seam_leaves_no_trace(tmp_path: Path) -> None:
    folder = resolve_folder("sprout")
    with open_store(tmp_path) as store:
        async with serving(store, folder, OPTIONS) as stage:
            model = stage.service.models.current()
            opened = await start(stage, max_tokens=1)
            assert opened.reply is not None
            options = opened.reply.settings.options
            healing, position = bytes.fromhex(options["healing_bytes"]), options["healing_at"]
            assert len(healing) >= 3
            banned = letters_only(tuple(model.vocabulary), healing)
            whole = await start(stage, max_tokens=12, banned_ids=banned)
            wanted = store.replies.token_ids(whole.id)
            said = b"".join(model.vocabulary[token_id] for token_id in wanted)
            assert said.startswith(BEGINNING.encode())
            assert all(len(model.vocabulary[token_id]) == 1 for token_id in wanted[position : position + 2])
            cut = await start(stage, max_tokens=1, banned_ids=banned)
        async with serving(store, folder, OPTIONS) as stage:  # another process goes on, from what is stored
            while len(store.replies.token_ids(cut.id)) < len(wanted):
                await stage.chat.continue_reply(cut.id)
                await read_entries(stage.chat, cut.id)
            assert store.replies.token_ids(cut.id)[: len(wanted)] == wanted
            assert (await replay(store, stage.service.models.current(), whole.id)).same
            fork = await stage.chat.fork_reply(whole.id, position, instead=wanted[position])
            assert fork.reply is not None
            assert "healing_bytes" not in fork.reply.settings.options
