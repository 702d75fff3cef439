"""A LoRA adapter is merged when the model is loaded: the replies are those of the adapted model."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaver.engines.torch import load
from palaver.errors import BrokenModel, UnsafeWeights
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt, Step
from palaver.sampling import Sampling

peft = pytest.importorskip("peft", reason="peft is not installed: adapters are not tested")


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


async def generate_ids(folder: Path, adapter: Path | None) -> list[int]:
    engine = load(folder, vocabulary=load_tokenizer(folder).vocabulary, adapter=adapter)
    try:
        async with engine.generate(Prompt((5, 6, 7)), Sampling(temperature=0, max_tokens=12)) as steps:
            return [step.token_id async for step in steps if isinstance(step, Step)]
    finally:
        await engine.close()


async def test_an_adapter_changes_the_replies_as_peft_would(tiny_model: Path, adapter: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain = await generate_ids(tiny_model, None)
    adapted = await generate_ids(tiny_model, adapter)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(adapter))
    with torch.inference_mode():
        ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert adapted == ids[: len(adapted)]
    assert adapted != plain


async def test_what_is_no_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="no adapter"):
        await generate_ids(tiny_model, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UnsafeWeights):
        await generate_ids(tiny_model, tmp_path)
