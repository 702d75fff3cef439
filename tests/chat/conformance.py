"""What every Chat does, in-process and over HTTP. A module that imports these tests gives the fixtures `stage`
(replies run to their end) and `held` (they wait after four tokens)."""

from __future__ import annotations

import asyncio

import pytest

from palaver.chat.interface import ModelState
from palaver.errors import BadParameter, ContextOverflow, EmptyMessage, NothingToContinue, UnknownModel
from palaver.events import Finished, PhaseOpened, fold
from palaver.generation import Finish
from palaver.messages import Role, Text, Thinking, assistant, tool, user
from palaver.phases import Phase
from palaver.store import Conflict, NotFound, ReplyStatus
from tests.chat.making import OTHER, WAVE, Stage, entries, until
from tests.scripted_engine import ScriptedEngine

THOUGHT, ANSWER = "think 👋", "Wave: 👋🏽 <think"


async def test_a_message_is_answered_and_all_of_it_is_kept(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create(system="Be kind.")
    said = await chat.say(talk.id, None, user("Wave!"))
    told = await entries(chat, said.reply.id)
    ending = told[-1].event
    assert isinstance(ending, Finished)
    assert ending.finish is Finish.END
    assert fold([entry.event for entry in told]).message == assistant(ANSWER, THOUGHT)
    question, answer = await chat.path(said.reply.id)
    assert question.text == "Wave!"
    assert (answer.thinking, answer.text) == (THOUGHT, ANSWER)
    assert answer.reply is not None
    assert answer.reply.status is ReplyStatus.DONE
    assert answer.reply.usage == ending.usage
    assert answer.reply.settings.model == "scripted"
    assert answer.reply.timings["seconds"] > 0
    assert (await chat.conversation(talk.id)).head_id == answer.id


async def test_every_number_is_a_place_to_come_back_to(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    whole = await entries(chat, said.reply.id)
    numbered = [entry for entry in whole if not isinstance(entry.event, Finished) and entry.number]
    numbers = sorted({entry.number for entry in numbered})
    assert numbers == list(range(1, len(numbers) + 1))
    for number in range(len(numbers) + 1):
        rest = await entries(chat, said.reply.id, number)
        told = [entry for entry in rest if entry.number > number and not isinstance(entry.event, Finished)]
        assert told == [entry for entry in numbered if entry.number > number and entry in told]
        assert [entry.number for entry in told] == list(range(number + 1, len(numbers) + 1))
        assert rest[-1] == whole[-1]


async def test_a_reader_beyond_the_end_is_refused(stage: Stage) -> None:
    talk = await stage.chat.create()
    said = await stage.chat.say(talk.id, None, user("Wave!"))
    await entries(stage.chat, said.reply.id)
    with pytest.raises(BadParameter, match="after"):
        await entries(stage.chat, said.reply.id, 10_000)


async def test_a_reader_ahead_of_a_running_turn_is_refused(held: Stage) -> None:
    talk = await held.chat.create()
    said = await held.chat.say(talk.id, None, user("Wave!"))
    await until(held.chat, said.reply.id, 2)
    with pytest.raises(BadParameter, match="after"):
        await entries(held.chat, said.reply.id, 10_000)


async def test_stop_keeps_and_go_on_leaves_no_seam(held: Stage) -> None:
    chat = held.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    seen = await until(chat, said.reply.id, 2)
    await chat.stop(said.reply.id)
    first = await entries(chat, said.reply.id)
    ending = first[-1].event
    assert isinstance(ending, Finished)
    assert ending.finish is Finish.STOPPED
    stopped = await chat.message(said.reply.id)
    assert stopped.reply is not None
    assert stopped.reply.status is ReplyStatus.STOPPED
    await chat.stop(said.reply.id)  # a turn that is over stays so
    held.hold.set()
    going = await chat.go_on(said.reply.id)
    assert going.id == said.reply.id
    whole = await entries(chat, said.reply.id)
    assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)
    again = [entry for entry in whole if entry in seen]
    assert [entry for entry in seen if entry.number] == [entry for entry in again if entry.number]
    with pytest.raises(NothingToContinue):
        await chat.go_on(said.reply.id)


async def test_readers_share_a_running_turn(held: Stage) -> None:
    chat = held.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    readers = [asyncio.create_task(entries(chat, said.reply.id)) for _ in range(5)]
    late = await until(chat, said.reply.id, 2)
    held.hold.set()
    wholes = [await reader for reader in readers]
    rest = await entries(chat, said.reply.id, late[-1].number)
    for whole in wholes:
        assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)
    joined = [entry.event for entry in late] + [entry.event for entry in rest]
    assert fold(joined).message == assistant(ANSWER, THOUGHT)


