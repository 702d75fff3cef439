"""The kernels of a decode step give the logits of torch's operations, and sample what the host samples. Without a GPU
they run in Triton's interpreter; what holds on a GPU alone is skipped there."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
pytest.importorskip("triton", reason="Triton is not installed: the kernels of CUDA steps are not tested")

from palaver.engines.core.kv_cache import Slot, SlotAllocator  # noqa: E402
from palaver.engines.core.processor import UniformStream, uniform  # noqa: E402
from palaver.engines.torch import device_filters  # noqa: E402
from palaver.engines.torch.batch import build_batch, sequence_chunk  # noqa: E402
from palaver.engines.torch.cuda_step import DecoderStep, StepRow  # noqa: E402
from palaver.engines.torch.devices import TensorLayout, TensorMemory  # noqa: E402
from palaver.engines.torch.plain_decoder import FusedDecoder, PlainDecoder  # noqa: E402
from palaver.sampling import Sampling  # noqa: E402

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's
GREEDY = Sampling(temperature=0)
LENGTH = 70
"""Tokens: one more tile of attention than one."""
IDS = [(i * i * 7 + i * 13 + 5) % 128 for i in range(LENGTH)]
ON_GPU = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="needs a GPU: the interpreter's products round by their shapes"
)


def decoder_parts(dtype: torch.dtype = torch.float32) -> PlainDecoder:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config).eval().to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 1, 0.1)
    parts = PlainDecoder.from_model(model, 256)
    parts.rotary._complex = False  # heads as halves, as on CUDA
    parts.rotary._cos = parts.rotary._cos[:0]
    return parts


class Case:
    """A step and the slots it computes in."""

    def __init__(self, exact: bool, dtype: torch.dtype = torch.float32) -> None:
        parts = decoder_parts(dtype)
        layout = TensorLayout((((1, 32), (1, 32)),), TensorMemory(dtype, DEVICE))
        self.decoder = FusedDecoder(parts)
        self.step = DecoderStep(parts, exact, None, 4, pdl=False)
        self.slots = SlotAllocator(layout, 1 << 24)

    def torch_logits(self, length: int) -> tuple[Slot[torch.Tensor], torch.Tensor]:
        """A slot with all but the last of so many tokens, and the logits after the last one."""
        slot, other = (self.slots.allocate(LENGTH + 1) for _ in range(2))
        for one in (slot, other):
            prompt = sequence_chunk(one, 0, IDS[: length - 1])
            self.decoder(build_batch([prompt], DEVICE, need_logits=False))
        last = sequence_chunk(other, length - 1, IDS[length - 1 : length])
        return slot, self.decoder(build_batch([last], DEVICE))[0]

    def decode(self, *ends: tuple[Slot[torch.Tensor], int], sampling: Sampling = GREEDY) -> torch.Tensor:
        rows = [StepRow(sequence_chunk(slot, n - 1, IDS[n - 1 : n]), sampling, 5, 3) for slot, n in ends]
        return self.step.run(rows)[0].clone()


@torch.inference_mode()
@pytest.mark.parametrize("exact", [True, False])
def test_the_logits_of_torch_operations(exact: bool) -> None:
    case = Case(exact)
    slot, expected = case.torch_logits(LENGTH)
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected, atol=1e-4)


@torch.inference_mode()
def test_rows_of_different_lengths() -> None:
    case = Case(False)
    long, expected_long = case.torch_logits(LENGTH)
    short, expected_short = case.torch_logits(4)
    logits = case.decode((short, 4), (long, LENGTH))
    assert torch.allclose(logits[0], expected_short, atol=1e-4)
    assert torch.allclose(logits[1], expected_long, atol=1e-4)


@torch.inference_mode()
def test_a_prompt_in_chunks() -> None:
    case = Case(True)
    _, expected = case.torch_logits(LENGTH)
    slot = case.slots.allocate(LENGTH + 1)
    case.step.prefill([sequence_chunk(slot, 0, IDS[:65])])
    case.step.prefill([sequence_chunk(slot, 65, IDS[65 : LENGTH - 1])])
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected, atol=1e-4)


@torch.inference_mode()
def test_a_step_leaves_its_tokens_for_the_next_one() -> None:
    case = Case(False)
    slot, _ = case.torch_logits(4)
    logits = case.decode((slot, 4))
    token = int(logits[0].argmax())
    assert int(case.step.tokens[0]) == token
    chunk = sequence_chunk(slot, 4, (0,))  # the host doesn't know the token
    ahead = case.step.run([StepRow(chunk, GREEDY, 5, 3)], case.step.tokens)[0][0].clone()
    known = sequence_chunk(slot, 4, (token,))
    assert torch.equal(ahead, case.step.run([StepRow(known, GREEDY, 5, 3)])[0][0])


@torch.inference_mode()
def test_random_numbers_are_those_of_the_host() -> None:
    case = Case(False)
    slot, _ = case.torch_logits(4)
    state = UniformStream(seed=2**63 - 25, choice=1).state
    sampling = Sampling(temperature=1.0)
    row = StepRow(sequence_chunk(slot, 3, IDS[3:4]), sampling, state, 2)
    logits, results = case.step.run([row])
    number = uniform(2**63 - 25, 1, 2)  # the token at position 4 is the third of a reply that starts at position 2
    assert float(case.step._settings[0, 4]) == number
    shares = logits[0].double().softmax(0).cumsum(0)
    assert int(results[0, device_filters.TOKEN]) == int((shares <= number).sum())


@ON_GPU
@torch.inference_mode()
def test_bits_depend_on_the_text_alone() -> None:
    case = Case(True, torch.bfloat16)
    whole, cut, other = (case.slots.allocate(LENGTH + 1) for _ in range(3))
    case.step.prefill([sequence_chunk(whole, 0, IDS[: LENGTH - 1]), sequence_chunk(other, 0, IDS[:9])])
    case.step.prefill([sequence_chunk(cut, 0, IDS[:13])])
    for end in range(14, LENGTH):
        case.decode((cut, end))
    alone = case.decode((whole, LENGTH))[0]
    assert torch.equal(case.decode((other, 10), (cut, LENGTH))[1], alone)
