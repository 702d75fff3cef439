"""Tiny random text-to-speech models: they say nothing that could be understood, but they say it right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AUDIO_TOKENS = {
    "audio_prompt_token": "<voice>",
    "audio_latent_token": "<frame>",
    "audio_prompt_bos_token": "<begin-voice>",
    "audio_bos_token": "<begin>",
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<begin-voice><voice>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}<begin>"
)
LATENT = 8


def make_vits(folder: Path, speakers: int = 1) -> Path:
    import torch
    from transformers import VitsConfig, VitsModel

    torch.manual_seed(0)
    letters = [" ", *"abcdefghijklmnopqrstuvwxyz'-"]
    config = VitsConfig(
        vocab_size=len(letters) + 2,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        flow_size=16,
        spectrogram_bins=9,
        upsample_initial_channel=32,
        upsample_rates=[8, 8],
        upsample_kernel_sizes=[16, 16],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=2,
        posterior_encoder_num_wavenet_layers=2,
        duration_predictor_num_flows=2,
        num_speakers=speakers,
        speaker_embedding_size=8 if speakers > 1 else 0,
        sampling_rate=16_000,
    )
    VitsModel(config).save_pretrained(folder)
    vocabulary = {letter: place for place, letter in enumerate(["<pad>", *letters, "<unk>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    settings = {"tokenizer_class": "VitsTokenizer", "language": "eng", "phonemize": False, "normalize": True}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "add_blank": True, "pad_token": "<pad>", "unk_token": "<unk>"}), encoding="utf-8"
    )
    return folder


def make_pocket(folder: Path, voices: tuple[str, ...] = ()) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import (
        PocketTTSAudioTokenizerConfig,
        PocketTTSAudioTokenizerModel,
        PocketTTSConfig,
        PocketTTSFeatureExtractor,
        PocketTTSForConditionalGeneration,
        PocketTTSProcessor,
    )

    torch.manual_seed(0)
    codec = PocketTTSAudioTokenizerModel(
        PocketTTSAudioTokenizerConfig(
            hidden_size=16,
            num_filters=4,
            upsample_groups=16,
            num_hidden_layers=1,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            latent_dim=LATENT,
        )
    ).eval()
    tokenizer = _letters()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in AUDIO_TOKENS.items()}
    config = PocketTTSConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        latent_dim=LATENT,
        pad_token_id=tokenizer.pad_token_id,
        flow_head_config={"hidden_size": 16, "num_hidden_layers": 1, "latent_dim": LATENT, "condition_dim": 16},
        **{f"{name}_id": id for name, id in ids.items()},
    )
    PocketTTSForConditionalGeneration(config).save_pretrained(folder)
    codec.save_pretrained(folder / "codec")
    codec = PocketTTSAudioTokenizerModel.from_pretrained(folder / "codec")
    processor = PocketTTSProcessor(PocketTTSFeatureExtractor(), tokenizer, codec, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    (folder / "voices").mkdir()
    for place, voice in enumerate(voices):
        torch.manual_seed(place)
        save_file({"latents": torch.randn(5, LATENT)}, folder / "voices" / f"{voice}.safetensors")
    return folder


def _letters() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,!?'-", *AUDIO_TOKENS.values()]
    backend = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(letters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=AUDIO_TOKENS,
    )
