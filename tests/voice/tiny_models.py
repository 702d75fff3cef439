"""Tiny random models of speech, both ways: what they say and hear makes no sense, but it is always the same."""

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


LANGUAGES = ("en", "de", "fr")
TIMESTAMPS = 101


def make_whisper(folder: Path, languages: tuple[str, ...] = LANGUAGES, seconds: int = 2) -> Path:
    """Windows of `seconds`; with several languages it can translate."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    tokenizer = WhisperTokenizer(vocab={**vocabulary, "<|endoftext|>": len(letters)}, merges=[])
    marks = ["<|startoftranscript|>", *(f"<|{one}|>" for one in languages), "<|translate|>", "<|transcribe|>"]
    marks += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens([f"<|{place * 0.02:.2f}|>" for place in range(TIMESTAMPS)])
    id_of = tokenizer.convert_tokens_to_ids
    end, start = id_of("<|endoftext|>"), id_of("<|startoftranscript|>")
    positions = {"max_source_positions": 50 * seconds, "max_target_positions": 64}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
    config = WhisperConfig(vocab_size=len(tokenizer), **layers, **positions, **sizes, **ids, init_std=0.5)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        **ids,
        max_length=24,
        prev_sot_token_id=id_of("<|startofprev|>"),
        no_timestamps_token_id=id_of("<|notimestamps|>"),
        max_initial_timestamp_index=50,
        is_multilingual=len(languages) > 1,
        lang_to_id={f"<|{one}|>": id_of(f"<|{one}|>") for one in languages},
        task_to_id={"translate": id_of("<|translate|>"), "transcribe": id_of("<|transcribe|>")},
        suppress_tokens=[],
        begin_suppress_tokens=[],
        return_timestamps=False,
        alignment_heads=[[0, 0], [0, 1]],
        median_filter_width=3,
    )
    model.save_pretrained(folder)
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=seconds)
    WhisperProcessor(features, tokenizer).save_pretrained(folder)
    return folder


def make_moonshine(folder: Path) -> Path:
    import torch
    from transformers import (
        MoonshineConfig,
        MoonshineForConditionalGeneration,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2Processor,
    )

    torch.manual_seed(0)
    tokenizer = _letters("<s>", "</s>", bos_token="<s>", eos_token="</s>")
    config = MoonshineConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        encoder_num_key_value_heads=2,
        decoder_num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        initializer_range=0.5,
    )
    model = MoonshineForConditionalGeneration(config)
    model.generation_config.max_length = 24
    model.save_pretrained(folder)
    features = Wav2Vec2FeatureExtractor(sampling_rate=16_000, do_normalize=False, return_attention_mask=True)
    Wav2Vec2Processor(features, tokenizer).save_pretrained(folder)
    return folder


def make_parakeet(folder: Path, decoder: str) -> Path:
    """`decoder`: ctc, rnnt or tdt. Its processor's files are written by hand: the library needs librosa."""
    import torch
    from transformers import (
        ParakeetCTCConfig,
        ParakeetForCTC,
        ParakeetForRNNT,
        ParakeetForTDT,
        ParakeetRNNTConfig,
        ParakeetTDTConfig,
    )

    torch.manual_seed(0)
    tokenizer = _letters("<blank>")
    encoder = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "subsampling_conv_channels": 8,
        "num_mel_bins": 16,
        "initializer_range": 0.5,
    }
    blank = tokenizer.convert_tokens_to_ids("<blank>")
    shared = {"vocab_size": len(tokenizer), "encoder_config": encoder, "initializer_range": 0.5}
    transducer = {**shared, "pad_token_id": tokenizer.pad_token_id, "blank_token_id": blank}
    small = {"decoder_hidden_size": 16, "num_decoder_layers": 1, "max_symbols_per_step": 2}
    match decoder:
        case "ctc":
            model: Any = ParakeetForCTC(ParakeetCTCConfig(**shared, pad_token_id=tokenizer.pad_token_id))
        case "rnnt":
            model = ParakeetForRNNT(ParakeetRNNTConfig(**transducer, **small))
        case _:
            model = ParakeetForTDT(ParakeetTDTConfig(**transducer, **small))
    if decoder != "ctc":
        model.generation_config.decoder_start_token_id = blank
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "ParakeetTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    features = {"feature_extractor_type": "ParakeetFeatureExtractor", "feature_size": 16, "sampling_rate": 16_000}
    (folder / "preprocessor_config.json").write_text(json.dumps(features), encoding="utf-8")
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_omni(folder: Path, speakers: tuple[str, ...] = ("Chelsie", "Ethan")) -> Path:
    """A Qwen2.5-Omni model with its talker."""
    import torch
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = _letters("<s>", "</s>", "<text>", "</text>", "<none>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    id_of = tokenizer.convert_tokens_to_ids
    size = len(tokenizer)
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    decoder = {**layers, "num_key_value_heads": 2, "rope_parameters": rope, "max_position_embeddings": 1024}
    places = {"audio_token_index": size + 1, "image_token_index": size + 2, "video_token_index": size + 3}
    codes = {f"tts_codec_{name}_token_id": 16 + place for place, name in enumerate(("start", "end", "pad", "mask"))}
    config = Qwen2_5OmniConfig(
        thinker_config={
            **places,
            "vision_start_token_id": size + 4,
            "vision_end_token_id": size + 5,
            "text_config": {**decoder, "vocab_size": size + 8, "eos_token_id": id_of("</s>")},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 16,
                "fullatt_block_indexes": [0],
            },
            "audio_config": {
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "d_model": 16,
                "output_dim": 16,
            },
        },
        talker_config={
            **decoder,
            **places,
            **codes,
            "vocab_size": 24,
            "embedding_size": 16,
            "head_dim": 8,
            "tts_text_start_token_id": id_of("<text>"),
            "tts_text_end_token_id": id_of("</text>"),
            "tts_text_pad_token_id": id_of("<none>"),
        },
        token2wav_config={
            "dit_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "emb_dim": 16,
                "head_dim": 8,
                "look_ahead_layers": [0],
                "look_backward_layers": [0],
                "num_embeds": 24,
                "enc_emb_dim": 16,
                "enc_dim": 16,
                "enc_channels": [16, 16, 16, 16, 48],
                "enc_attention_channels": 8,
                "enc_se_channels": 8,
            },
            "bigvgan_config": {
                "upsample_initial_channel": 64,
                "resblock_kernel_sizes": [3],
                "resblock_dilation_sizes": [[1, 3, 5]],
            },
        },
    )
    model = Qwen2_5OmniForConditionalGeneration(config)
    model.generation_config.eos_token_id = id_of("</s>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    people = {
        name: {"bos_token": id_of("<s>"), "cond": torch.randn(1, 16), "ref_mel": torch.randn(1, 20, 80)}
        for name in speakers
    }
    torch.save(people, folder / "spk_dict.pt")
    return folder


