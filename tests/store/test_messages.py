from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from palaver.errors import BadParameter, EmptyMessage
from palaver.messages import Audio, Image, Message, Role, Text, Thinking, ToolCall, ToolResult, Video, assistant, user
from palaver.store import Conflict, NotFound, Store, merge_user_messages, prompt_messages
from tests.store.conftest import StoreLocation
from tests.store.factories import add_message, new_conversation

EVERY_PART = Message(
    Role.ASSISTANT,
    (
        Thinking("hm"),
        Thinking(""),
        Text("one\x00two \ud800 東京 🎉"),
        ToolCall("c1", "look", '{"a":'),
        ToolCall("c2", "look", "", in_thought=True),
        ToolResult("c1", "found", "look"),
        Image("image/png", b"\x89PNG"),
        Audio("audio/wav", b"RIFF"),
        Video("video/mp4", b""),
    ),
)


def test_every_kind_of_part_round_trips(store: Store, place: StoreLocation) -> None:
    stored = store.messages.append(new_conversation(store).id, None, EVERY_PART)
    with place.open() as again:
        assert again.messages.load(again.messages.get(stored.id)) == EVERY_PART


def test_a_path_leads_from_the_root_to_the_leaf(store: Store) -> None:
    id = new_conversation(store).id
    first = add_message(store, id, None, "1")
    second = add_message(store, id, first.id, "2")
    other = add_message(store, id, first.id, "2b")
    third = add_message(store, id, second.id, "3")
    assert [message.text for message in store.messages.path(third.id)] == ["1", "2", "3"]
    assert [message.id for message in store.messages.siblings(other.id)] == [second.id, other.id]
    assert store.messages.newest_leaf(id) == third.id
    assert store.messages.newest_leaf(id, other.id) == other.id
    assert [node.id for node in store.messages.nodes(id)] == [first.id, second.id, other.id, third.id]


def test_an_edit_is_a_sibling_and_the_old_message_stays(store: Store) -> None:
    id = new_conversation(store).id
    question = add_message(store, id, None, "how?")
    reply = store.messages.append(id, question.id, assistant("so", thinking="hm"))
    better = store.messages.edit(reply.id, (Thinking("hm"), Text("so, and")))
    assert (better.parent_id, better.role, better.edit_of) == (question.id, Role.ASSISTANT, reply.id)
    assert store.messages.get(reply.id).text == "so"
    assert store.conversations.get(id).head_id == better.id


def test_the_same_key_gives_the_same_message_even_at_once(store: Store) -> None:
    id = new_conversation(store).id
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: store.messages.append(id, None, user("once"), key="k").id, range(16)))
    assert len(found) == 1
    assert len(store.messages.nodes(id)) == 1


def test_a_key_used_for_something_else_is_a_conflict(store: Store) -> None:
    id = new_conversation(store).id
    store.messages.append(id, None, user("once"), key="k")
    with pytest.raises(Conflict, match="'k'"):
        store.messages.append(id, None, user("twice"), key="k")


def test_many_writers_under_one_parent_make_siblings(store: Store) -> None:
    id = new_conversation(store).id
    root = add_message(store, id, None, "root")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_message(store, id, root.id, str(number)), range(32)))
    assert sorted(int(m.text) for m in store.messages.all(id) if m.parent_id == root.id) == list(range(32))


def test_a_parent_must_be_in_the_same_conversation(store: Store) -> None:
    here, there = new_conversation(store).id, new_conversation(store).id
    elsewhere = add_message(store, there, None, "x")
    with pytest.raises(NotFound):
        add_message(store, here, elsewhere.id, "y")
    with pytest.raises(NotFound):
        add_message(store, here, "nowhere", "y")
    with pytest.raises(NotFound):
        add_message(store, "nowhere", None, "y")
    assert store.messages.nodes(here) == ()


def test_invalid_messages_are_refused(store: Store) -> None:
    id = new_conversation(store).id
    with pytest.raises(EmptyMessage):
        store.messages.append(id, None, Message(Role.USER, ()))
    with pytest.raises(BadParameter):
        store.messages.append(id, None, user("x"), key="a\x00b")


def test_the_head_follows_only_where_it_was_expected(store: Store) -> None:
    id = new_conversation(store).id
    first = add_message(store, id, None, "1")
    second = add_message(store, id, first.id, "2")
    add_message(store, id, first.id, "2b")
    assert store.conversations.get(id).head_id == second.id
    store.conversations.move_head(id, second.id, first.id)
    with pytest.raises(Conflict):
        store.conversations.move_head(id, second.id, None)
    with pytest.raises(NotFound):
        store.conversations.move_head(id, first.id, "nowhere")


def test_consecutive_user_messages_are_merged_in_the_prompt(store: Store) -> None:
    picture = Image("image/png", b"1")
    row = [user("a"), user("b"), Message(Role.USER, (picture,)), assistant("c"), user("d")]
    whole = Message(Role.USER, (Text("a\n\nb"), picture))
    assert merge_user_messages(row) == (whole, assistant("c"), user("d"))
    assert [message.role for message in prompt_messages("be kind", row)] == ["system", "user", "assistant", "user"]
    assert prompt_messages("", [user("a")]) == (user("a"),)
