from __future__ import annotations

import pytest

from palaver.messages import Text, Thinking
from palaver.store import ReplyEnding, ReplyStatus, Store
from palaver.store.search import query_terms, split_words
from tests.store.factories import SETTINGS, add_message, new_conversation

TEXTS = (
    "The quick brown fox, a Café in Zürich",
    "東京タワーは高いです。",
    "我喜欢吃北京烤鸭",
    "서울에서 만나요",
    "สวัสดีครับ",
    "हिन्दी में लिखो",
    "Party 🎉 tonight; snake_case and C3PO",
    "ＦＵＬＬ ｗｉｄｔｈ",
    "it's a 'quoted' \\ back:slash (and) OR* \"AND\" <-> !x",
)


FOUND = {
    0: ("quick fox", "qui", "cafe", "ZURICH", '"brown fox"'),
    1: ("東", "京タ", "高い"),
    2: ("鸭", "北京"),
    3: ("울에", "서울"),
    4: ("สวัส",),
    5: ("हिन्दी",),
    6: ("🎉", "case", "c3p"),
    7: ("full width",),
    8: ("it's", "'quoted'", "back:slash", '"AND" OR', "!x"),
}
NOT_FOUND = ("", "  ", '"', "''", "*", "京東", '"fox brown"', "uick", "\x00", "\ud800", ":)", "NEAR(")


def test_every_script_is_searchable(store: Store, owner: str) -> None:
    id = new_conversation(store).id
    made = [add_message(store, id, None, text).id for text in TEXTS]
    for number, queries in FOUND.items():
        for query in queries:
            assert [hit.message_id for hit in store.search.find(owner, query)] == [made[number]], query
    for query in NOT_FOUND:
        assert store.search.find(owner, query) == (), query


def test_the_newest_come_first_with_a_snippet(store: Store, owner: str) -> None:
    first, second = new_conversation(store), new_conversation(store)
    for made in (first, second, first):
        add_message(store, made.id, None, "x " * 100 + "needle" + " y" * 100)
    hits = store.search.find(owner, "needle")
    assert [hit.conversation_id for hit in hits] == [first.id, second.id, first.id]
    assert "needle" in hits[0].snippet
    assert len(hits[0].snippet) < 170
    assert len(store.search.find(owner, "needle", limit=1)) == 1
    assert len(store.search.find(owner, "needle", conversation_id=second.id)) == 1


def test_a_search_is_limited_to_the_owner_and_to_conversations_that_exist(store: Store, owner: str) -> None:
    other = store.users.ensure("other").id
    made = new_conversation(store)
    for number in range(30):
        add_message(store, made.id, None, f"needle {number}")
    gone = new_conversation(store)
    for number in range(60):
        add_message(store, gone.id, None, f"needle {number}")
    theirs = store.conversations.create(other).id
    hers = add_message(store, theirs, None, "a needle").id
    store.conversations.delete(gone.id)
    assert [hit.message_id for hit in store.search.find(other, "needle")] == [hers]
    hits = store.search.find(owner, "needle", limit=25)
    assert [hit.conversation_id for hit in hits] == [made.id] * 25
    assert "needle 29" in hits[0].snippet
    assert store.search.find(owner, "needle", conversation_id=theirs) == ()
    for odd in ("nonesuch", "'", '"', '" OR "', "\\' | 'x", "a b"):
        assert store.search.find(owner, "needle", conversation_id=odd) == ()
        assert store.search.find(odd, "needle") == ()
    assert store.search.find(owner, owner) == (), "the words that stand for places can't be typed"
    assert store.search.find(owner, f"\ue000{owner}") == ()
    store.conversations.undelete(gone.id)
    assert store.search.find(owner, "needle", limit=1)[0].conversation_id == gone.id


