"""Whether a model fits, the bound on the cache, and the number of threads."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from palaver.engines.core.runner import LARGE_PASS_PAIRS
from palaver.engines.torch import describe_fit, load
from palaver.engines.torch.devices import TorchThreads, cache_bytes, fit, weights_bytes
from palaver.engines.torch.loader import open_checkpoint
from palaver.errors import DoesNotFit
from tests.engines.tiny import VOCABULARY, build

CPU = torch.device("cpu")


def test_weights_are_counted_as_they_will_be_loaded(folder_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder_of("qwen3"))
    count = sum(p.numel() for p in build("qwen3").parameters())
    assert weights_bytes(checkpoint, torch.float32) == 4 * count
    assert weights_bytes(checkpoint, torch.bfloat16) == 2 * count


def test_whether_it_fits_is_said_with_figures(folder_of: Callable[[str], Path]) -> None:
    assert fit(open_checkpoint(folder_of("qwen3")), CPU, torch.float32).fits
    assert "needs about 0.00 GB on cpu, free: " in describe_fit(folder_of("qwen3"))


def test_what_does_not_fit_is_not_loaded(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.engines.torch.devices.available_bytes", lambda: 1000)
    with pytest.raises(DoesNotFit, match=r"needs about 0\.0 GB of memory but cpu has 0\.0 GB free"):
        load(folder_of("qwen3"), vocabulary=VOCABULARY)


def test_the_cache_is_bounded_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.engines.torch.devices.available_bytes", lambda: 1 << 40)
    assert cache_bytes(CPU) == 2 << 30
    monkeypatch.setattr("palaver.engines.torch.devices.available_bytes", lambda: 1 << 30)
    assert cache_bytes(CPU) == 1 << 29
    monkeypatch.setattr("palaver.engines.torch.devices.available_bytes", lambda: None)
    assert cache_bytes(CPU) == 1 << 30


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restore_threads")
def test_a_large_pass_has_more_threads() -> None:
    threads = TorchThreads(1, 2)
    threads.apply()
    with threads.scaled_for(LARGE_PASS_PAIRS):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("restore_threads")
def test_a_small_pass_has_few_threads() -> None:
    threads = TorchThreads(1, 2)
    threads.apply()
    with threads.scaled_for(LARGE_PASS_PAIRS - 1):
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("restore_threads")
def test_a_failing_pass_restores_the_thread_count() -> None:
    threads = TorchThreads(1, 2)
    with pytest.raises(RuntimeError, match="no"), threads.scaled_for(LARGE_PASS_PAIRS):
        raise RuntimeError("no")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("small", [True, False])
def test_a_requested_number_holds_for_all_passes(small: bool) -> None:
    assert TorchThreads.choose(3, small) == TorchThreads(3, 3)


def test_a_small_model_uses_half_of_the_cores() -> None:
    small, big = TorchThreads.choose(None, True), TorchThreads.choose(None, False)
    assert small.large_pass == big.large_pass == big.small_pass
    assert small.small_pass == max(1, big.small_pass // 2)
