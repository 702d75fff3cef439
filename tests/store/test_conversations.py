from __future__ import annotations

import pytest
from sqlalchemy import func, select

from palaver.messages import Image, Message, Part, Role, Text, user
from palaver.store import NotFound, Store
from palaver.store.messages import NewMessage
from palaver.store.titles import derive_title
from tests.store.factories import add_message, new_conversation


def test_a_conversation_keeps_what_it_was_given(store: Store, owner: str) -> None:
    made = store.conversations.create(
        owner, title="  A\n title ", system="be\x00kind", parameters={"temperature": 0.1}, tags=["b", "a", "b"]
    )
    assert (made.title, made.system, made.tags) == ("A title", "be\x00kind", ("a", "b"))
    assert made.parameters == {"temperature": 0.1}
    changed = store.conversations.set_tags(made.id, ["c"])
    assert changed.tags == ("c",)
    assert store.conversations.set_system(made.id, "").system == ""
    assert store.conversations.set_parameters(made.id, {"seed": 1}).parameters == {"seed": 1}
    assert store.conversations.tags(owner) == ("c",)


def test_the_title_is_derived_from_the_first_message_unless_given(store: Store) -> None:
    untitled, titled = new_conversation(store), new_conversation(store, title="Mine")
    for made in (untitled, titled):
        add_message(store, made.id, None, "\n## How do I\nboil an egg?")
        add_message(store, made.id, None, "Something else")
    assert store.conversations.get(untitled.id).title == "How do I"
    assert store.conversations.get(titled.id).title == "Mine"
    assert store.conversations.rename(titled.id, "made up", given=False).title == "Mine"
    assert store.conversations.rename(untitled.id, "made up", given=False).title == "made up"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("word " * 30, "word word word word word word word word word word word word…"),
        ("字" * 80, "字" * 60 + "…"),
        ("???", "???"),
        ("- item", "item"),
    ],
)
def test_a_title_is_short_and_cut_between_words(text: str, title: str) -> None:
    assert derive_title(text) == title


@pytest.mark.parametrize(
    ("parts", "title"),
    [
        ((Text(""), Text("\n\nFile d-note.txt:\n\n# Notes")), "d-note.txt"),
        ((Text(""), Image("image/png", b"a picture", "red.png"), Text("\n\nFile a.md:\n\nNotes")), "red.png"),
        ((Text("Sum up"), Text("\n\nFile d-note.txt:\n\n# Notes")), "Sum up"),
        ((Text("File a bug:\n\nIt crashes."),), "File a bug:"),
    ],
)
def test_a_message_of_files_alone_gives_the_name_of_the_first(
    store: Store, parts: tuple[Part, ...], title: str
) -> None:
    made = new_conversation(store)
    store.messages.append(made.id, None, Message(Role.USER, parts))
    assert store.conversations.get(made.id).title == title


def test_lists_are_the_newest_first_page_by_page(store: Store, owner: str) -> None:
    made = [
        new_conversation(store, title=f"Number {number}", tags=["even"] if number % 2 == 0 else [])
        for number in range(5)
    ]
    add_message(store, made[0].id, None, "again")
    first = store.conversations.list(owner, limit=2)
    rest = store.conversations.list(owner, before=first[-1])
    assert [one.title for one in (*first, *rest)] == [f"Number {number}" for number in (0, 4, 3, 2, 1)]
    assert len(store.conversations.list(owner, tag="even")) == 3
    assert [one.id for one in store.conversations.list(owner, title="number 3")] == [made[3].id]
    assert store.conversations.list(owner, title="%") == ()


@pytest.mark.parametrize("part", ["Ärger", "ärger", "ÄRGER", "mit über", "_5%"])
def test_a_part_of_a_title_is_found_in_upper_and_lower_case(store: Store, owner: str, part: str) -> None:
    with store.database.read_transaction() as connection:
        if not store.database.is_sqlite and connection.scalar(select(func.lower("Ä"))) != "ä":
            pytest.skip("the locale of this PostgreSQL has no letters outside ASCII")
    made = new_conversation(store, title="Der Ärger mit Über_5%")
    new_conversation(store, title="Der Arger mit Uber 55")
    assert store.conversations.list(owner, title=part) == (made,)


def test_a_deleted_conversation_is_hidden_until_restored(store: Store, owner: str) -> None:
    made = new_conversation(store)
    message = add_message(store, made.id, None, "findme")
    store.conversations.delete(made.id)
    for look in (
        lambda: store.conversations.get(made.id),
        lambda: store.messages.get(message.id),
        lambda: store.messages.path(message.id),
        lambda: add_message(store, made.id, message.id, "more"),
        lambda: store.conversations.delete(made.id),
    ):
        with pytest.raises(NotFound):
            look()
    assert store.search.find(owner, "findme") == ()
    assert [one.id for one in store.conversations.list(owner, deleted=True)] == [made.id]
    assert store.conversations.undelete(made.id).deleted_at is None
    assert store.messages.get(message.id).text == "findme"


def test_a_refused_first_message_leaves_nothing_in_the_list_of_deleted_conversations(store: Store, owner: str) -> None:
    empty, named = new_conversation(store, system="Be kind."), new_conversation(store, title="Plans")
    for made in (empty, named):
        store.conversations.delete(made.id)
    assert [one.id for one in store.conversations.list(owner, deleted=True)] == [named.id]
    assert store.conversations.undelete(empty.id).system == "Be kind."


def test_purge_removes_unreferenced_blobs(store: Store, owner: str) -> None:
    gone, kept = new_conversation(store), new_conversation(store)
    shared, alone = Image("image/png", b"shared"), Image("image/png", b"alone")
    store.messages.append(gone.id, None, Message(Role.USER, (shared, alone)))
    stays = store.messages.append(kept.id, None, Message(Role.USER, (shared,)))
    store.conversations.delete(gone.id)
    assert store.conversations.purge() == 1
    assert len(list(store.blobs.digests())) == 2  # recent ones are kept: a message may be about to reference them
    store.blobs.sweep({part.digest for part in stays.parts if hasattr(part, "digest")}, grace=-1)
    assert store.messages.load(stays).parts == (shared,)
    assert len(list(store.blobs.digests())) == 1
    with pytest.raises(NotFound):
        store.conversations.undelete(gone.id)


def test_users_see_their_own(store: Store) -> None:
    ann, bob = store.users.ensure("ann"), store.users.ensure("bob")
    assert store.users.ensure("ann") == ann
    mine = store.conversations.create(ann.id, key="k")
    assert store.conversations.create(ann.id, key="k") == mine
    assert store.conversations.create(bob.id, key="k").id != mine.id
    with pytest.raises(NotFound):
        store.conversations.get(mine.id, owner=bob.id)
    with pytest.raises(NotFound):
        store.conversations.create("nobody")
    store.messages.append(mine.id, None, user("secret"))
    assert store.search.find(bob.id, "secret") == ()
    assert [user.name for user in store.users.all()] == ["ann", "bob"]


def test_a_very_long_branch_is_opened_and_purged(store: Store, owner: str) -> None:
    made = new_conversation(store)
    row = [NewMessage(str(n), str(n - 1) if n else None, user(f"number {n}")) for n in range(1200)]
    store.messages.append_all(made.id, row)
    head = store.conversations.get(made.id).head_id
    assert head is not None
    assert len(store.messages.path(head)) == 1200
    store.conversations.delete(made.id)
    assert store.conversations.purge() == 1
    assert store.search.find(owner, "number") == ()
