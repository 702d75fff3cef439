"""The kernels of a decode step give the logits of torch's operations and of the library, and sample what the host
samples. Without a GPU they run in Triton's interpreter; what holds on a GPU alone is skipped there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed: the kernels of CUDA steps are not tested")

from palaver.engines.core.kv_cache import Slot, SlotAllocator  # noqa: E402
from palaver.engines.core.quantization_config import read_quantization  # noqa: E402
from palaver.engines.core.rng import UniformStream, uniform  # noqa: E402
from palaver.engines.core.runner import UnsupportedModel  # noqa: E402
from palaver.engines.torch import device_filters, mxfp4, sampling_kernels, step_weights  # noqa: E402
from palaver.engines.torch.batch import build_batch, sequence_chunk  # noqa: E402
from palaver.engines.torch.cuda_step import (  # noqa: E402
    MIN_PROMPT_TOKENS,
    SHORT_CHUNK,
    DecoderStep,
    MixedCosts,
    PromptLoad,
    StepRow,
)
from palaver.engines.torch.devices import TensorLayout, TensorMemory  # noqa: E402
from palaver.engines.torch.library_decoder import LibraryDecoder, kv_layout  # noqa: E402
from palaver.engines.torch.plain_decoder import FusedDecoder, Linear, PlainDecoder  # noqa: E402
from palaver.engines.torch.quantized_weights import QuantizedLinear, read_weight  # noqa: E402
from palaver.engines.torch.step_modules import read_step_model  # noqa: E402
from palaver.engines.torch.step_runner import StepProbe  # noqa: E402
from palaver.engines.torch.step_weights import NO_WINDOW, Experts, StepModel, TiledProjection  # noqa: E402
from palaver.engines.torch.tile_shapes import TileShape, VectorShape  # noqa: E402
from palaver.sampling import Sampling  # noqa: E402
from tests.engines.interpreter import EVERY_CASE  # noqa: E402
from tests.engines.quantized_files import FORMATS, KERNEL_FORMATS  # noqa: E402

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # the interpreter's
]
GREEDY = Sampling(temperature=0)
DIFFERENT_FORMATS = KERNEL_FORMATS if EVERY_CASE else ("fp8 blocks", "int8 channels", "int8 packed", "int4 zero points")
"""The kernels compute the others by the same branches."""
LENGTH = 70
"""Tokens: one more tile of attention than one."""
IDS = [(i * i * 7 + i * 13 + 5) % 128 for i in range(LENGTH)]
ON_GPU = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="needs a GPU: the interpreter's products round by their shapes"
)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take the likeliest tokens without the sampler's kernels, which take the interpreter many seconds a row."""

    def sample_rows(logits: torch.Tensor, *_: object) -> torch.Tensor:
        results = torch.zeros(len(logits), device_filters.WIDTH, dtype=torch.float64, device=logits.device)
        results[:, device_filters.TOKEN] = logits.argmax(1)
        return results

    if DEVICE.type == "cpu":
        monkeypatch.setattr(sampling_kernels, "sample_rows", sample_rows)
        monkeypatch.setattr(sampling_kernels.BlockLists, "compute", lambda *_: None)