async def test_nothing_is_said_to_a_running_reply(held: Stage) -> None:
    chat = held.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    with pytest.raises(Conflict, match="running"):
        await chat.say(talk.id, said.reply.id, user("And?"))
    held.hold.set()
    await entries(chat, said.reply.id)


async def test_a_retry_is_a_sibling_and_branches_do_not_block_each_other(held: Stage) -> None:
    chat = held.chat
    talk = await chat.create()
    first = await chat.say(talk.id, None, user("Wave!"))
    second = await chat.reply(talk.id, first.message.id)
    assert second.id != first.reply.id
    held.hold.set()
    await asyncio.gather(entries(chat, first.reply.id), entries(chat, second.id))
    siblings = await chat.siblings(second.id)
    assert {one.id for one in siblings} == {first.reply.id, second.id}
    assert {one.text for one in siblings} == {ANSWER, "Another answer."}
    seeds = {one.reply.settings.sampling.seed for one in siblings if one.reply}
    assert len(seeds) == 2


async def test_a_key_makes_a_write_happen_once(held: Stage) -> None:
    chat = held.chat
    talk = await chat.create(key="one")
    assert (await chat.create(key="one")).id == talk.id
    first, second = await asyncio.gather(
        chat.say(talk.id, None, user("Wave!"), key="k"), chat.say(talk.id, None, user("Wave!"), key="k")
    )
    assert (first.message.id, first.reply.id) == (second.message.id, second.reply.id)
    held.hold.set()
    await entries(chat, first.reply.id)
    third = await chat.say(talk.id, None, user("Wave!"), key="k")
    assert third.reply.id == first.reply.id
    assert len(await chat.nodes(talk.id)) == 2
    with pytest.raises(Conflict):
        await chat.say(talk.id, None, user("Something else"), key="k")