QWEN3_TEMPLATE = (
    "{% for message in messages %}<s><{{ message['role'] }}> {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s><assistant> {% endif %}"
)


def make_qwen3_omni(folder: Path, speakers: tuple[str, ...] = ("chelsie", "ethan")) -> Path:
    """A Qwen3-Omni model with its talker. The last 1,024 codes of a talker are control codes."""
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = _letters("<s>", "</s>", "<user>", "<assistant>", "<none>", "<text>", "</text>", eos_token="</s>")
    tokenizer.add_tokens(["<s>", "<user>", "<assistant>"], special_tokens=True)
    tokenizer.chat_template = QWEN3_TEMPLATE
    id_of = tokenizer.convert_tokens_to_ids
    size, codes, groups = len(tokenizer), 32, 4
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 8}
    decoder = {**layers, **experts, "num_key_value_heads": 2, "rope_parameters": rope, "max_position_embeddings": 1024}
    places = {"audio_token_id": size + 1, "image_token_id": size + 2, "video_token_id": size + 3}
    named = ("eos_token", "nothink", "think_bos", "think_eos", "pad", "bos")
    config = Qwen3OmniMoeConfig(
        thinker_config={
            **places,
            "vision_start_token_id": size + 4,
            "vision_end_token_id": size + 5,
            "audio_end_token_id": size + 6,
            "text_config": {**decoder, "vocab_size": size + 8, "eos_token_id": id_of("</s>")},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "audio_config": {
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "d_model": 16,
                "output_dim": 16,
                "downsample_hidden_size": 8,
            },
        },
        talker_config={
            **places,
            **{f"codec_{name}_id": codes + place for place, name in enumerate(named)},
            "text_config": {**decoder, "vocab_size": codes + 1024, "shared_expert_intermediate_size": 16},
            "code_predictor_config": {
                **layers,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "vocab_size": codes,
                "num_code_groups": groups,
            },
            "num_code_groups": groups,
            "thinker_hidden_size": 16,
            "accept_hidden_layer": 0,
            "spatial_merge_size": 2,
            "speaker_id": {name: codes + len(named) + place for place, name in enumerate(speakers)},
        },
        code2wav_config={
            **layers,
            "num_key_value_heads": 2,
            "codebook_size": codes,
            "num_quantizers": groups,
            "decoder_dim": 16,
            "upsample_rates": (4, 2),
        },
        im_start_token_id=id_of("<s>"),
        im_end_token_id=id_of("</s>"),
        tts_pad_token_id=id_of("<none>"),
        tts_bos_token_id=id_of("<text>"),
        tts_eos_token_id=id_of("</text>"),
        user_token_id=id_of("<user>"),
        assistant_token_id=id_of("<assistant>"),
    )
    model = Qwen3OmniMoeForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config.eos_token_id = id_of("</s>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _letters(*tokens: str, **special: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,!?'-", *AUDIO_TOKENS.values(), *tokens]
    backend = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(letters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=AUDIO_TOKENS,
        **special,
    )
