"""Rules about tools in both databases: which one holds, and which are forgotten together."""

from __future__ import annotations

from palaver.store import Store
from palaver.store.tool_rules import Rule, ToolRule
from tests.store.factories import new_conversation


def test_a_rule_holds_for_its_user_in_its_place(store: Store) -> None:
    rules = store.tool_rules
    here, elsewhere = new_conversation(store), new_conversation(store)
    rules.save(here.owner_id, here.id, "demo__clock", Rule.ALWAYS)
    assert rules.get(here.owner_id, here.id, "demo__clock", "demo") is Rule.ALWAYS
    assert rules.get(here.owner_id, elsewhere.id, "demo__clock", "demo") is None
    assert rules.get(here.owner_id, here.id, "demo__roll", "demo") is None
    assert rules.get("another user", here.id, "demo__clock", "demo") is None
    rules.save(here.owner_id, here.id, "demo__clock", None)
    assert rules.get(here.owner_id, here.id, "demo__clock", "demo") is None


def test_never_is_stronger_than_always(store: Store) -> None:
    rules, conversation = store.tool_rules, new_conversation(store)
    rules.save(conversation.owner_id, conversation.id, "demo__clock", Rule.ALWAYS)
    rules.save(conversation.owner_id, "", "demo", Rule.NEVER)
    assert rules.get(conversation.owner_id, conversation.id, "demo__clock", "demo") is Rule.NEVER


def test_rules_are_forgotten_by_name_by_conversation_and_by_server(store: Store) -> None:
    rules, conversation = store.tool_rules, new_conversation(store)
    owner = conversation.owner_id
    kept = ToolRule("demonstration__clock", Rule.NEVER, conversation.id)
    for name in ("demo__clock", "demo__roll", kept.name):
        rules.save(owner, conversation.id, name, kept.rule)
    rules.save(owner, "", "demo", Rule.ALWAYS)
    assert rules.forget(owner, "demo__roll") == 1
    rules.forget_server(owner, "demo")
    assert rules.list_all(owner) == (kept,)
    assert rules.forget(owner, conversation_id=conversation.id) == 1
    assert rules.list_all(owner) == ()


def test_rules_in_a_deleted_conversation_are_not_listed(store: Store) -> None:
    rules, conversation = store.tool_rules, new_conversation(store)
    rules.save(conversation.owner_id, conversation.id, "demo__clock", Rule.ALWAYS)
    store.conversations.delete(conversation.id)
    assert rules.list_all(conversation.owner_id) == ()
