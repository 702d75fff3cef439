"""Every attention kernel gives what the definition of attention gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import (
    MAX_FAILURES,
    MIN_WORKSPACE_KEYS,
    AttentionParams,
    ScoreWorkspace,
    attend_in_workspace,
)
from palaver.engines.torch.batch import build_batch, sequence_chunk
from palaver.engines.torch.devices import TensorLayout, TensorMemory

SIZE = 16
KINDS = [("cpu", torch.float32)]
if torch.cuda.is_available():
    KINDS += [("cuda", torch.float32), ("cuda", torch.bfloat16)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Rounding of the weighted sum; that of the scores comes on top: see `score_rounding`."""


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def layout(request: pytest.FixtureRequest) -> TensorLayout:
    device, dtype = request.param
    shape = (2, SIZE)
    return TensorLayout(((shape, shape),), TensorMemory(dtype, torch.device(device)))


class Text:
    """Random keys and values of one sequence in its slot, and the queries of its last tokens."""

    def __init__(
        self, slots: SlotAllocator[Tensor], layout: TensorLayout, length: int, count: int, heads: int, size: float = 1
    ) -> None:
        def some(*shape: int) -> Tensor:
            return torch.randn(*shape).to(layout.device, layout.dtype)

        self.slot = slots.allocate(length)
        self.length, self.count = length, count
        self.queries = some(count, heads, SIZE) * size
        self.keys, self.values = some(2, length, SIZE), some(2, length, SIZE)
        self.slot.pool.keys[0][self.slot.index, :, :length] = self.keys
        self.slot.pool.values[0][self.slot.index, :, :length] = self.values
        self.chunk = sequence_chunk(self.slot, length - count, [0] * count)

    def expected(self, params: AttentionParams) -> Tensor:
        """[queries, heads, size], by definition and in float64."""
        times = self.queries.shape[1] // 2
        keys, values = (x.double().repeat_interleave(times, 0) for x in (self.keys, self.values))
        scores = self.queries.double().transpose(0, 1) @ keys.transpose(1, 2) * params.scale
        if params.softcap is not None:
            scores = (scores / params.softcap).tanh() * params.softcap
        later = torch.ones(self.count, self.length, device=scores.device).triu(self.length - self.count + 1).bool()
        scores = scores.masked_fill(later, -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks.double().view(-1, 1, 1).expand(-1, self.count, 1)
            scores = torch.cat((scores, sinks), -1)
        return (scores.softmax(-1)[..., : self.length] @ values).transpose(0, 1)


def score_rounding(texts: list[Text], params: AttentionParams) -> float:
    """How much the output may differ because float32 rounds the scores, in any order of the sum."""
    longest = max(
        float(text.queries.double().norm(dim=-1).max() * text.keys.double().norm(dim=-1).max()) for text in texts
    )
    score_error = SIZE * torch.finfo(torch.float32).eps * params.scale * longest
    return 2 * score_error * max(float(text.values.abs().max()) for text in texts)


def check(
    layout: TensorLayout, texts: list[tuple[int, int]], heads: int, params: AttentionParams, size: float = 1
) -> None:
    """(length, queries) of each text."""
    torch.manual_seed(heads + len(texts))
    slots = SlotAllocator(layout, 1 << 26)
    made = [Text(slots, layout, length, count, heads, size) for length, count in texts]
    batch = build_batch([text.chunk for text in made], layout.device)
    queries = torch.cat([made[i].queries for i in batch.order])
    expected = torch.cat([made[i].expected(params) for i in batch.order])
    tolerance = TOLERANCE[layout.dtype] + score_rounding(made, params)
    for padded in (batch, batch.padded_to(texts[0][0] + 9)) if batch.is_decode else (batch,):
        out = padded.attend(0, queries, MaskRule(), params)
        assert float((out.double() - expected).abs().max()) < tolerance


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("length", [1, 30, 300, MIN_WORKSPACE_KEYS + 1])
def test_decode(layout: TensorLayout, length: int, heads: int) -> None:
    check(layout, [(length, 1)], heads, AttentionParams(0.25))
    check(layout, [(length, 1), (max(1, length - 1), 1), (length // 3 + 1, 1)], heads, AttentionParams(0.25))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(
    ("length", "count"),
    [(7, 7), (60, 20), (MIN_WORKSPACE_KEYS - 1, 40), (MIN_WORKSPACE_KEYS, 2), (MIN_WORKSPACE_KEYS + 400, 50)],
)
def test_prefill(layout: TensorLayout, length: int, count: int, heads: int) -> None:
    workspace = ScoreWorkspace() if layout.device.type == "cpu" else None
    check(layout, [(length, count)], heads, AttentionParams(0.25, workspace=workspace))
    check(
        layout,
        [(length, count), (9, 3), (MIN_WORKSPACE_KEYS + 9, 5), (80, 1)],
        heads,
        AttentionParams(0.25, workspace=workspace),
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_with_caps_and_sinks(layout: TensorLayout, softcap: float | None, sinks: bool) -> None:
    extra = torch.linspace(-1, 3, 8).to(layout.device) if sinks else None
    for texts in ([(50, 1), (40, 1)], [(MIN_WORKSPACE_KEYS + 4, 9)], [(1, 1)]):
        check(layout, texts, 8, AttentionParams(0.25, softcap, extra))


@pytest.mark.parametrize("size", [1e-3, 30.0, 300.0])
def test_scores_of_any_size(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace is used only where unbounded exponentials stay in range."""
    layout = TensorLayout((((2, SIZE), (2, SIZE)),), TensorMemory(torch.float32, torch.device("cpu")))
    outs: list[Tensor | None] = []
    attend = attend_in_workspace

    def watched(
        queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, params: AttentionParams
    ) -> Tensor | None:
        outs.append(attend(queries, keys, values, visible, params))
        return outs[-1]

    monkeypatch.setattr("palaver.engines.torch.attention.attend_in_workspace", watched)
    check(layout, [(MIN_WORKSPACE_KEYS + 100, 20)], 4, AttentionParams(0.25, workspace=ScoreWorkspace()), size)
    assert len(outs) == 1
    assert (outs[0] is None) == (size > 1)


def test_scores_that_are_all_small() -> None:
    """Where every exponential is next to nothing, their sum is not precise."""
    queries = torch.full((2, 3, SIZE), 10.0)
    keys, values = torch.full((1, 2, MIN_WORKSPACE_KEYS, SIZE), -10.0), torch.randn(1, 2, MIN_WORKSPACE_KEYS, SIZE)
    visible = torch.ones(3, 3)
    assert (
        attend_in_workspace(queries, keys, values, visible, AttentionParams(0.25, workspace=ScoreWorkspace())) is None
    )


def test_scores_of_which_most_are_small() -> None:
    """As where a few tokens take all the attention."""
    queries, keys, values = (
        torch.ones(2, 3, SIZE),
        torch.full((1, 2, MIN_WORKSPACE_KEYS, SIZE), -6.0),
        torch.randn(1, 2, MIN_WORKSPACE_KEYS, SIZE),
    )
    keys[:, :, 5] = 0.5
    out = attend_in_workspace(queries, keys, values, torch.ones(3, 3), AttentionParams(1.0, workspace=ScoreWorkspace()))
    assert out is not None
    assert torch.allclose(out, values[0, :, 5][:, None].expand_as(out))


def test_the_workspace_is_disabled_after_repeated_failures() -> None:
    """A model whose scores are always out of range pays for a few attempts only."""
    layout = TensorLayout((((2, SIZE), (2, SIZE)),), TensorMemory(torch.float32, torch.device("cpu")))
    workspace = ScoreWorkspace()
    for _ in range(MAX_FAILURES):
        assert workspace.enabled
        check(layout, [(MIN_WORKSPACE_KEYS + 100, 20)], 4, AttentionParams(0.25, workspace=workspace), size=300)
    assert not workspace.enabled
    check(layout, [(MIN_WORKSPACE_KEYS + 100, 20)], 4, AttentionParams(0.25, workspace=workspace))


def test_the_default_dtype_of_the_process_does_not_matter() -> None:
    layout = TensorLayout((((2, SIZE), (2, SIZE)),), TensorMemory(torch.float32, torch.device("cpu")))
    workspace, before = ScoreWorkspace(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        workspace.view(2, 2000)
    finally:
        torch.set_default_dtype(before)
    check(layout, [(MIN_WORKSPACE_KEYS + 100, 2)], 4, AttentionParams(0.25, workspace=workspace))


def test_the_window_of_a_mask() -> None:
    def last_24(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < 24

    def chunks_of_24(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query // 24 == key // 24

    cpu = torch.device("cpu")
    assert MaskRule().window(100, cpu) is None
    assert MaskRule(last_24).window(100, cpu) == 24
    assert MaskRule(last_24).window(20, cpu) is None
    with pytest.raises(ValueError, match="no windows"):
        MaskRule(chunks_of_24).window(100, cpu)