async def test_an_edited_reply_goes_on_from_its_new_words(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    edited = await chat.edit(said.reply.id, [Thinking(THOUGHT), Text("Wave: ")])
    assert edited.edit_of == said.reply.id
    going = await chat.go_on(edited.id)
    assert going.id != edited.id
    assert going.parent_id == said.message.id
    await entries(chat, going.id)
    done = await chat.message(going.id)
    assert done.text.startswith("Wave: ")
    assert done.thinking == THOUGHT


async def test_a_fork_begins_with_the_tokens_it_is_told(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    fork = await chat.fork(said.reply.id, 3)
    await entries(chat, fork.id)
    tokens = await chat.tokens(fork.id)
    assert [token.token_id for token in tokens] == WAVE
    assert "".join(token.text for token in tokens).startswith("<think>\n")
    first, anew = await chat.message(said.reply.id), await chat.message(fork.id)
    assert first.reply is not None
    assert anew.reply is not None
    assert first.reply.settings.sampling.seed != anew.reply.settings.sampling.seed
    other = await chat.fork(said.reply.id, 3, OTHER[1])
    await entries(chat, other.id)
    made = await chat.tokens(other.id)
    assert [token.token_id for token in made[:4]] == [*WAVE[:3], OTHER[1]]
    assert made[3].logprob is None
    exact = await chat.message(other.id)
    assert exact.reply is not None
    assert exact.reply.settings == first.reply.settings
    assert (await chat.raw(said.reply.id)).startswith("<think>\nthink 👋\n</think>")
    with pytest.raises(BadParameter, match="instead"):
        await chat.fork(said.reply.id, 1, 10**9)


async def test_a_fork_with_a_key_is_made_once(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    forks = [await chat.fork(said.reply.id, 3, key="this one") for _ in range(2)]
    assert forks[0].id == forks[1].id
    assert (await chat.fork(said.reply.id, 3, key="another")).id != forks[0].id
    await chat.append(talk.id, None, user("Hello"), key="used")
    with pytest.raises(Conflict, match="another message"):
        await chat.fork(forks[0].id, 1, key="used")


async def test_going_on_with_a_key_happens_once(held: Stage) -> None:
    """Also when the reply has ended again: who sends it twice gets what the first one led to."""
    chat = held.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"), parameters={"max_tokens": 2})
    assert (await entries(chat, said.reply.id))[-1].event.finish is Finish.LENGTH  # type: ignore[union-attr]
    for _ in range(3):
        assert (await chat.go_on(said.reply.id, key="more")).id == said.reply.id
        await entries(chat, said.reply.id)
        assert len(await chat.tokens(said.reply.id)) == 4
    held.hold.set()
    await chat.go_on(said.reply.id, key="still more")
    await entries(chat, said.reply.id)
    assert len(await chat.tokens(said.reply.id)) > 4
    edited = await chat.edit(said.reply.id, (Text("Wave"),))
    beside = [await chat.go_on(edited.id, key="beside") for _ in range(2)]
    assert beside[0].id == beside[1].id != edited.id


async def test_the_cursor_is_the_clients(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    await chat.move(talk.id, "a", said.reply.id)
    await chat.move(talk.id, "a", said.message.id)
    assert (await chat.undo(talk.id, "a")).message_id == said.reply.id
    assert (await chat.redo(talk.id, "a")).message_id == said.message.id
    assert (await chat.cursor(talk.id, "b")).message_id == said.message.id
    with pytest.raises(Conflict):
        await chat.redo(talk.id, "a")


async def test_conversations_are_listed_changed_deleted_and_brought_back(stage: Stage) -> None:
    chat = stage.chat
    first = await chat.create(title="Trees", tags=["green"])
    second = await chat.create()
    await chat.append(second.id, None, user("About rivers, if you like"))
    assert [one.id for one in await chat.conversations()] == [second.id, first.id]
    assert [one.id for one in await chat.conversations(limit=1, before=second.id)] == [first.id]
    assert [one.id for one in await chat.conversations(tag="green")] == [first.id]
    assert [one.id for one in await chat.conversations(title="tree")] == [first.id]
    assert (await chat.conversation(second.id)).title.startswith("About rivers")
    changed = await chat.change(
        first.id, title="Woods", system="Be brief.", parameters={"temperature": 0.5, "stop": ["x"]}, tags=["wood"]
    )
    assert (changed.title, changed.system, changed.tags) == ("Woods", "Be brief.", ("wood",))
    assert changed.parameters == {"temperature": 0.5, "stop": ["x"]}
    assert await chat.tags() == ("wood",)
    await chat.delete(first.id)
    assert [one.id for one in await chat.conversations(deleted=True)] == [first.id]
    with pytest.raises(NotFound):
        await chat.conversation(first.id)
    assert (await chat.undelete(first.id)).title == "Woods"
    assert [hit.conversation_id for hit in await chat.search("rivers")] == [second.id]
    assert await chat.newest_leaf(second.id) == (await chat.nodes(second.id))[-1].id


async def test_parameters_decide_the_reply_and_wrong_ones_are_refused(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create(parameters={"temperature": 0.5, "max_tokens": 4})
    said = await chat.say(talk.id, None, user("Wave!"), parameters={"seed": 7, "top_k": 3})
    told = await entries(chat, said.reply.id)
    assert isinstance(told[-1].event, Finished)
    assert told[-1].event.finish is Finish.LENGTH
    done = await chat.message(said.reply.id)
    assert done.reply is not None
    sampling = done.reply.settings.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.top_k) == (0.5, 4, 7, 3)
    await chat.go_on(said.reply.id)
    await entries(chat, said.reply.id)
    assert len(await chat.tokens(said.reply.id)) == 8
    for wrong in ({"temperature": -1}, {"no_such": 1}, {"stop": [""]}, {"tools": [{"name": 3}]}):
        with pytest.raises(BadParameter):
            await chat.say(talk.id, None, user("Wave!"), parameters=wrong)
        with pytest.raises(BadParameter):
            await chat.change(talk.id, parameters=wrong)
    assert len(await chat.nodes(talk.id)) == 2
    with pytest.raises(EmptyMessage):
        await chat.say(talk.id, None, user(""))


async def test_what_does_not_fit_is_refused_with_both_counts(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    with pytest.raises(ContextOverflow) as refused:
        await chat.say(talk.id, None, user("word " * 5000))
    assert refused.value.limit == 4096
    assert refused.value.tokens > 4096
    assert await chat.nodes(talk.id) == ()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    gauge = await chat.gauge(talk.id, said.reply.id)
    assert 0 < gauge.used < gauge.limit == 4096


async def test_the_oldest_turns_are_dropped_where_that_is_wanted(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create(parameters={"overflow": "shorten"})
    first = await chat.say(talk.id, None, user("word " * 790))
    await entries(chat, first.reply.id)
    second = await chat.say(talk.id, first.reply.id, user("more " * 100))
    await entries(chat, second.reply.id)
    done = await chat.message(second.reply.id)
    assert done.reply is not None
    assert done.reply.settings.options["dropped"] == 2
    assert len(await chat.path(second.reply.id)) == 4


async def test_the_model_is_told_and_another_one_takes_its_place(held: Stage) -> None:
    chat = held.chat
    card = await chat.ready()
    assert (card.name, card.state, card.context_length) == ("scripted", ModelState.READY, 4096)
    assert card.thinks
    assert {switch.name for switch in card.switches} == {"enable_thinking"}
    assert await chat.models() == ("scripted",)
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await until(chat, said.reply.id, 2)
    await chat.load("test/other")
    assert (await chat.ready()).name == "test/other"
    parked = await chat.message(said.reply.id)
    assert parked.reply is not None
    assert parked.reply.status is ReplyStatus.INTERRUPTED
    held.hold.set()
    await chat.go_on(said.reply.id)
    await entries(chat, said.reply.id)
    assert (await chat.message(said.reply.id)).text == ANSWER
    await chat.load("test/missing")
    with pytest.raises(UnknownModel):
        await chat.ready()
    assert (await chat.model()).state is ModelState.FAILED
    assert (await chat.unload()).state is ModelState.NONE


async def test_changes_are_told_to_whoever_listens(stage: Stage) -> None:
    chat = stage.chat
    async with chat.changes() as changes:
        talk = await chat.create()
        said = await chat.say(talk.id, None, user("Wave!"))
        await entries(chat, said.reply.id)
        told = []
        async for change in changes:
            told.append((change.what, change.message_id))
            if change.what == "ended":
                break
    assert told == [
        ("created", None),
        ("message", said.message.id),
        ("turn", said.reply.id),
        ("ended", said.reply.id),
    ]


async def test_conversations_go_out_and_come_in(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create(title="Trip")
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    for form in ("jsonl", "branches", "tree", "markdown", "sharegpt"):
        text = await chat.export(talk.id, form)
        assert "Wave" in text
    (copy,) = await chat.take_in(await chat.export(talk.id, "tree"))
    assert copy.id != talk.id
    leaf = await chat.newest_leaf(copy.id)
    assert leaf is not None
    assert [one.text for one in await chat.path(leaf)] == ["Wave!", ANSWER]
    with pytest.raises(BadParameter, match="form"):
        await chat.export(talk.id, "pdf")


async def test_blobs(stage: Stage) -> None:
    digest = await stage.chat.put_blob(b"\x89PNG")
    assert await stage.chat.blob(digest) == b"\x89PNG"
    with pytest.raises(NotFound):
        await stage.chat.blob("0" * 64)


async def test_a_tools_result_is_answered(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    result = await chat.append(talk.id, said.reply.id, tool("call_1", "done", "wave"))
    assert result.role is Role.TOOL
    answer = await chat.reply(talk.id, result.id)
    await entries(chat, answer.id)
    assert len(await chat.path(answer.id)) == 4


async def test_what_is_not_there_is_not_found(stage: Stage) -> None:
    chat = stage.chat
    for attempt in (chat.conversation("x"), chat.message("x"), chat.path("x"), chat.go_on("x"), chat.stop("x")):
        with pytest.raises(NotFound):
            await attempt
    talk = await chat.create()
    with pytest.raises(NotFound):
        await chat.say(talk.id, "x", user("Wave!"))
    with pytest.raises(NotFound):
        await entries(chat, "x")


async def test_thinking_opens_before_anything_is_computed(held: Stage) -> None:
    chat = held.chat
    talk = await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    seen = await until(chat, said.reply.id, 2)
    assert PhaseOpened(Phase.THINKING) in [entry.event for entry in seen]
    held.hold.set()
    await entries(chat, said.reply.id)


async def test_which_stop_string_was_met_is_told(stage: Stage) -> None:
    chat = stage.chat
    talk = await chat.create(parameters={"stop": ["zebra", "👋🏽"]})
    said = await chat.say(talk.id, None, user("Wave!"))
    ending = (await entries(chat, said.reply.id))[-1].event
    assert isinstance(ending, Finished)
    assert (ending.finish, ending.stop) == (Finish.STOP_STRING, "👋🏽")
    assert (await chat.message(said.reply.id)).text == "Wave: "


async def test_a_conversation_is_forgotten_by_the_model_and_kept_by_the_store(stage: Stage) -> None:
    chat, engine = stage.chat, stage.service.models.current().engine
    assert isinstance(engine, ScriptedEngine)
    talk, other = await chat.create(), await chat.create()
    said = await chat.say(talk.id, None, user("Wave!"))
    await entries(chat, said.reply.id)
    assert [call.prompt.conversation for call in engine.calls] == [talk.id]
    await chat.forget(talk.id)
    await chat.delete(other.id)
    assert engine.forgotten == [talk.id, other.id]
    assert [one.text for one in await chat.path(said.reply.id)] == ["Wave!", ANSWER]
    with pytest.raises(NotFound):
        await chat.forget("no-such-conversation")
    await chat.unload()
    await chat.forget(talk.id)  # nothing is loaded, so nothing is kept


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
