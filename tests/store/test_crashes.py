from __future__ import annotations

from palaver.store import ReplyStatus
from tests.store.conftest import StoreLocation
from tests.store.crash_writer import find_lost, random_delays, run_killed_writer

TIMES = 10
"""On each database; benchmarks/store.py does it for longer."""


def test_a_killed_writer_loses_nothing_that_was_acknowledged(place: StoreLocation) -> None:
    after = random_delays(1, 0.15)
    url = None if place.database is None else place.database.render_as_string(hide_password=False)
    for _ in range(TIMES):
        acknowledged = run_killed_writer(place.folder, url, after)
        assert acknowledged
        with place.open() as store:
            assert find_lost(store, acknowledged) == []
            with store.database.read_transaction() as connection:
                if store.database.is_sqlite:
                    assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
                    assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
                running = f"SELECT count(*) FROM replies WHERE status = '{ReplyStatus.RUNNING.value}'"
                assert connection.exec_driver_sql(running).scalar() == 0
