"""Few threads for the next tokens, all cores for a long prompt, and one number where the user named one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from palaver.engines.torch.memory import CROWDED, ThreadCounts


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_much_to_do_has_more_threads_and_gives_them_back() -> None:
    threads = ThreadCounts(1, 2)
    threads.settle()
    with threads.enough(CROWDED):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


def test_little_to_do_stays_with_few() -> None:
    threads = ThreadCounts(1, 2)
    threads.settle()
    with threads.enough(CROWDED - 1):
        assert torch.get_num_threads() == 1


def test_a_pass_that_fails_gives_them_back_too() -> None:
    threads = ThreadCounts(1, 2)
    with pytest.raises(RuntimeError, match="no"), threads.enough(CROWDED):
        raise RuntimeError("no")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("small", [True, False])
def test_a_number_that_was_named_holds_for_all(small: bool) -> None:
    assert ThreadCounts.picked(3, small) == ThreadCounts(3, 3)


def test_a_small_model_leaves_cores_alone() -> None:
    small, big = ThreadCounts.picked(None, True), ThreadCounts.picked(None, False)
    assert small.many == big.many == big.few
    assert small.few == max(1, big.few // 2)
