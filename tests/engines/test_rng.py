import itertools

import pytest

from palaver.engines.core.rng import BUFFERED, MASK_64, XTC_STREAM, UniformStream, uniform


def test_numbers_depend_on_all_three_arguments_alone() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    numbers = {uniform(s, c, p) for s in range(6) for c in range(6) for p in range(6)}
    assert len(numbers) == 6**3


def test_numbers_are_spread_evenly_below_one() -> None:
    numbers = [uniform(7, 0, position) for position in range(20_000)]
    assert all(0 <= x < 1 for x in numbers)
    counts = [sum(1 for x in numbers if i <= x * 10 < i + 1) for i in range(10)]
    assert max(abs(count - 2000) for count in counts) < 200
    neighbours = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(numbers)) / len(numbers)
    assert abs(neighbours) < 0.005


def test_the_largest_seed_works() -> None:
    assert 0 <= uniform(2**63 - 1, 10**6, 10**9) < 1


@pytest.mark.parametrize("stream", [0, XTC_STREAM])
@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1, MASK_64])
def test_a_stream_has_the_same_numbers(seed: int, stream: int) -> None:
    """In any order of positions, over the ends of what is computed at once."""
    numbers = UniformStream(seed, 3, stream)
    for position in (0, 1, BUFFERED - 1, BUFFERED, 5, 10**9, 2**40, 7):
        assert numbers[position] == uniform(seed, 3, position, stream)