def decoder_parts(dtype: torch.dtype = torch.float32, size: int = 64) -> PlainDecoder:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=size // 32,
        num_key_value_heads=1 if size == 64 else 2,
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


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "eos_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": 40}),
    "gemma2": ("Gemma2Config", {"sliding_window": 40, "layer_types": KINDS, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 40, "layer_types": KINDS, "query_pre_attn_scalar": 16}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 40, "layer_types": KINDS, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "gpt_oss_mxfp4": ("GptOssConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 192}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 6, "norm_topk_prob": False}),
    "mixed_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "phi3": ("Phi3Config", {"sliding_window": 40, "rope_scaling": None}),
    "odd_vocabulary": ("MistralConfig", {"sliding_window": None, "vocab_size": 131}),
}


def library_model(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    kind, special = MODELS[name]
    config = getattr(transformers, kind)(**SMALL | special)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 0.5, 0.3 if parameter.dim() > 1 else 0.1)
        if name.endswith("mxfp4"):
            for layer in model.model.layers:
                for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                    weight.copy_(random_fp4(weight.shape))
    return model


def random_fp4(shape: torch.Size) -> torch.Tensor:
    """[experts, inputs, outputs]: numbers of four bits, with an exponent for each 32 inputs."""
    numbers = torch.tensor([sign * size for size in mxfp4.MAGNITUDES for sign in (1, -1)])[torch.randint(16, shape)]
    exponents = torch.randint(-6, -2, (shape[0], shape[1] // 32, 1, shape[2]))
    return torch.ldexp(numbers.view(shape[0], -1, 32, shape[2]), exponents).view(shape)


def quantize(parts: PlainDecoder, form: str) -> PlainDecoder:
    """The decoder with its linear layers in a format of `quantized_files.py`."""
    store, settings = FORMATS[form]
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None

    def quantized(linear: Any) -> QuantizedLinear:
        stored, _ = store(linear.weight.t().float().cpu().contiguous())
        found = {f"x.{name}": tensor.to(DEVICE) for name, tensor in stored.items()}
        packed = read_weight(quantization, "x", found.__getitem__).pack()
        assert packed is not None
        return QuantizedLinear(packed, linear.bias, linear.weight.dtype)

    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    for index, layer in enumerate(parts.layers):
        changes: dict[str, Any] = {name: quantized(getattr(layer, name)) for name in names}
        parts.layers[index] = replace(layer, **changes)
    return parts


class Case:
    """A step and the slots it computes in."""

    def __init__(
        self, exact: bool, dtype: torch.dtype = torch.float32, name: str | None = None, form: str | None = None
    ) -> None:
        """`name`: of a model of the library; None: a plain decoder, quantised in a `form`."""
        self.decoder: Any
        if name is None:
            parts = decoder_parts(dtype) if form is None else quantize(decoder_parts(dtype, 128), form)
            shape = (parts.num_kv_heads, 32)
            self.layout = TensorLayout(((shape, shape),), TensorMemory(dtype, DEVICE))
            self.decoder = FusedDecoder(parts)
            self.model = StepModel.of(parts)
        else:
            library = library_model(name, dtype)
            self.layout = kv_layout(library, torch.tensor(IDS[:4], device=DEVICE))
            self.decoder = LibraryDecoder(library)
            self.decoder.attach()
            self.model = read_step_model(library, library.model, self.decoder, self.layout, IDS[:48], 256)
        pdl = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
        self.step = DecoderStep(self.model, exact, None, 4, pdl=pdl)
        self.slots = SlotAllocator(self.layout, 1 << 24)

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


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
@pytest.mark.parametrize("exact", [True, False])
def test_the_logits_of_torch_operations(exact: bool) -> None:
    case = Case(exact)
    slot, expected = case.torch_logits(LENGTH)
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected, atol=1e-4)


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
@pytest.mark.parametrize("form", DIFFERENT_FORMATS)
def test_the_logits_of_quantised_weights(form: str) -> None:
    """Decoded, and after a prompt in chunks."""
    case = Case(True, form=form)
    slot, expected = case.torch_logits(LENGTH)
    scale = float(expected.abs().max())
    assert case.model.quantized
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected, atol=1e-4 * scale)
    other = case.slots.allocate(LENGTH + 1)
    case.step.prefill([sequence_chunk(other, 0, IDS[:13])])
    case.step.prefill([sequence_chunk(other, 13, IDS[13 : LENGTH - 1])])
    assert torch.allclose(case.decode((other, LENGTH))[0], expected, atol=1e-4 * scale)


@torch.inference_mode()
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [64, 640])
@pytest.mark.parametrize("kind", ["vector", "tile", "blocks"])
def test_products_with_norms_and_biases(kind: str, inputs: int, gated: bool) -> None:
    """Of one step over the inputs and of several. What is not gated is added to a residual."""
    dtype, error = (torch.bfloat16, 0.05) if DEVICE.type == "cuda" else (torch.float32, 1e-4)
    generator, step, outputs, rows = torch.Generator().manual_seed(1), Case(True, dtype).step, 192, 1

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(DEVICE, dtype)

    both = outputs * (2 if gated else 1)
    weight, bias = random(inputs, both) / 8, random(both)
    projection = TiledProjection.of(Linear(weight, bias), gated)
    x, gain, out, next_gain = random(5, inputs), random(inputs), random(5, outputs), random(outputs)
    normed = x.float() * (x.float().square().mean(1, keepdim=True) + step.model.epsilon).rsqrt() * gain.float()
    expected = normed @ weight.float() + bias.float()
    if gated:
        expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    else:
        expected = expected + out.float()
    if kind == "vector":
        projection = replace(projection, vector=VectorShape(4, 256 if inputs > 256 else 64, 4))
        step._matvec(projection, x[:1], out[:1], gain=gain, gated=gated, residual=not gated)
    else:
        rows = 5
        tile = TileShape(32, 64, 64, 3, 4, 1) if kind == "tile" else TileShape(64, 96 if gated else 192, 64, 3)
        projection = replace(projection, tile=tile, few_tile=tile, prefill_tiles=((0, tile),))
        squares = x.double().square().unflatten(1, (-1, 64)).sum(2)
        scaled, sums = (
            torch.zeros_like(out),
            torch.zeros(5, outputs // tile.outputs, dtype=torch.float64, device=DEVICE),
        )
        residual = None if gated else (next_gain, scaled, sums)
        prefill = kind == "blocks"
        step._linear(projection, x * gain, out, squares, residual, gated=gated, prefill=prefill)
        if not gated:
            assert torch.allclose(scaled, out * next_gain, rtol=1e-2)
            assert torch.allclose(sums.sum(1), out.double().square().sum(1))
    assert torch.allclose(out[:rows].float(), expected[:rows], atol=error * float(expected.abs().max()))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_a_model_with_one_quantised_layer_is_computed_by_tiles(name: str) -> None:
    """The kernels for a single row read floats alone."""
    parts, changed = decoder_parts(size=128), quantize(decoder_parts(size=128), "int8 channels")
    change: dict[str, Any] = {name: getattr(changed.layers[0], name)}
    parts.layers[0] = replace(parts.layers[0], **change)
    assert StepModel.of(parts).quantized
    assert not StepModel.of(decoder_parts(size=128)).quantized


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
@pytest.mark.parametrize("form", ["fp8 blocks", "int4 zero points", "int8 channels"])
def test_the_logits_of_unpacked_weights(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose second chunk is long, and one whose long chunk is in one pass with a reply."""
    monkeypatch.setattr(step_weights, "PACKED_ROWS", 20)
    case = Case(True, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, form=form)
    reply, expected = case.torch_logits(LENGTH)
    error = (0.05 if DEVICE.type == "cuda" else 1e-4) * float(expected.abs().max())
    slot, mixed = (case.slots.allocate(LENGTH + 1) for _ in range(2))
    case.step.prefill([sequence_chunk(slot, 0, IDS[:13])])
    assert not case.step._unpacked.any()
    case.step.prefill([sequence_chunk(slot, 13, IDS[13 : LENGTH - 1])])
    assert case.step._unpacked.any()
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected.float(), atol=error)
    rows = [StepRow(sequence_chunk(one, LENGTH - 1, IDS[LENGTH - 1 :]), GREEDY, 5, 3) for one in (reply, mixed)]
    logits = case.step.run(rows, prompts=[sequence_chunk(mixed, 0, IDS[: LENGTH - 1])])[0]
    assert torch.allclose(logits, expected.float(), atol=error)


@torch.inference_mode()
@pytest.mark.parametrize("form", KERNEL_FORMATS)
def test_what_is_unpacked_are_the_numbers_before_their_scales(form: str) -> None:
    case = Case(True, form=form)
    packed = case.model.layers[0].qkv.packed
    assert packed is not None
    case.step._unpack(packed)
    numbers = case.step._unpacked[: packed.outputs * packed.inputs].view(packed.outputs, packed.inputs)
    groups = numbers.unflatten(1, (-1, packed.group)) * packed.scales.t()[..., None]
    assert torch.equal(groups.flatten(1), packed.dequantize(torch.float32))


@torch.inference_mode()
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", KERNEL_FORMATS)
def test_products_of_unpacked_weights_have_the_bits_of_packed_ones(
    form: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole numbers, whose sums are exact also in the interpreter, but for those of 8-bit floats."""
    store, settings = FORMATS[form]
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    outputs, inputs, rows = 256, 1536, 200 if DEVICE.type == "cuda" else 3
    torch.manual_seed(1)
    stored, _ = store(torch.randn(outputs, inputs))
    found = {f"x.{name}": tensor.to(DEVICE) for name, tensor in stored.items()}
    packed = read_weight(quantization, "x", found.__getitem__).pack()
    assert packed is not None
    linear = QuantizedLinear(packed, None, dtype)
    case = Case(True, dtype, form=form)
    case.step._unpacked = torch.zeros(outputs * inputs, dtype=dtype, device=DEVICE)
    case.step._partials = torch.zeros(4 * outputs * 256, device=DEVICE)
    case.step._counters = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
    x = torch.randint(-2, 3, (rows, inputs), device=DEVICE).to(dtype)
    if DEVICE.type == "cuda":
        x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)

    def compute(packed_rows: int, prefill: bool = True) -> torch.Tensor:
        monkeypatch.setattr(step_weights, "PACKED_ROWS", packed_rows)
        projection = TiledProjection.of(linear, gated)
        assert projection.split == (1 if gated else 2)
        out = torch.zeros(rows, projection.outputs, dtype=dtype, device=DEVICE)
        case.step._linear(projection, x, out, gated=gated, prefill=prefill)
        return out

    decoded, from_packed, from_unpacked = compute(1000, prefill=False), compute(1000), compute(1)
    assert case.step._unpacked.any()
    if DEVICE.type == "cuda" or not form.startswith("fp8"):
        assert torch.equal(decoded, from_packed)
        assert torch.equal(from_unpacked, from_packed)
    assert torch.allclose(from_unpacked, from_packed, rtol=1e-4, atol=1e-4 * float(from_packed.abs().max()))


@ON_GPU
@torch.inference_mode()
@pytest.mark.parametrize("packed_rows", [128, 40])
@pytest.mark.parametrize("form", KERNEL_FORMATS)
def test_bits_of_quantised_weights_depend_on_the_text_alone(
    form: str, packed_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one part of a prompt is computed with packed weights, and another one with unpacked ones."""
    monkeypatch.setattr(step_weights, "PACKED_ROWS", packed_rows)
    case = Case(True, torch.bfloat16, form=form)
    probe = StepProbe(case.step, case.layout, IDS)
    probe.compare(case.decoder)
    assert probe.depends_on_text_alone()


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_the_librarys_models(name: str, exact: bool) -> None:
    """One sequence alone, then beside another."""
    case = Case(exact, name=name)
    long, expected = case.torch_logits(LENGTH)
    scale = float(expected.abs().max())
    assert torch.allclose(case.decode((long, LENGTH))[0], expected, atol=1e-4 * scale)
    short, expected_short = case.torch_logits(4)
    logits = case.decode((short, 4), (long, LENGTH))
    assert torch.allclose(logits[0], expected_short, atol=1e-4 * scale)
    assert torch.allclose(logits[1], expected, atol=1e-4 * scale)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_of_the_librarys_models_in_chunks(name: str) -> None:
    case = Case(True, name=name)
    _, expected = case.torch_logits(LENGTH)
    slot, other = (case.slots.allocate(LENGTH + 1) for _ in range(2))
    case.step.prefill([sequence_chunk(slot, 0, IDS[:13]), sequence_chunk(other, 0, IDS[:5])])
    case.step.prefill([sequence_chunk(slot, 13, IDS[13 : LENGTH - 1])])
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected, atol=1e-4 * float(expected.abs().max()))


@torch.inference_mode()
def test_what_is_read_of_the_librarys_models() -> None:
    gemma, oss = (Case(True, name=name).model for name in ("gemma3", "gpt_oss"))
    assert [layer.attention.window for layer in gemma.layers] == [40, NO_WINDOW]
    assert [layer.attention.rotary for layer in gemma.layers] == [1, 0]
    assert gemma.embedding_scale == 8.0
    assert all(layer.attention.sinks is not None for layer in oss.layers)
    assert oss.experts is not None
    assert oss.activation == "clamped_swiglu"
    assert not oss.experts.narrow
    narrow = Case(True, name="gpt_oss_mxfp4").model.experts
    assert narrow is not None
    assert narrow.gate_up.exponents is not None
    assert narrow.down.exponents is not None
    mixed = Case(True, name="mixed_moe").model
    assert [isinstance(layer.feed_forward, Experts) for layer in mixed.layers] == [False, True]


@torch.inference_mode()
@pytest.mark.parametrize("biased", [True, False])
def test_a_model_with_another_router_is_refused(biased: bool) -> None:
    library = library_model("qwen3_moe", torch.float32)
    router = library.model.layers[1].mlp.gate

    def choose_by_bias(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = (logits + torch.arange(6, device=DEVICE)).topk(3).indices
        return logits, logits.softmax(1).gather(1, chosen), chosen

    def weigh_by_sigmoid(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        best = logits.sigmoid().topk(3)
        return logits, best.values, best.indices

    route = choose_by_bias if biased else weigh_by_sigmoid
    router.forward = lambda x: route(x.reshape(-1, 64) @ router.weight.t())
    layout = kv_layout(library, torch.tensor(IDS[:4], device=DEVICE))
    decoder = LibraryDecoder(library)
    decoder.attach()
    with pytest.raises(UnsupportedModel, match="another router"):
        read_step_model(library, library.model, decoder, layout, IDS[:48], 256)


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
def test_the_probe_finds_wrong_passes_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(exact=False)
    probe = StepProbe(case.step, case.layout, IDS)
    probe.compare(case.decoder)
    run, prefill = case.step.run, case.step.prefill

    def wrong_beside_prompts(rows: Any, sources: Any = None, prompts: Any = ()) -> Any:
        logits, results = run(rows, sources, prompts)
        return (logits.flip(1) if prompts else logits), results

    def wrong_prompts(chunks: Any) -> None:
        prefill([replace(chunk, ids=chunk.ids[::-1]) for chunk in chunks])

    for name, wrong, right in ("run", wrong_beside_prompts, run), ("prefill", wrong_prompts, prefill):
        monkeypatch.setattr(case.step, name, wrong)
        with pytest.raises(UnsupportedModel):
            probe.compare(case.decoder)
        monkeypatch.setattr(case.step, name, right)


@torch.inference_mode()
def test_rows_of_different_lengths() -> None:
    case = Case(False)
    long, expected_long = case.torch_logits(LENGTH)
    short, expected_short = case.torch_logits(4)
    logits = case.decode((short, 4), (long, LENGTH))
    assert torch.allclose(logits[0], expected_short, atol=1e-4)
    assert torch.allclose(logits[1], expected_long, atol=1e-4)


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
def test_a_prompt_in_chunks() -> None:
    case = Case(True)
    _, expected = case.torch_logits(LENGTH)
    slot = case.slots.allocate(LENGTH + 1)
    case.step.prefill([sequence_chunk(slot, 0, IDS[:65])])
    case.step.prefill([sequence_chunk(slot, 65, IDS[65 : LENGTH - 1])])
    assert torch.allclose(case.decode((slot, LENGTH))[0], expected, atol=1e-4)


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
def test_a_step_leaves_its_tokens_for_the_next_one() -> None:
    case = Case(False)
    slot, _ = case.torch_logits(4)
    logits = case.decode((slot, 4))
    token = int(logits[0].argmax())
    chunk = sequence_chunk(slot, 4, (0,))  # the host doesn't know the token
    ahead = case.step.run([StepRow(chunk, GREEDY, 5, 3)], [0])[0][0].clone()
    known = sequence_chunk(slot, 4, (token,))
    assert torch.equal(ahead, case.step.run([StepRow(known, GREEDY, 5, 3)])[0][0])


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
def test_rows_take_the_tokens_of_other_rows() -> None:
    case = Case(False)
    slots = [case.torch_logits(length)[0] for length in (4, 9, 20)]
    tokens = case.decode(*zip(slots, (4, 9, 20), strict=True)).argmax(1).tolist()
    rows = [StepRow(sequence_chunk(slots[i], n, (0,)), GREEDY, 5, 3) for i, n in ((2, 20), (1, 9))]
    ahead = case.step.run(rows, [2, 1])[0].clone()  # the first row has left
    known = [StepRow(sequence_chunk(slots[i], n, (tokens[i],)), GREEDY, 5, 3) for i, n in ((2, 20), (1, 9))]
    assert torch.equal(ahead, case.step.run(known)[0])


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
@pytest.mark.parametrize("name", [None, "gemma3", "gpt_oss_mxfp4", "mixed_moe"])
@pytest.mark.parametrize("begun", [5, SHORT_CHUNK + 5])
def test_prompts_beside_rows(name: str | None, begun: int) -> None:
    """One pass computes the next token of a reply, the end of one prompt with its last token, and parts of others. Few
    tokens are computed as rows are."""
    case = Case(True, name=name)
    reply, expected_reply = case.torch_logits(40)
    _, expected = case.torch_logits(LENGTH)
    error = 1e-4 * max(1.0, float(expected.abs().max()))
    (ends, _), (goes_on, _), begins = case.torch_logits(66), case.torch_logits(61), case.slots.allocate(LENGTH + 1)
    last = [(reply, 40), (ends, LENGTH)]
    rows = [StepRow(sequence_chunk(slot, n - 1, IDS[n - 1 : n]), GREEDY, 5, 3) for slot, n in last]
    chunks = [
        sequence_chunk(ends, 65, IDS[65 : LENGTH - 1]),
        sequence_chunk(begins, 0, IDS[:begun]),
        sequence_chunk(goes_on, 60, IDS[60 : LENGTH - 1]),
    ]
    logits = case.step.run(rows, prompts=chunks)[0].clone()
    assert torch.allclose(logits[0], expected_reply, atol=error)
    assert torch.allclose(logits[1], expected, atol=error)
    logits = case.decode((begins, begun + 1), (goes_on, LENGTH))
    assert torch.allclose(logits[0], case.torch_logits(begun + 1)[1], atol=error)
    assert torch.allclose(logits[1], expected, atol=error)


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
@pytest.mark.parametrize("exact", [True, False])
def test_rows_that_follow_each_other_in_one_text(exact: bool) -> None:
    """Drafts are verified: rows across a tile of attention, beside another text."""
    case = Case(exact)
    drafted, _ = case.torch_logits(63)
    other, expected_other = case.torch_logits(9)
    expected = [case.torch_logits(length)[1] for length in range(63, 66)]
    ends = [*((drafted, length) for length in range(63, 66)), (other, 9)]
    rows = [StepRow(sequence_chunk(slot, n - 1, IDS[n - 1 : n]), GREEDY, 5, 3) for slot, n in ends]
    logits = case.step.verify(rows)[0]
    for found, wanted in zip(logits, [*expected, expected_other], strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
def test_a_repeated_step() -> None:
    case = Case(False)
    slot, _ = case.torch_logits(4)
    token = int(case.decode((slot, 4))[0].argmax())
    repeated = case.step.repeat()[0][0].clone()
    known = StepRow(sequence_chunk(slot, 4, (token,)), GREEDY, 5, 3)
    assert torch.equal(repeated, case.step.run([known])[0][0])


@pytest.mark.usefixtures("greedy")
@torch.inference_mode()
def test_tokens_of_a_step_are_replaced() -> None:
    case = Case(False)
    slots = [case.torch_logits(length)[0] for length in (4, 9)]
    case.decode(*zip(slots, (4, 9), strict=True))
    results = torch.zeros(2, device_filters.WIDTH, dtype=torch.float64, device=DEVICE)
    results[:, device_filters.TOKEN] = torch.tensor([17, 100])
    case.step.replace_tokens(results)
    repeated = case.step.repeat()[0].clone()
    known = [
        StepRow(sequence_chunk(slot, n, (token,)), GREEDY, 5, 3)
        for slot, n, token in zip(slots, (4, 9), (17, 100), strict=True)
    ]
    assert torch.equal(repeated, case.step.run(known)[0])


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
    assert int(results()[0, device_filters.TOKEN]) == int((shares <= number).sum())


@torch.inference_mode()
def test_known_logits_are_sampled_as_those_of_a_step() -> None:
    case = Case(False, name="odd_vocabulary")
    slots = [case.torch_logits(length)[0] for length in (4, 9)]
    state = UniformStream(seed=7, choice=0).state
    rows = [
        StepRow(sequence_chunk(slot, n - 1, IDS[n - 1 : n]), Sampling(temperature=1.0), state, 3)
        for slot, n in zip(slots, (4, 9), strict=True)
    ]
    logits, results = case.step.run(rows)
    known, expected = [row[None].clone() for row in logits], results()
    after = case.step.repeat()[0].clone()
    again, sampled = case.step.resume(rows, known)
    assert torch.equal(again, torch.cat(known))
    assert np.array_equal(sampled(), expected)
    assert torch.equal(case.step.repeat()[0], after)


@ON_GPU
@torch.inference_mode()
@pytest.mark.parametrize("name", [None, *MODELS])
def test_bits_depend_on_the_text_alone(name: str | None) -> None:
    case = Case(True, torch.bfloat16, name)
    whole, cut, other = (case.slots.allocate(LENGTH + 1) for _ in range(3))
    case.step.prefill([sequence_chunk(whole, 0, IDS[: LENGTH - 1]), sequence_chunk(other, 0, IDS[:9])])
    case.step.prefill([sequence_chunk(cut, 0, IDS[:13])])
    for end in range(14, LENGTH):
        case.decode((cut, end))
    alone = case.decode((whole, LENGTH))[0]
    assert torch.equal(case.decode((other, 10), (cut, LENGTH))[1], alone)
    mixed = case.slots.allocate(LENGTH + 1)
    case.step.prefill([sequence_chunk(mixed, 0, IDS[:50])])
    rows = [
        StepRow(sequence_chunk(slot, n - 1, IDS[n - 1 : n]), GREEDY, 5, 3) for slot, n in ((other, 11), (mixed, LENGTH))
    ]
    assert torch.equal(case.step.run(rows, prompts=[sequence_chunk(mixed, 50, IDS[50 : LENGTH - 1])])[0][1], alone)


def test_prompts_take_as_many_tokens_as_their_time_allows() -> None:
    costs = MixedCosts(step=0.006, mixed={128: 0.0085, 512: 0.0148, 1024: 0.025}, pair=1e-9)

    def tokens(start: int, seconds: float) -> int:
        return costs.prompt_tokens(PromptLoad(1, 5000, start), 1, seconds, 32)

    assert tokens(0, 0.01) == 480
    assert tokens(0, 0.02) == 992
    assert tokens(0, 0.003) == 96
    assert tokens(0, 0.001) == MIN_PROMPT_TOKENS
    assert tokens(10_000, 0.01) == 96  # a pass of 512 rows would have time for 120
    assert tokens(1_000_000, 0.01) == MIN_PROMPT_TOKENS


def test_prompts_take_as_many_tokens_as_let_all_wait_least() -> None:
    """Where few rows more cost little, a single prompt beside many replies is computed in small parts."""
    costs = MixedCosts(0.00475, {64: 0.0061, 128: 0.0061, 256: 0.0089, 512: 0.0125, 1024: 0.0242}, pair=0.0)

    def tokens(prompts: int, left: int, replies: int) -> int:
        return costs.prompt_tokens(PromptLoad(prompts, left, 0), replies, 0.01, 32)

    assert tokens(1, 512, 30) == 96
    assert tokens(4, 2048, 28) == 480  # prompts wait, too
    assert tokens(1, 512, 1) == 480
    assert tokens(1, 20, 30) == 20
    assert tokens(0, 0, 30) == MIN_PROMPT_TOKENS  # for prompts that join
