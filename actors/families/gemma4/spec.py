"""Gemma 4, images or sounds: transformers.models.gemma4."""

from __future__ import annotations

from dataclasses import replace

from actors.families.whisper.spec import SILENCE
from actors.spec.audio import at_16_khz
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only
from actors.spec.sizing import FillingSizing


def gemma4(source: ModelSource) -> ModelSpec:
    """Images, unless `model.tower` says otherwise."""
    if source.options.tower == "audio":
        return sounds(source)
    vision, processor = source.vision, source.image_processor({}, normalized=False)
    patch, merge = int(vision["patch_size"]), int(vision["pooling_kernel_size"])
    heads = int(vision["num_attention_heads"])
    fixed = {
        "hidden_activation": "gelu_pytorch_tanh",
        **{"num_key_value_heads": heads, "head_dim": int(vision["hidden_size"]) // heads},
    }
    only(vision, fixed, "vision_config")
    only(processor, {"patch_size": patch, "pooling_kernel_size": merge}, "the image processor")
    sizing = FillingSizing(patch, merge, int(processor.get("max_soft_tokens") or 280))
    # The tower itself normalises pixels.
    model = source.spec("gemma4", processor | HALVES, vision, sizing, source.text_width)
    return replace(model, fast_blocks=False)  # norms follow attention and MLP, too


def sounds(source: ModelSource) -> ModelSpec:
    given = source.config.get("audio_config")
    if not given:
        raise ValueError(
            "audio_config: there is none, and so no audio tower: only E2B and E4B hear"
        )
    encoder = AUDIO | given
    only(encoder, FIXED, "the audio encoder")
    block = int(encoder["attention_context_left"]) - 1
    only(encoder, {"attention_chunk_size": block}, "the audio encoder")
    mels = int(encoder["subsampling_conv_channels"][0])
    source.feature_extractor(mels, EXTRACTOR)
    sizing = at_16_khz(
        mels=mels,
        window_frames=3000,
        most_seconds=30,
        halvings=2,
        features="gemma4",
        less=1,
    )
    model = source.spec("gemma4", SILENCE, encoder, sizing, source.text_width)
    return replace(model, fast_blocks=None)


MODEL_TYPES = {"gemma4": gemma4}
REFUSED = {
    "gemma3n": "its vision tower is MobileNetV5, which is convolutions of timm: this service does "
    "not depend on timm, and has none of its own. The convolutions of its audio encoder are "
    "normalised over all that came before, which no encoder here does",
    "gemma4_unified": "its images are projected without an encoder",
}
AUDIO: Json = {
    **{"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8},
    **{"subsampling_conv_channels": [128, 32], "conv_kernel_size": 5, "output_proj_dims": 1536},
    **{"attention_chunk_size": 12, "attention_context_left": 13, "attention_logit_cap": 50.0},
    "use_clipped_linears": True,
}
"""transformers' defaults for keys that `audio_config` lacks."""
FIXED: Json = {
    **{"hidden_act": "silu", "residual_weight": 0.5, "attention_context_right": 0},
    **{"attention_invalid_logits_value": -1e9, "gradient_clipping": 1e10, "rms_norm_eps": 1e-6},
}
EXTRACTOR: Json = {
    **{"sampling_rate": 16000, "frame_length": 320, "hop_length": 160, "fft_length": 512},
    **{"min_frequency": 0.0, "max_frequency": 8000.0, "mel_floor": 1e-3, "fft_overdrive": False},
    **{"dither": 0.0, "preemphasis": 0.0, "input_scale_factor": 1.0},
    **{"frame_length_ms": 20.0, "hop_length_ms": 10.0},  # transformers computes both lengths
    **dict.fromkeys(("per_bin_mean", "per_bin_stddev")),
}
VISION_DEFAULTS = {
    "gemma4": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16},
        **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
        **{"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240},
        **{"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"},
        **{"use_clipped_linears": False, "standardize": False},
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
}
