"""Attention is what its definition says, by whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_kernels import LONG, REFUSALS, AttentionHead, ScoreWorkspace, attend_in_workspace
from palaver.engines.torch.batch import build_batch, sequence_chunk
from palaver.engines.torch.kv_cache import KVLayout, SlotAllocator

SIZE = 16
KINDS = [("cpu", torch.float32)]
if torch.cuda.is_available():
    KINDS += [("cuda", torch.float32), ("cuda", torch.bfloat16)]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def layout(request: pytest.FixtureRequest) -> KVLayout:
    device, dtype = request.param
    shape = (2, SIZE)
    return KVLayout(((shape, shape),), dtype, torch.device(device))


class Text:
    """Random keys and values of one sequence in its lane, and the queries of its last tokens."""

    def __init__(
        self, lanes: SlotAllocator, layout: KVLayout, length: int, count: int, heads: int, size: float = 1
    ) -> None:
        def some(*shape: int) -> Tensor:
            return torch.randn(*shape).to(layout.device, layout.dtype)

        self.lane = lanes.open(length)
        self.length, self.count = length, count
        self.queries = some(count, heads, SIZE) * size
        self.keys, self.values = some(2, length, SIZE), some(2, length, SIZE)
        self.lane.bank.keys[0][self.lane.index, :, :length] = self.keys
        self.lane.bank.values[0][self.lane.index, :, :length] = self.values
        self.run = sequence_chunk(self.lane, length - count, [0] * count)

    def expected(self, head: AttentionHead) -> Tensor:
        """[queries, heads, size], by definition and in float64."""
        times = self.queries.shape[1] // 2
        keys, values = (x.double().repeat_interleave(times, 0) for x in (self.keys, self.values))
        scores = self.queries.double().transpose(0, 1) @ keys.transpose(1, 2) * head.scale
        if head.softcap is not None:
            scores = (scores / head.softcap).tanh() * head.softcap
        later = torch.ones(self.count, self.length, device=scores.device).triu(self.length - self.count + 1).bool()
        scores = scores.masked_fill(later, -torch.inf)
        if head.sinks is not None:
            sinks = head.sinks.double().view(-1, 1, 1).expand(-1, self.count, 1)
            scores = torch.cat((scores, sinks), -1)
        return (scores.softmax(-1)[..., : self.length] @ values).transpose(0, 1)


def check(layout: KVLayout, texts: list[tuple[int, int]], heads: int, head: AttentionHead, size: float = 1) -> None:
    """(length, queries) of each text."""
    torch.manual_seed(heads + len(texts))
    lanes = SlotAllocator(layout, 1 << 26)
    made = [Text(lanes, layout, length, count, heads, size) for length, count in texts]
    planned = build_batch([text.run for text in made], layout.device)
    queries = torch.cat([made[i].queries for i in planned.order])
    wanted = torch.cat([made[i].expected(head) for i in planned.order])
    for steady in (planned, planned.steady(texts[0][0] + 9)) if planned.steps else (planned,):
        out = steady.attend(0, queries, MaskRule(), head)
        assert float((out.double() - wanted).abs().max()) < NEAR[layout.dtype]


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("length", [1, 30, 300, LONG + 1])
def test_of_next_tokens(layout: KVLayout, length: int, heads: int) -> None:
    check(layout, [(length, 1)], heads, AttentionHead(0.25))
    check(layout, [(length, 1), (max(1, length - 1), 1), (length // 3 + 1, 1)], heads, AttentionHead(0.25))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(("length", "count"), [(7, 7), (60, 20), (LONG - 1, 40), (LONG, 2), (LONG + 400, 50)])
def test_of_chunks(layout: KVLayout, length: int, count: int, heads: int) -> None:
    room = ScoreWorkspace() if layout.device.type == "cpu" else None
    check(layout, [(length, count)], heads, AttentionHead(0.25, room=room))
    check(layout, [(length, count), (9, 3), (LONG + 9, 5), (80, 1)], heads, AttentionHead(0.25, room=room))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_with_caps_and_sinks(layout: KVLayout, softcap: float | None, sinks: bool) -> None:
    extra = torch.linspace(-1, 3, 8).to(layout.device) if sinks else None
    for texts in ([(50, 1), (40, 1)], [(LONG + 4, 9)], [(1, 1)]):
        check(layout, texts, 8, AttentionHead(0.25, softcap, extra))


@pytest.mark.parametrize("size", [1e-3, 30.0, 300.0])
def test_scores_of_any_size(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponentials without a bound are taken only where they lose nothing."""
    layout = KVLayout((((2, SIZE), (2, SIZE)),), torch.float32, torch.device("cpu"))
    outs: list[Tensor | None] = []
    attend = attend_in_workspace

    def watched(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, head: AttentionHead) -> Tensor | None:
        outs.append(attend(queries, keys, values, seen, head))
        return outs[-1]

    monkeypatch.setattr("palaver.engines.torch.attention.attend_in_room", watched)
    check(layout, [(LONG + 100, 20)], 4, AttentionHead(0.25, room=ScoreWorkspace()), size)
    assert len(outs) == 1
    assert (outs[0] is None) == (size > 1)


def test_scores_that_are_all_small() -> None:
    """Where every exponential is next to nothing their sum says nothing."""
    queries = torch.full((2, 3, SIZE), 10.0)
    keys, values = torch.full((1, 2, LONG, SIZE), -10.0), torch.randn(1, 2, LONG, SIZE)
    seen = torch.ones(3, 3)
    assert attend_in_workspace(queries, keys, values, seen, AttentionHead(0.25, room=ScoreWorkspace())) is None


def test_scores_of_which_most_are_small() -> None:
    """As where a few tokens take all the attention."""
    queries, keys, values = torch.ones(2, 3, SIZE), torch.full((1, 2, LONG, SIZE), -6.0), torch.randn(1, 2, LONG, SIZE)
    keys[:, :, 5] = 0.5
    out = attend_in_workspace(queries, keys, values, torch.ones(3, 3), AttentionHead(1.0, room=ScoreWorkspace()))
    assert out is not None
    assert torch.allclose(out, values[0, :, 5][:, None].expand_as(out))


def test_it_is_not_tried_for_ever() -> None:
    """A model whose scores are too big for it every time pays for the attempt a few times only."""
    layout = KVLayout((((2, SIZE), (2, SIZE)),), torch.float32, torch.device("cpu"))
    room = ScoreWorkspace()
    for _ in range(REFUSALS):
        assert room.pays
        check(layout, [(LONG + 100, 20)], 4, AttentionHead(0.25, room=room), size=300)
    assert not room.pays
    check(layout, [(LONG + 100, 20)], 4, AttentionHead(0.25, room=room))


def test_what_others_set_for_the_process_does_not_matter() -> None:
    layout = KVLayout((((2, SIZE), (2, SIZE)),), torch.float32, torch.device("cpu"))
    room, before = ScoreWorkspace(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        room.of(2, 2000)
    finally:
        torch.set_default_dtype(before)
    check(layout, [(LONG + 100, 2)], 4, AttentionHead(0.25, room=room))
