"""The conformance suite of `Chat`, in-process and over HTTP. A module that imports these tests has the fixtures `stage`
(replies run to their end) and `held` (they wait after four tokens)."""

from __future__ import annotations

import asyncio

import pytest

from palaver.chat.interface import Column, ModelState
from palaver.errors import (
    BadParameter,
    ContextOverflow,
    EmptyMessage,
    NothingToContinue,
    UnsupportedContent,
)
from palaver.events import Finished, PhaseOpened, fold
from palaver.generation import Finish
from palaver.media import BadMedia
from palaver.messages import Audio, Image, Message, Role, Text, Thinking, assistant, tool, user
from palaver.phases import Phase
from palaver.store import Blob, Conflict, NotFound, ReplyStatus
from tests import media_files
from tests.chat.scripted_service import OTHER, WAVE, Stage, read_entries, read_until
from tests.scripted_engine import ScriptedEngine

THOUGHT, ANSWER = "think 👋", "Wave: 👋🏽 <think"


async def test_a_message_gets_a_reply_and_both_are_stored(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation(system="Be kind.")
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    received = await read_entries(chat, sent.reply.id)
    ending = received[-1].event
    assert isinstance(ending, Finished)
    assert ending.finish is Finish.END
    assert fold([entry.event for entry in received]).message == assistant(ANSWER, THOUGHT)
    question, answer = await chat.path(sent.reply.id)
    assert question.text == "Wave!"
    assert (answer.thinking, answer.text) == (THOUGHT, ANSWER)
    assert answer.reply is not None
    assert answer.reply.status is ReplyStatus.DONE
    assert answer.reply.usage == ending.usage
    assert answer.reply.settings.model == "scripted"
    assert answer.reply.timings["seconds"] > 0
    assert (await chat.conversation(conversation.id)).head_id == answer.id


async def test_a_subscriber_can_reconnect_at_every_number(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    complete = await read_entries(chat, sent.reply.id)
    numbered = [entry for entry in complete if not isinstance(entry.event, Finished) and entry.number]
    numbers = sorted({entry.number for entry in numbered})
    assert numbers == list(range(1, len(numbers) + 1))
    for number in range(len(numbers) + 1):
        rest = await read_entries(chat, sent.reply.id, number)
        received = [entry for entry in rest if entry.number > number and not isinstance(entry.event, Finished)]
        assert received == [entry for entry in numbered if entry.number > number and entry in received]
        assert [entry.number for entry in received] == list(range(number + 1, len(numbers) + 1))
        assert rest[-1] == complete[-1]


async def test_a_number_beyond_the_end_is_refused(stage: Stage) -> None:
    conversation = await stage.chat.create_conversation()
    sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(stage.chat, sent.reply.id)
    with pytest.raises(BadParameter, match="after"):
        await read_entries(stage.chat, sent.reply.id, 10_000)


async def test_a_number_beyond_a_running_turn_is_refused(held: Stage) -> None:
    conversation = await held.chat.create_conversation()
    sent = await held.chat.send_message(conversation.id, None, user("Wave!"))
    await read_until(held.chat, sent.reply.id, 2)
    with pytest.raises(BadParameter, match="after"):
        await read_entries(held.chat, sent.reply.id, 10_000)


async def test_a_stopped_reply_continues_without_a_seam(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    seen = await read_until(chat, sent.reply.id, 2)
    await chat.stop_reply(sent.reply.id)
    first = await read_entries(chat, sent.reply.id)
    ending = first[-1].event
    assert isinstance(ending, Finished)
    assert ending.finish is Finish.STOPPED
    stopped = await chat.message(sent.reply.id)
    assert stopped.reply is not None
    assert stopped.reply.status is ReplyStatus.STOPPED
    await chat.stop_reply(sent.reply.id)  # a turn that is over stays so
    held.hold.set()
    going = await chat.continue_reply(sent.reply.id)
    assert going.id == sent.reply.id
    complete = await read_entries(chat, sent.reply.id)
    assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)
    again = [entry for entry in complete if entry in seen]
    assert [entry for entry in seen if entry.number] == [entry for entry in again if entry.number]
    with pytest.raises(NothingToContinue):
        await chat.continue_reply(sent.reply.id)


async def test_subscribers_share_a_running_turn(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    readers = [asyncio.create_task(read_entries(chat, sent.reply.id)) for _ in range(5)]
    late = await read_until(chat, sent.reply.id, 2)
    held.hold.set()
    wholes = [await reader for reader in readers]
    rest = await read_entries(chat, sent.reply.id, late[-1].number)
    for complete in wholes:
        assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)
    joined = [entry.event for entry in late] + [entry.event for entry in rest]
    assert fold(joined).message == assistant(ANSWER, THOUGHT)


async def test_a_running_reply_accepts_no_message(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    with pytest.raises(Conflict, match="running"):
        await chat.send_message(conversation.id, sent.reply.id, user("And?"))
    held.hold.set()
    await read_entries(chat, sent.reply.id)


async def test_a_retry_is_a_sibling_and_branches_do_not_block_each_other(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation()
    first = await chat.send_message(conversation.id, None, user("Wave!"))
    second = await chat.start_reply(conversation.id, first.message.id)
    assert second.id != first.reply.id
    held.hold.set()
    await asyncio.gather(read_entries(chat, first.reply.id), read_entries(chat, second.id))
    siblings = await chat.siblings(second.id)
    assert {one.id for one in siblings} == {first.reply.id, second.id}
    assert {one.text for one in siblings} == {ANSWER, "Another answer."}
    seeds = {one.reply.settings.sampling.seed for one in siblings if one.reply}
    assert len(seeds) == 2


async def test_a_write_with_a_key_happens_once(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation(key="one")
    assert (await chat.create_conversation(key="one")).id == conversation.id
    first, second = await asyncio.gather(
        chat.send_message(conversation.id, None, user("Wave!"), key="k"),
        chat.send_message(conversation.id, None, user("Wave!"), key="k"),
    )
    assert (first.message.id, first.reply.id) == (second.message.id, second.reply.id)
    held.hold.set()
    await read_entries(chat, first.reply.id)
    third = await chat.send_message(conversation.id, None, user("Wave!"), key="k")
    assert third.reply.id == first.reply.id
    assert len(await chat.nodes(conversation.id)) == 2
    with pytest.raises(Conflict):
        await chat.send_message(conversation.id, None, user("Something else"), key="k")


async def test_an_edited_reply_continues_from_its_new_text(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    edited = await chat.edit_message(sent.reply.id, [Thinking(THOUGHT), Text("Wave: ")])
    assert edited.edit_of == sent.reply.id
    going = await chat.continue_reply(edited.id)
    assert going.id != edited.id
    assert going.parent_id == sent.message.id
    await read_entries(chat, going.id)
    done = await chat.message(going.id)
    assert done.text.startswith("Wave: ")
    assert done.thinking == THOUGHT


async def test_a_fork_starts_with_the_given_tokens(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    fork = await chat.fork_reply(sent.reply.id, 3)
    await read_entries(chat, fork.id)
    tokens = await chat.tokens(fork.id)
    assert [token.token_id for token in tokens] == WAVE
    assert "".join(token.text for token in tokens).startswith("<think>\n")
    first, anew = await chat.message(sent.reply.id), await chat.message(fork.id)
    assert first.reply is not None
    assert anew.reply is not None
    assert first.reply.settings.sampling.seed != anew.reply.settings.sampling.seed
    other = await chat.fork_reply(sent.reply.id, 3, OTHER[1])
    await read_entries(chat, other.id)
    made = await chat.tokens(other.id)
    assert [token.token_id for token in made[:4]] == [*WAVE[:3], OTHER[1]]
    assert made[3].logprob is None
    exact = await chat.message(other.id)
    assert exact.reply is not None
    assert exact.reply.settings == first.reply.settings
    assert (await chat.raw_text(sent.reply.id)).startswith("<think>\nthink 👋\n</think>")
    with pytest.raises(BadParameter, match="instead"):
        await chat.fork_reply(sent.reply.id, 1, 10**9)


async def test_a_fork_with_a_key_is_made_once(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    forks = [await chat.fork_reply(sent.reply.id, 3, key="this one") for _ in range(2)]
    assert forks[0].id == forks[1].id
    assert (await chat.fork_reply(sent.reply.id, 3, key="another")).id != forks[0].id
    await chat.append_message(conversation.id, None, user("Hello"), key="used")
    with pytest.raises(Conflict, match="another message"):
        await chat.fork_reply(forks[0].id, 1, key="used")


async def test_continuing_with_a_key_happens_once(held: Stage) -> None:
    """Also when the reply has ended again: who sends it twice gets what the first one led to."""
    chat = held.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"), parameters={"max_tokens": 2})
    assert (await read_entries(chat, sent.reply.id))[-1].event.finish is Finish.LENGTH  # type: ignore[union-attr]
    for _ in range(3):
        assert (await chat.continue_reply(sent.reply.id, key="more")).id == sent.reply.id
        await read_entries(chat, sent.reply.id)
        assert len(await chat.tokens(sent.reply.id)) == 4
    held.hold.set()
    await chat.continue_reply(sent.reply.id, key="still more")
    await read_entries(chat, sent.reply.id)
    assert len(await chat.tokens(sent.reply.id)) > 4
    edited = await chat.edit_message(sent.reply.id, (Text("Wave"),))
    beside = [await chat.continue_reply(edited.id, key="beside") for _ in range(2)]
    assert beside[0].id == beside[1].id != edited.id


async def test_every_client_has_its_own_cursor(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    await chat.move_cursor(conversation.id, "a", sent.reply.id)
    await chat.move_cursor(conversation.id, "a", sent.message.id)
    assert (await chat.undo(conversation.id, "a")).message_id == sent.reply.id
    assert (await chat.redo(conversation.id, "a")).message_id == sent.message.id
    assert (await chat.cursor(conversation.id, "b")).message_id == sent.message.id
    with pytest.raises(Conflict):
        await chat.redo(conversation.id, "a")


async def test_conversations_are_listed_updated_deleted_and_restored(stage: Stage) -> None:
    chat = stage.chat
    first = await chat.create_conversation(title="Trees", tags=["green"])
    second = await chat.create_conversation()
    await chat.append_message(second.id, None, user("About rivers, if you like"))
    assert [one.id for one in await chat.conversations()] == [second.id, first.id]
    assert [one.id for one in await chat.conversations(limit=1, before=second.id)] == [first.id]
    assert [one.id for one in await chat.conversations(tag="green")] == [first.id]
    assert [one.id for one in await chat.conversations(title="tree")] == [first.id]
    assert (await chat.conversation(second.id)).title.startswith("About rivers")
    changed = await chat.update_conversation(
        first.id, title="Woods", system="Be brief.", parameters={"temperature": 0.5, "stop": ["x"]}, tags=["wood"]
    )
    assert (changed.title, changed.system, changed.tags) == ("Woods", "Be brief.", ("wood",))
    assert changed.parameters == {"temperature": 0.5, "stop": ["x"]}
    assert await chat.tags() == ("wood",)
    await chat.delete_conversation(first.id)
    assert [one.id for one in await chat.conversations(deleted=True)] == [first.id]
    with pytest.raises(NotFound):
        await chat.conversation(first.id)
    assert (await chat.restore_conversation(first.id)).title == "Woods"
    assert [hit.conversation_id for hit in await chat.search("rivers")] == [second.id]
    assert await chat.newest_leaf(second.id) == (await chat.nodes(second.id))[-1].id


async def test_pinned_conversations_are_listed_apart(stage: Stage) -> None:
    chat = stage.chat
    first, second = await chat.create_conversation(title="One"), await chat.create_conversation(title="Two")
    assert (await chat.update_conversation(first.id, pinned=True)).pinned
    assert [one.id for one in await chat.conversations(pinned=True)] == [first.id]
    assert [one.id for one in await chat.conversations(pinned=False)] == [second.id]
    assert [one.id for one in await chat.conversations()] == [second.id, first.id]
    assert (await chat.update_conversation(first.id, title="Uno")).pinned
    assert not (await chat.update_conversation(first.id, pinned=False)).pinned


async def test_previews_are_the_beginning_of_every_message(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    asked = await chat.append_message(conversation.id, None, user("\n  About   rivers,\nif you like"))
    long = await chat.append_message(conversation.id, asked.id, user("word " * 1000))
    found = await chat.previews(conversation.id)
    assert found.keys() == {asked.id, long.id}
    assert found[asked.id] == "About rivers, if you like"
    assert found[long.id].startswith("word word")
    assert len(found[long.id]) <= 120


async def test_parameters_decide_the_reply_and_wrong_ones_are_refused(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation(parameters={"temperature": 0.5, "max_tokens": 4})
    sent = await chat.send_message(conversation.id, None, user("Wave!"), parameters={"seed": 7, "top_k": 3})
    received = await read_entries(chat, sent.reply.id)
    assert isinstance(received[-1].event, Finished)
    assert received[-1].event.finish is Finish.LENGTH
    done = await chat.message(sent.reply.id)
    assert done.reply is not None
    sampling = done.reply.settings.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.top_k) == (0.5, 4, 7, 3)
    await chat.continue_reply(sent.reply.id)
    await read_entries(chat, sent.reply.id)
    assert len(await chat.tokens(sent.reply.id)) == 8
    for wrong in ({"temperature": -1}, {"no_such": 1}, {"stop": [""]}, {"tools": [{"name": 3}]}):
        with pytest.raises(BadParameter):
            await chat.send_message(conversation.id, None, user("Wave!"), parameters=wrong)
        with pytest.raises(BadParameter):
            await chat.update_conversation(conversation.id, parameters=wrong)
    assert len(await chat.nodes(conversation.id)) == 2
    with pytest.raises(EmptyMessage):
        await chat.send_message(conversation.id, None, user(""))


async def test_a_full_context_is_refused_with_both_counts(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    with pytest.raises(ContextOverflow) as refused:
        await chat.send_message(conversation.id, None, user("word " * 5000))
    assert refused.value.limit == 4096
    assert refused.value.tokens > 4096
    assert await chat.nodes(conversation.id) == ()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    gauge = await chat.context_usage(conversation.id, sent.reply.id)
    assert 0 < gauge.used < gauge.limit == 4096


async def test_overflow_shorten_drops_the_oldest_turns(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation(parameters={"overflow": "shorten"})
    first = await chat.send_message(conversation.id, None, user("word " * 790))
    await read_entries(chat, first.reply.id)
    second = await chat.send_message(conversation.id, first.reply.id, user("more " * 100))
    await read_entries(chat, second.reply.id)
    done = await chat.message(second.reply.id)
    assert done.reply is not None
    assert done.reply.settings.options["dropped"] == 2
    assert len(await chat.path(second.reply.id)) == 4


async def test_the_model_card_and_loading_another_model(held: Stage) -> None:
    chat = held.chat
    card = await chat.wait_until_ready()
    assert (card.name, card.state, card.context_length) == ("scripted", ModelState.READY, 4096)
    assert card.thinks
    assert {switch.name for switch in card.switches} == {"enable_thinking"}
    assert await chat.models() == ("scripted",)
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_until(chat, sent.reply.id, 2)
    await chat.load_model("test/other")
    assert (await chat.wait_until_ready()).name == "test/other"
    running = await chat.message(sent.reply.id)
    assert running.reply is not None
    assert running.reply.status is ReplyStatus.RUNNING, "the turn of the other model goes on"
    held.hold.set()
    await read_entries(chat, sent.reply.id)
    assert (await chat.message(sent.reply.id)).text == ANSWER
    await chat.load_model("test/missing")
    kept = await chat.wait_until_ready()
    assert (kept.name, kept.state) == ("test/other", ModelState.READY)
    assert "'test/missing'" in kept.note
    assert kept.note.endswith("test/other is still in use.")
    assert await chat.model() == kept
    assert (await chat.unload_model()).state is ModelState.NONE


async def test_changes_are_published_to_subscribers(stage: Stage) -> None:
    chat = stage.chat
    async with chat.changes() as changes:
        conversation = await chat.create_conversation()
        sent = await chat.send_message(conversation.id, None, user("Wave!"))
        await read_entries(chat, sent.reply.id)
        received = []
        async for change in changes:
            received.append((change.what, change.message_id))
            if change.what == "ended":
                break
    assert received == [
        ("created", None),
        ("message", sent.message.id),
        ("turn", sent.reply.id),
        ("ended", sent.reply.id),
    ]


async def test_conversations_are_exported_and_imported(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation(title="Trip")
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    for form in ("jsonl", "branches", "tree", "markdown", "sharegpt"):
        text = await chat.export_conversation(conversation.id, form)
        assert "Wave" in text
    exported = await chat.export_conversation(conversation.id, "tree")
    report = await chat.import_conversations(exported.encode())
    (copy,) = report.conversations
    assert not report.skipped
    assert copy.id != conversation.id
    leaf = await chat.newest_leaf(copy.id)
    assert leaf is not None
    assert [one.text for one in await chat.path(leaf)] == ["Wave!", ANSWER]
    with pytest.raises(BadParameter, match="form"):
        await chat.export_conversation(conversation.id, "pdf")


async def test_blobs(stage: Stage) -> None:
    data = media_files.picture()
    blob = await stage.chat.put_blob(data, "red.png")
    assert blob == Blob("image", "image/png", blob.digest, len(data), "red.png", 8, 6)
    assert await stage.chat.blob(blob.digest) == data
    with pytest.raises(BadMedia, match=r"^a.exe is of a type that is not supported"):
        await stage.chat.put_blob(b"MZ\x90", "a.exe")
    with pytest.raises(NotFound):
        await stage.chat.blob("0" * 64)


async def test_media_are_described_by_their_bytes(stage: Stage) -> None:
    conversation = await stage.chat.create_conversation()
    sent = Message(Role.USER, (Text("Look!"), Audio("text/html", media_files.picture(), "red.png", 999, 999, 9.0)))
    stored = await stage.chat.append_message(conversation.id, None, sent)
    (text, blob) = stored.parts
    assert text == Text("Look!")
    assert isinstance(blob, Blob)
    assert (blob.kind, blob.media_type, blob.name, blob.width, blob.height, blob.seconds) == (
        *("image", "image/png", "red.png"),
        *(8, 6, 0.0),
    )
    with pytest.raises(BadMedia, match="is of a type that is not supported"):
        await stage.chat.append_message(conversation.id, None, Message(Role.USER, (Image("image/png", b"MZ"),)))
    with pytest.raises(BadMedia, match="is of a type that is not supported"):
        await stage.chat.edit_message(stored.id, (Image("image/png", b"MZ"),))
    exported = await stage.chat.export_conversation(conversation.id, "tree")
    assert '"name": "red.png"' in exported or '"name":"red.png"' in exported


async def test_documents_become_text(stage: Stage) -> None:
    assert await stage.chat.read_document(media_files.pdf("Page one"), "a.pdf") == "\n\nFile a.pdf:\n\nPage one\n\n"
    assert await stage.chat.read_document(b"a,b\n1,2\n", "a.csv") == "\n\nFile a.csv:\n\na,b\n1,2\n\n"
    with pytest.raises(BadMedia, match="is neither text in UTF-8 nor a PDF"):
        await stage.chat.read_document(b"\xff\xfe\0", "a.bin")


async def test_a_model_refuses_media_before_anything_is_stored(stage: Stage) -> None:
    conversation = await stage.chat.create_conversation()
    message = Message(Role.USER, (Text("Look!"), Image("image/png", media_files.picture())))
    with pytest.raises(UnsupportedContent, match="does not accept pictures: a vision model is needed for that"):
        await stage.chat.send_message(conversation.id, None, message)
    assert await stage.chat.nodes(conversation.id) == ()


async def test_a_tools_result_is_answered(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    result = await chat.append_message(conversation.id, sent.reply.id, tool("call_1", "done", "wave"))
    assert result.role is Role.TOOL
    answer = await chat.start_reply(conversation.id, result.id)
    await read_entries(chat, answer.id)
    assert len(await chat.path(answer.id)) == 4


async def test_unknown_ids_are_not_found(stage: Stage) -> None:
    chat = stage.chat
    for attempt in (
        chat.conversation("x"),
        chat.message("x"),
        chat.path("x"),
        chat.continue_reply("x"),
        chat.stop_reply("x"),
    ):
        with pytest.raises(NotFound):
            await attempt
    conversation = await chat.create_conversation()
    with pytest.raises(NotFound):
        await chat.send_message(conversation.id, "x", user("Wave!"))
    with pytest.raises(NotFound):
        await read_entries(chat, "x")


async def test_thinking_opens_before_anything_is_computed(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    seen = await read_until(chat, sent.reply.id, 2)
    assert PhaseOpened(Phase.THINKING) in [entry.event for entry in seen]
    held.hold.set()
    await read_entries(chat, sent.reply.id)


async def test_the_stop_string_is_reported(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation(parameters={"stop": ["zebra", "👋🏽"]})
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    ending = (await read_entries(chat, sent.reply.id))[-1].event
    assert isinstance(ending, Finished)
    assert (ending.finish, ending.stop) == (Finish.STOP_STRING, "👋🏽")
    assert (await chat.message(sent.reply.id)).text == "Wave: "


async def test_clearing_the_cache_keeps_the_conversation(stage: Stage) -> None:
    chat, engine = stage.chat, stage.service.models.engine()
    assert isinstance(engine, ScriptedEngine)
    conversation, other = await chat.create_conversation(), await chat.create_conversation()
    sent = await chat.send_message(conversation.id, None, user("Wave!"))
    await read_entries(chat, sent.reply.id)
    assert [call.prompt.conversation for call in engine.calls] == [conversation.id]
    await chat.clear_cache(conversation.id)
    await chat.delete_conversation(other.id)
    assert engine.forgotten == [conversation.id, other.id]
    assert [one.text for one in await chat.path(sent.reply.id)] == ["Wave!", ANSWER]
    with pytest.raises(NotFound):
        await chat.clear_cache("no-such-conversation")
    await chat.unload_model()
    await chat.clear_cache(conversation.id)  # nothing is loaded, so nothing is kept


async def test_presets_belong_to_a_user(stage: Stage) -> None:
    chat = stage.chat
    other = stage.service.chat((await asyncio.to_thread(stage.service.store.users.ensure, "somebody else")).id)
    assert await chat.presets() == ()
    made = await chat.save_preset("careful / 慎重", "", {"temperature": 0.2, "stop": ["END"]})
    await chat.save_preset("brief", "Be brief.", {})
    assert [one.name for one in await chat.presets()] == ["brief", "careful / 慎重"]
    assert (await chat.presets())[1] == made
    again = await chat.save_preset("brief", "Be very brief.", {"seed": 1})
    assert (await chat.presets())[0] == again
    assert await other.presets() == ()
    with pytest.raises(NotFound):
        await other.delete_preset("brief")
    await chat.delete_preset("brief")
    assert await chat.presets() == (made,)
    with pytest.raises(BadParameter):
        await chat.save_preset("wild", "", {"temperature": 99})
    with pytest.raises(BadParameter):
        await chat.save_preset("", "", {})


COOL, WARM = Column({"temperature": 0.0}), Column({"temperature": 1.5, "seed": 7}, name="warm")


async def test_a_message_is_compared_and_one_reply_is_chosen(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    async with chat.changes() as changes:
        comparison = await chat.compare(conversation.id, None, user("Wave!"), [COOL, WARM], key="once")
        again = await chat.compare(conversation.id, None, user("Wave!"), [COOL, WARM], key="once")
        told = [await anext(changes)]
        while told[-1].what != "comparison":
            told.append(await anext(changes))
    assert again == comparison
    assert [one.name for one in comparison.replies] == ["scripted · temperature 0", "warm"]
    assert [one.model for one in comparison.replies] == ["scripted", "scripted"]
    assert (comparison.decided_at, comparison.chosen_id, comparison.blind) == (None, None, False)
    first, second = [one.reply_id for one in comparison.replies]
    for id in (first, second):
        assert isinstance((await read_entries(chat, id))[-1].event, Finished)
    siblings = await chat.siblings(first)
    assert {one.id for one in siblings} == {first, second}
    assert {one.parent_id for one in siblings} == {comparison.parent_id}
    assert (await chat.message(comparison.parent_id)).text == "Wave!"
    sampling = [one.reply.settings.sampling for one in siblings if one.reply]
    assert {one.temperature for one in sampling} == {0.0, 1.5}
    chosen = await chat.choose_reply(comparison.id, second)
    assert chosen.chosen_id == second
    assert chosen.decided_at is not None
    assert (await chat.conversation(conversation.id)).head_id == second
    assert await chat.comparisons(conversation.id) == (chosen,)
    assert await chat.comparison(comparison.id) == chosen
    rows = {row.name: (row.compared, row.chosen, row.blind_compared) for row in await chat.tally()}
    assert rows == {"warm": (1, 1, 0), "scripted · temperature 0": (1, 0, 0)}
    assert (await chat.choose_reply(comparison.id, first)).chosen_id == first
    assert (await chat.conversation(conversation.id)).head_id == first


async def test_a_blind_comparison_hides_names_until_the_choice(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    orders = set()
    for number in range(12):
        comparison = await chat.compare(
            conversation.id, None, user("Wave!"), [COOL, WARM], blind=True, key=f"blind {number}"
        )
        assert [(one.name, one.model, dict(one.parameters)) for one in comparison.replies] == [("", "", {})] * 2
        assert await chat.comparison(comparison.id) == comparison
        assert (await chat.comparisons(conversation.id))[-1] == comparison
        choice = None if number % 2 else comparison.replies[0].reply_id
        revealed = await chat.choose_reply(comparison.id, choice)
        orders.add(tuple(one.name for one in revealed.replies))
        assert {one.name for one in revealed.replies} == {"scripted · temperature 0", "warm"}
        for one in revealed.replies:
            reply = (await chat.message(one.reply_id)).reply
            assert reply is not None
            assert reply.settings.sampling.temperature == one.parameters["temperature"]
    assert len(orders) == 2
    rows = await chat.tally()
    assert sum(row.blind_chosen for row in rows) == 6
    assert [row.blind_compared for row in rows] == [12, 12]


async def test_a_reply_of_a_comparison_is_stopped_and_continued(held: Stage) -> None:
    chat = held.chat
    conversation = await chat.create_conversation()
    sent = await chat.append_message(conversation.id, None, user("Wave!"))
    comparison = await chat.compare(conversation.id, sent.id, None, [COOL, WARM])
    assert comparison.parent_id == sent.id
    one, other = [reply.reply_id for reply in comparison.replies]
    await read_until(chat, one, 2)
    await chat.stop_reply(one)
    await read_entries(chat, one)
    held.hold.set()
    await read_entries(chat, other)
    statuses = [(await chat.message(id)).reply for id in (one, other)]
    assert [reply.status for reply in statuses if reply] == [ReplyStatus.STOPPED, ReplyStatus.DONE]
    assert (await chat.export_preferences()).text == ""
    await chat.choose_reply(comparison.id, other)
    assert (await chat.export_preferences()).skipped == 1  # one reply is incomplete
    assert (await chat.continue_reply(one)).id == one
    await read_entries(chat, one)
    file = await chat.export_preferences(conversation.id)
    assert (file.pairs, file.skipped) == (1, 0)
    assert await chat.tokens(one)


async def test_bad_comparisons_change_nothing(stage: Stage) -> None:
    chat = stage.chat
    conversation = await chat.create_conversation()
    for columns, part in (
        ([COOL], "2 to 8"),
        ([COOL] * 9, "2 to 8"),
        ([COOL, Column({"temperature": -1})], "temperature"),
        ([COOL, Column({"nothing": 1})], "nothing"),
        ([COOL, Column(name="a\nb")], "control characters"),
    ):
        with pytest.raises(BadParameter, match=part):
            await chat.compare(conversation.id, None, user("Wave!"), columns)
    with pytest.raises(BadParameter, match="message"):
        await chat.compare(conversation.id, None, None, [COOL, WARM])
    assert await chat.nodes(conversation.id) == ()
    assert await chat.comparisons(conversation.id) == ()
    comparison = await chat.compare(conversation.id, None, user("Wave!"), [COOL, WARM])
    for id in (comparison.parent_id, "0000000000000000"):
        with pytest.raises(Conflict):
            await chat.choose_reply(comparison.id, id)
    with pytest.raises(NotFound):
        await chat.choose_reply("0000000000000000", None)
    await chat.delete_conversation(conversation.id)
    with pytest.raises(NotFound):
        await chat.comparison(comparison.id)
