from __future__ import annotations

from palaver.store import ReplyStatus
from tests.store.conftest import Place
from tests.store.killing import killed_writer, lost, moments

TIMES = 10
"""On each database; benchmarks/store.py does it for longer."""


def test_a_writer_killed_at_any_moment_has_lost_nothing_it_was_told_is_safe(place: Place) -> None:
    after = moments(1, 0.15)
    url = None if place.database is None else place.database.render_as_string(hide_password=False)
    for _ in range(TIMES):
        acknowledged = killed_writer(place.folder, url, after)
        assert acknowledged
        with place.open() as store:
            assert lost(store, acknowledged) == []
            with store.database.reading() as connection:
                if store.database.is_sqlite:
                    assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
                    assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
                running = f"SELECT count(*) FROM replies WHERE status = '{ReplyStatus.RUNNING.value}'"
                assert connection.exec_driver_sql(running).scalar() == 0