def test_rare_and_common_words_are_found_behind_many_newer_messages(
    store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palaver.store.search._RECENT", 5)
    monkeypatch.setattr("palaver.store.search._RECENT_FOR_PHRASES", 5)
    id = new_conversation(store).id
    old = [add_message(store, id, None, text).id for text in ("一二三 old rare words", "old and 二三一", "old")]
    for number in range(12):
        add_message(store, id, None, f"new {number}")
    found = {
        "old": old[::-1],
        "ol rar": old[:1],
        '"rare words"': old[:1],
        '"words rare"': [],
        "一二三": old[:1],
        "二三": old[1::-1],
        "三二": [],
    }
    for query, ids in found.items():
        assert [hit.message_id for hit in store.search.find(owner, query)] == ids, query
    assert len(store.search.find(owner, "new", limit=12)) == 12
    assert [hit.message_id for hit in store.search.find(owner, "old", limit=2)] == [old[2], old[1]]


def test_terms_far_apart_and_phrases_anywhere_in_a_long_message_are_found(store: Store, owner: str) -> None:
    id = new_conversation(store).id
    numbers = [f"w{number}" for number in range(2000)]
    message = add_message(store, id, None, " ".join(numbers))
    repeated = add_message(store, id, None, "的" * 700 + "尾巴")
    assert store.search.find(owner, "w1 w1999")[0].message_id == message.id
    for start in range(0, 1990, 97):
        phrase = " ".join(numbers[start : start + 10])
        assert store.search.find(owner, f'"{phrase}"')[0].message_id == message.id
    assert store.search.find(owner, "的尾巴")[0].message_id == repeated.id
    assert store.search.find(owner, "的 w1") == ()
    assert store.search.find(owner, '"w5 w7"') == (), "both words are there, but not one after the other"
    huge = add_message(store, id, None, " ".join(f"h{number}" for number in range(25_000)))
    for query in ("h0", "h24999", '"h12000 h12001"'):
        assert [hit.message_id for hit in store.search.find(owner, f"{query}")] == [huge.id]


def test_a_reply_is_indexed_by_its_final_text(store: Store, owner: str) -> None:
    lease = store.leases.open()
    reply = store.replies.start(lease, new_conversation(store).id, None, SETTINGS)
    store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.STOPPED, (Text("alpha"),)))
    store.replies.resume(lease, reply.id)
    store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("alphabeta gamma"),)))
    assert [hit.message_id for hit in store.search.find(owner, "gamma")] == [reply.id]
    assert len(store.search.find(owner, "alpha")) == 1
    store.search.rebuild()
    assert len(store.search.find(owner, "alpha")) == 1


def test_words_of_thoughts_are_found_and_marked(store: Store, owner: str) -> None:
    lease = store.leases.open()
    reply = store.replies.start(lease, new_conversation(store).id, None, SETTINGS)
    parts = (Thinking("x " * 100 + "carry the one, 東京タワー"), Text("The sum is 42, as one sees."))
    store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, parts))
    found = {
        "sum 42": False,
        "carry": True,
        '"carry the"': True,
        '"carry one"': None,
        "京タ": True,
        "sum car": True,
        "one": False,
        "42 nothing": None,
    }
    for rebuilt in (False, True):
        for query, in_thought in found.items():
            hits = store.search.find(owner, query)
            assert [hit.in_thought for hit in hits] == ([] if in_thought is None else [in_thought]), query
        if not rebuilt:
            store.search.rebuild()
    (hit,) = store.search.find(owner, "sum carry")
    assert "carry the one" in hit.snippet
    (hit,) = store.search.find(owner, "sum")
    assert hit.snippet == "The sum is 42, as one sees."


def test_purged_messages_are_not_indexed(store: Store, owner: str) -> None:
    made = new_conversation(store)
    add_message(store, made.id, None, "needle")
    store.conversations.delete(made.id)
    store.conversations.purge()
    with store.database.read_transaction() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM search_words").scalar() == 0


def test_words_are_folded_and_cut() -> None:
    assert split_words("Hello, ÉCOLE!") == ["hello", "ecole"]
    assert split_words("が行く") == ["が", "行", "く"]
    assert split_words("x" * 100) == ["x" * 64]
    assert [term.is_prefix for term in query_terms('ab "cd" 京')] == [True, False, False]
