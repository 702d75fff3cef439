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

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's
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


@pytest.fixture(params=["qwen3_5", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny.build(request.param, **SIZES).to(DEVICE)


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
@pytest.mark.parametrize("text", TEXTS)
def test_the_librarys_logits(model: Any, text: str) -> None:
    """Of prompts in parts, of single tokens, and of two sequences in one pass."""
    case = Case(model, TEXTS[text])
    longer, shorter = case.start(), case.start()
    limit = 1e-4 if DEVICE.type == "cpu" else 5e-3  # products of narrow floats
    assert case.run((longer, 0, 100)) < limit
    assert case.run((longer, 100, 148)) < limit
    assert case.run((shorter, 0, 3)) < limit
    assert case.run((shorter, 3, 70)) < limit
    assert case.run((shorter, 70, 71), (longer, 148, 149)) < limit
    assert case.run((longer, 149, 150), (shorter, 71, 72)) < limit
    assert case.run((longer, 150, 151)) < limit
    case.decoder.detach()
    ids = torch.tensor([case.text], device=DEVICE)
    assert torch.equal(model(input_ids=ids).logits[0], case.expected)  # the library's own layers are back


@torch.inference_mode()
def test_a_lost_state_is_not_read(model: Any) -> None:
    """A sequence that is computed again begins without what its row holds."""
    case = Case(model, TEXTS["different tokens"])
    slot = case.start()
    first = case.run((slot, 0, 70))
    assert case.run((slot, 0, 70)) == first


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
