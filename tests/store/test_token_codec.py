from __future__ import annotations

import pytest

from palaver.generation import Alternative, Step
from palaver.store.errors import Damaged
from palaver.store.token_codec import as_stored, pack_tokens, unpack_tokens
from tests.store.factories import steps


def test_tokens_round_trip() -> None:
    few = Step(5, -0.1, (Alternative(1, -0.1),) * 7, -1e300, (Alternative(2, float("-inf")),))
    many = [Step(number, -number / 3, (Alternative(number, -0.5),)) for number in range(300)]
    for row in ([few], many, [*many, few], []):
        unpacked = unpack_tokens(pack_tokens(row))
        assert [step.token_id for step in unpacked] == [step.token_id for step in row]
        assert unpacked == tuple(as_stored(step) for step in unpacked)
    assert len(unpack_tokens(pack_tokens([few]))[0].alternatives) == 5
    assert unpack_tokens(pack_tokens(steps(1, 2))) == steps(1, 2)
    assert unpack_tokens(pack_tokens([many[0], few]))[0].drawn_logprob is None


@pytest.mark.parametrize("data", [b"", b"\x01", pack_tokens(steps(1, 2))[:-1], b"\x02\x00\x05\x00\x00\x00nonsense"])
def test_damaged_tokens_are_detected(data: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_tokens(data)
