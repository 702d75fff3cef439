"""What all processes on a store share of a user: rates, uploads, keys, presets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from palaver.store import Store
from tests.store.conftest import StoreLocation


def let_pass(store: Store, seconds: float) -> None:
    with store.database.write_transaction() as connection:
        connection.execute(text("UPDATE rate_limits SET updated_at = updated_at - :us"), {"us": int(seconds * 1e6)})


def test_a_rate_counts_the_requests_of_all_processes(place: StoreLocation) -> None:
    with place.open() as one, place.open() as other:
        assert [store.rate_limits.acquire("ann", 3) for store in (one, other, one)] == [0.0] * 3
        assert 0 < other.rate_limits.acquire("ann", 3) <= 20
        assert one.rate_limits.acquire("bob", 3) == 0
        let_pass(one, 20)
        assert one.rate_limits.acquire("ann", 3) == 0
        assert other.rate_limits.acquire("ann", 3) > 0
        let_pass(one, 600)
        one.rate_limits.forget_full()
        assert [other.rate_limits.acquire("ann", 3) for _ in range(3)] == [0.0] * 3


def test_no_request_more_passes_when_they_come_at_once(place: StoreLocation) -> None:
    with place.open() as one, place.open() as other, ThreadPoolExecutor(8) as threads:
        stores = [one, other] * 8
        waits = list(threads.map(lambda store: store.rate_limits.acquire("ann", 5), stores))
    assert sum(wait == 0 for wait in waits) == 5


def test_an_upload_is_known_to_all_processes_until_it_is_old(
    place: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.open() as one, place.open() as other:
        ann, bob = one.users.ensure("ann").id, one.users.ensure("bob").id
        for store in (one, other):
            store.conversations.add_upload(ann, "digest")
        assert other.conversations.may_read_blob(ann, "digest")
        assert not other.conversations.may_read_blob(bob, "digest")
        other.conversations.purge()
        assert one.conversations.may_read_blob(ann, "digest")
        monkeypatch.setattr("palaver.store.conversations.GRACE_SECONDS", -1.0)
        other.conversations.purge()
        assert not one.conversations.may_read_blob(ann, "digest")


def test_keys_and_presets_are_shared(place: StoreLocation) -> None:
    with place.open() as one, place.open() as other:
        owner = one.users.ensure().id
        key, secret = one.keys.add(owner)
        assert other.keys.find(secret) == key
        other.keys.revoke(key.id)
        assert one.keys.find(secret) is None
        one.presets.save(owner, "short", "Be brief.", {})
        assert [preset.name for preset in other.presets.all(owner)] == ["short"]
