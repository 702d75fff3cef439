from __future__ import annotations

from palaver.messages import Text
from palaver.store import Ending, Status, Store
from palaver.store.words import terms, words
from tests.store.making import SETTINGS, conversation, said

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


def test_every_script_is_found_and_what_is_not_there_is_not(store: Store, owner: str) -> None:
    id = conversation(store).id
    made = [said(store, id, None, text).id for text in TEXTS]
    for number, queries in FOUND.items():
        for query in queries:
            assert [hit.message_id for hit in store.search.find(owner, query)] == [made[number]], query
    for query in NOT_FOUND:
        assert store.search.find(owner, query) == (), query


def test_the_newest_come_first_with_their_surroundings(store: Store, owner: str) -> None:
    first, second = conversation(store), conversation(store)
    for made in (first, second, first):
        said(store, made.id, None, "x " * 100 + "needle" + " y" * 100)
    hits = store.search.find(owner, "needle")
    assert [hit.conversation_id for hit in hits] == [first.id, second.id, first.id]
    assert "needle" in hits[0].snippet
    assert len(hits[0].snippet) < 170
    assert len(store.search.find(owner, "needle", limit=1)) == 1
    assert len(store.search.find(owner, "needle", conversation_id=second.id)) == 1


def test_terms_far_apart_and_phrases_anywhere_in_a_long_message_are_found(store: Store, owner: str) -> None:
    id = conversation(store).id
    numbers = [f"w{number}" for number in range(2000)]
    message = said(store, id, None, " ".join(numbers))
    repeated = said(store, id, None, "的" * 700 + "尾巴")
    assert store.search.find(owner, "w1 w1999")[0].message_id == message.id
    for start in range(0, 1990, 97):
        phrase = " ".join(numbers[start : start + 10])
        assert store.search.find(owner, f'"{phrase}"')[0].message_id == message.id
    assert store.search.find(owner, "的尾巴")[0].message_id == repeated.id


def test_a_reply_is_found_by_what_it_said_at_the_end(store: Store, owner: str) -> None:
    lease = store.leases.open()
    reply = store.replies.start(lease, conversation(store).id, None, SETTINGS)
    store.replies.finish(lease, reply.id, Ending(Status.STOPPED, (Text("alpha"),)))
    store.replies.resume(lease, reply.id)
    store.replies.finish(lease, reply.id, Ending(Status.DONE, (Text("alphabeta gamma"),)))
    assert [hit.message_id for hit in store.search.find(owner, "gamma")] == [reply.id]
    assert len(store.search.find(owner, "alpha")) == 1
    store.search.rebuild()
    assert len(store.search.find(owner, "alpha")) == 1


def test_what_was_purged_is_gone_from_the_index(store: Store, owner: str) -> None:
    made = conversation(store)
    said(store, made.id, None, "needle")
    store.conversations.delete(made.id)
    store.conversations.purge()
    with store.database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM search_words").scalar() == 0


def test_words_are_folded_and_cut() -> None:
    assert words("Hello, ÉCOLE!") == ["hello", "ecole"]
    assert words("が行く") == ["が", "行", "く"]
    assert words("x" * 100) == ["x" * 64]
    assert [term.open for term in terms('ab "cd" 京')] == [True, False, False]
