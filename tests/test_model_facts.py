"""What the files of a model say of it before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model_loader import ModelLoader
from palaver.models.disk import read_facts
from palaver.models.resolver import ResolvedModel, resolve_folder, resolve_model
from tests.gguf_files import convert_qwen3
from tests.mmproj_files import KINDS, make_projector

TEXT = {"max_position_embeddings": 4096}
SEES = {"text_config": TEXT, "vision_config": {}}
HEARS = {"text_config": TEXT, "audio_config": {}}


@pytest.mark.parametrize(
    ("config", "media"),
    [
        (TEXT, ()),
        (SEES, ("image", "video")),
        (HEARS, ("audio",)),
        ({**SEES, "audio_config": None}, ("image", "video")),
        ({"thinker_config": {**SEES, **HEARS}, "talker_config": {}}, ("image", "audio", "video")),
    ],
)
def test_a_configuration_says_what_the_model_takes(
    config: dict[str, object], media: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_facts(ResolvedModel(tmp_path))
    assert (facts.media, facts.context_length) == (media, 4096)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_projector_says_what_a_gguf_model_takes(kind: str, tmp_path: Path) -> None:
    """One beside the file, and one that an option names."""
    media = ("image", "video") if KINDS[kind] == "image" else ("audio",)
    file = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf")
    (tmp_path / "other").mkdir()
    elsewhere = make_projector(tmp_path / "other" / "mmproj.gguf", kind, 256)
    assert read_facts(resolve_model(str(file))).media == ()
    card = await ModelLoader(LoadOptions(mmproj=elsewhere)).describe(str(file))
    assert (card.media, card.context_length) == (media, 8192)
    elsewhere.rename(tmp_path / "mmproj-sprout.gguf")
    assert read_facts(resolve_model(str(file))).media == media
