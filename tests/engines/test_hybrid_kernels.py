"""The kernels for layers of hybrid models give the library's logits. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed: the kernels of hybrid models are not tested")

from palaver.engines.core.kv_cache import Slot, SlotAllocator  # noqa: E402
from palaver.engines.core.runner import UnsupportedModel  # noqa: E402
from palaver.engines.torch import hybrid_kernels  # noqa: E402
from palaver.engines.torch.batch import build_batch, sequence_chunk  # noqa: E402
from palaver.engines.torch.hybrid_decoder import HybridDecoder, hybrid_layout  # noqa: E402
from palaver.engines.torch.hybrid_kernels import LayerKernels  # noqa: E402
from tests.engines import tiny  # noqa: E402
from tests.engines.interpreter import EVERY_CASE  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # the interpreter's
]
SIZES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
TEXTS = {
    "different tokens": [(i * i * 7 + i * 13 + 5) % 256 for i in range(152)],
    "one token again and again": [65] * 152,
}


FAMILIES = ("qwen3_5", "qwen3_next")
CASES = [(family, text) for family in FAMILIES for text in TEXTS]
FEW_CASES = list(zip(FAMILIES, TEXTS, strict=True))
LONGER, LONGER_STILL, SHORTER = (100, 148, 70) if EVERY_CASE else (66, 69, 68)
"""Where prompts are cut: each part but the second one of the longer prompt is in two blocks."""


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    return tiny.build(request.param, **SIZES).to(DEVICE)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not EVERY_CASE:
        monkeypatch.setattr(hybrid_kernels, "PROBE_TOKENS", (66, 3, 1))


of_each_family = pytest.mark.parametrize("model", FAMILIES if EVERY_CASE else FAMILIES[:1], indirect=True)


class Case:
    """A decoder with the slots it computes in, and what the library computes."""

    def __init__(self, model: Any, text: list[int]) -> None:
        ids = torch.tensor([text], device=DEVICE)
        self.expected = model(input_ids=ids).logits[0]
        self.text = text
        layout = hybrid_layout(model, ids[0, :4])
        self.decoder = HybridDecoder(model, layout)
        self.decoder.attach()
        self.decoder.use_kernels()
        self._slots = SlotAllocator(layout.kv, 1 << 24)
        self.decoder.states.resize(2)

    def start(self) -> Slot[torch.Tensor]:
        slot = self._slots.allocate(len(self.text))
        self.decoder.states.add(slot)
        return slot

    def run(self, *parts: tuple[Slot[torch.Tensor], int, int]) -> float:
        """The largest difference of the logits after these parts of the text."""
        chunks = [sequence_chunk(slot, start, self.text[start:stop]) for slot, start, stop in parts]
        logits = self.decoder(build_batch(chunks, DEVICE))
        expected = torch.stack([self.expected[stop - 1] for *_, stop in parts])
        return float((logits - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize(("model", "text"), CASES if EVERY_CASE else FEW_CASES, indirect=["model"])
def test_the_librarys_logits(model: Any, text: str) -> None:
    """Of prompts in parts, of single tokens, and of two sequences in one pass."""
    case = Case(model, TEXTS[text])
    longer, shorter = case.start(), case.start()
    limit = 1e-4 if DEVICE.type == "cpu" else 5e-3  # products of narrow floats
    assert case.run((longer, 0, LONGER)) < limit
    assert case.run((longer, LONGER, LONGER_STILL)) < limit
    assert case.run((shorter, 0, 3)) < limit
    assert case.run((shorter, 3, SHORTER)) < limit
    long, short = LONGER_STILL, SHORTER
    assert case.run((shorter, short, short + 1), (longer, long, long + 1)) < limit
    assert case.run((longer, long + 1, long + 2), (shorter, short + 1, short + 2)) < limit
    assert case.run((longer, long + 2, long + 3)) < limit
    case.decoder.detach()
    ids = torch.tensor([case.text], device=DEVICE)
    assert torch.equal(model(input_ids=ids).logits[0], case.expected)  # the library's own layers are back


@of_each_family
@torch.inference_mode()
def test_a_lost_state_is_not_read(model: Any) -> None:
    """A sequence that is computed again begins without what its row holds."""
    case = Case(model, TEXTS["different tokens"])
    slot = case.start()
    first = case.run((slot, 0, SHORTER))
    assert case.run((slot, 0, SHORTER)) == first


@of_each_family
def test_wrong_kernels_are_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hybrid_kernels.rms_norm

    def wrong(*arguments: Any) -> torch.Tensor:
        return right(*arguments) * 1.1

    monkeypatch.setattr(hybrid_kernels, "rms_norm", wrong)
    with pytest.raises(UnsupportedModel):
        LayerKernels(model)


def test_models_without_the_gated_delta_rule() -> None:
    with pytest.raises(UnsupportedModel):
        LayerKernels(tiny.build("lfm2").to(DEVICE))
