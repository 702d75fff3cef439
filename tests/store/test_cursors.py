from __future__ import annotations

import pytest

from palaver.store import Conflict, NotFound, Store
from tests.store.factories import add_message, new_conversation


def test_undo_and_redo_walk_many_moves(store: Store) -> None:
    id = new_conversation(store).id
    places: list[str | None] = [None]
    for number in range(6):
        assert store.cursors.move(id, "tab", places[-1]).message_id == places[-1]
        places.append(add_message(store, id, places[-1], str(number)).id)
    store.cursors.move(id, "tab", places[-1])
    for place in reversed(places[:-1]):
        assert store.cursors.undo(id, "tab").message_id == place
    with pytest.raises(Conflict, match="nothing to undo"):
        store.cursors.undo(id, "tab")
    for place in places[1:]:
        assert store.cursors.redo(id, "tab").message_id == place
    with pytest.raises(Conflict, match="nothing to redo"):
        store.cursors.redo(id, "tab")


def test_a_move_after_an_undo_forgets_what_was_undone(store: Store) -> None:
    id = new_conversation(store).id
    first, second, third = (add_message(store, id, None, text) for text in "123")
    for place in (first, second):
        store.cursors.move(id, "tab", place.id)
    store.cursors.undo(id, "tab")
    cursor = store.cursors.move(id, "tab", third.id)
    assert (cursor.can_undo, cursor.can_redo) == (True, False)
    assert store.cursors.undo(id, "tab").message_id == first.id


def test_every_client_has_a_cursor_of_its_own(store: Store) -> None:
    id = new_conversation(store).id
    first = add_message(store, id, None, "1")
    second = add_message(store, id, first.id, "2")
    store.cursors.move(id, "terminal", first.id)
    assert store.cursors.get(id, "terminal").message_id == first.id
    assert store.cursors.get(id, "tab").message_id == second.id, "one that was never here stands at the head"
    elsewhere = add_message(store, new_conversation(store).id, None, "x")
    with pytest.raises(NotFound):
        store.cursors.move(id, "tab", elsewhere.id)


def test_old_moves_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.store.conversations.MAX_MOVES", 5)
    id = new_conversation(store).id
    places = [add_message(store, id, None, str(number)).id for number in range(9)]
    for place in places:
        store.cursors.move(id, "tab", place)
    for place in reversed(places[4:8]):
        assert store.cursors.undo(id, "tab").message_id == place
    with pytest.raises(Conflict):
        store.cursors.undo(id, "tab")
