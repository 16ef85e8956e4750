"""Small random checkpoints of audio models, as transformers saves them, and sounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests import checkpoints_nemotron, checkpoints_phi
from tests.checkpoints_tiles import GEMMA_AUDIO, TEXT, scatter, write_gemma4

RATE = 16000
WINDOW_SECONDS = 2
"""Instead of 30."""
SIZES = {"num_mel_bins": 16, "max_source_positions": WINDOW_SECONDS * 50, "dropout": 0.0}
WIDTH, MLP, LAYERS, HEADS = 64, 256, 3, 4
OWN = {
    **{"d_model": WIDTH, "encoder_ffn_dim": MLP},
    **{"encoder_layers": LAYERS, "encoder_attention_heads": HEADS},
}
AUDIO_TOKEN = 5
MOST_SECONDS = 8
"""For Qwen2.5-Omni, instead of 300."""
CHUNKED = SIZES | OWN | {"output_dim": TEXT["hidden_size"]}
ATTENDED = {"downsample_hidden_size": 8, "n_window_infer": 300}
THINKER = TEXT | {
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
}
SIGHT = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4},
    "out_hidden_size": TEXT["hidden_size"],
}

FORMATS = {
    "wav": "pcm_s16le",
    "flac": "flac",
    "mp3": "libmp3lame",
    "ogg": "libopus",
}


def write_whisper(folder: Path) -> Any:
    """Writes a whole model in float32; returns transformers' model of it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    decoder = {"decoder_layers": 1, "decoder_ffn_dim": 64, "decoder_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 64}
    start = {"decoder_start_token_id": 1, "max_target_positions": 8, "suppress_tokens": None}
    config = WhisperConfig(**SIZES, **OWN, **decoder, **tokens, **start)
    model = WhisperForConditionalGeneration(config).eval()
    scatter(model.model.encoder)
    return written(folder, model)


def write_qwen2_audio(folder: Path) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | {"model_type": "qwen2"}
    audio = SIZES | OWN | {"model_type": "qwen2_audio_encoder"}
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=AUDIO_TOKEN)
    model = Qwen2AudioForConditionalGeneration(config).eval()
    scatter(model.model.audio_tower)
    scatter(model.model.multi_modal_projector)
    return written(folder, model)


def write_voxtral(folder: Path) -> Any:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    torch.manual_seed(0)
    audio = SIZES | {"hidden_size": WIDTH, "intermediate_size": MLP}
    audio |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = VoxtralConfig(audio_config=audio, text_config=TEXT, audio_token_id=AUDIO_TOKEN)
    model = VoxtralForConditionalGeneration(config).eval()
    scatter(model.model.audio_tower)
    scatter(model.model.multi_modal_projector)
    return written(folder, model)


def write_qwen25_omni(folder: Path) -> Any:
    """Without its talker, but with its vision tower."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    torch.manual_seed(0)
    thinker = {"audio_config": CHUNKED, "text_config": {**THINKER, "model_type": None}}
    thinker["vision_config"] = SIGHT | {"fullatt_block_indexes": [1]}
    config = Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    model = Qwen2_5OmniForConditionalGeneration(config).eval()
    scatter(model.thinker.model.audio_tower)
    scatter(model.thinker.model.visual)
    return written(folder, model, MOST_SECONDS)


def write_qwen3_omni(folder: Path) -> Any:
    """Without its talker, but with its vision tower."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(0)
    thinker = {"audio_config": CHUNKED | ATTENDED, "text_config": {**THINKER, "model_type": None}}
    thinker["vision_config"] = SIGHT | {"deepstack_visual_indexes": [0]}
    config = Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    scatter(model.thinker.model.audio_tower)
    scatter(model.thinker.model.visual)
    return written(folder, model)


def write_qwen3_asr(folder: Path) -> Any:
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | {"model_type": "qwen3"}
    config = Qwen3ASRConfig(audio_config=CHUNKED | ATTENDED, text_config=text)
    model = Qwen3ASRForConditionalGeneration(config).eval()
    scatter(model.model.audio_tower)
    scatter(model.model.multi_modal_projector)
    model.save_pretrained(folder)
    asr_extractor().save_pretrained(folder)
    return model


def written(folder: Path, model: Any, seconds: int = WINDOW_SECONDS) -> Any:
    model.save_pretrained(folder)
    extractor(seconds).save_pretrained(folder)
    return model


def extractor(seconds: int = WINDOW_SECONDS) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(SIZES["num_mel_bins"], chunk_length=seconds)


def asr_extractor() -> Any:
    from transformers import Qwen3ASRFeatureExtractor

    return Qwen3ASRFeatureExtractor(SIZES["num_mel_bins"])


WRITERS: dict[str, Callable[[Path], Any]] = {
    "whisper": write_whisper,
    "qwen2_audio": write_qwen2_audio,
    "voxtral": write_voxtral,
    "qwen2_5_omni": write_qwen25_omni,
    "qwen3_omni_moe": write_qwen3_omni,
    "qwen3_asr": write_qwen3_asr,
    "phi4_multimodal-audio": checkpoints_phi.write_both,
    "phi4mm-audio": checkpoints_phi.write_both_published,
    "nemotron_h_omni-audio": checkpoints_nemotron.write_nemotron,
    "gemma4-audio": partial(write_gemma4, clipped=True),
}
"""By `model_type`, with the suffix `-audio` if the model's vision tower has tests of its own."""
CONFORMERS = [kind for kind in WRITERS if kind.endswith("-audio")]


@dataclass(frozen=True)
class Hearing:
    """transformers' model, and its rows for sounds."""

    model_type: str
    model: Any

    def rows(self, waves: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        hear = getattr(self, self.model_type.removesuffix("-audio"))
        return torch.cat([hear(wave) for wave in waves])

    @torch.no_grad()
    def whisper(self, wave: npt.NDArray[np.float32]) -> Tensor:
        frames = extractor()(wave, sampling_rate=RATE, return_tensors="pt").input_features
        return torch.as_tensor(self.model.model.encoder(frames).last_hidden_state[0])

    @torch.no_grad()
    def qwen2_audio(self, wave: npt.NDArray[np.float32]) -> Tensor:
        """The rows that replace the audio tokens of a prompt, which are as many as its processor
        counts."""
        found = extractor()(
            wave, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True
        )
        frames = int(found.attention_mask.sum())
        tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        projected: list[Tensor] = []
        projector = self.model.model.multi_modal_projector
        hook = projector.register_forward_hook(lambda *call: projected.append(call[2]))
        ids = torch.tensor([[1, *[AUDIO_TOKEN] * tokens, 1]])
        self.model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=found.input_features,
            feature_attention_mask=found.attention_mask,
        )
        hook.remove()
        return projected[0][0, :tokens]

    @torch.no_grad()
    def voxtral(self, wave: npt.NDArray[np.float32]) -> Tensor:
        padding = {"padding": True, "pad_to_multiple_of": WINDOW_SECONDS * RATE}
        frames = extractor()(
            wave, sampling_rate=RATE, return_tensors="pt", truncation=False, **padding
        ).input_features
        windows = frames.reshape(frames.shape[1], -1, WINDOW_SECONDS * 100).transpose(0, 1)
        return torch.as_tensor(self.model.model.get_audio_features(windows).pooler_output)

    def qwen2_5_omni(self, wave: npt.NDArray[np.float32]) -> Tensor:
        return self.thinker(wave, extractor(MOST_SECONDS), padding="max_length")

    def qwen3_omni_moe(self, wave: npt.NDArray[np.float32]) -> Tensor:
        return self.thinker(wave, extractor(), padding=True, truncation=False)

    @torch.no_grad()
    def thinker(self, wave: npt.NDArray[np.float32], extractor: Any, **padding: Any) -> Tensor:
        padding |= {"return_attention_mask": True, "return_tensors": "pt"}
        found = extractor(wave, sampling_rate=RATE, **padding)
        return torch.as_tensor(
            self.model.thinker.model.get_audio_features(
                found.input_features, feature_attention_mask=found.attention_mask
            ).last_hidden_state
        )

    @torch.no_grad()
    def qwen3_asr(self, wave: npt.NDArray[np.float32]) -> Tensor:
        found = asr_extractor()(wave, sampling_rate=RATE, padding=True, return_attention_mask=True)
        return torch.as_tensor(
            self.model.model.get_audio_features(
                found.input_features, found.attention_mask
            ).pooler_output
        )

    @torch.no_grad()
    def phi4_multimodal(self, wave: npt.NDArray[np.float32]) -> Tensor:
        from transformers import Phi4MultimodalFeatureExtractor

        extractor = Phi4MultimodalFeatureExtractor(feature_size=checkpoints_phi.MELS)
        found = extractor(wave, sampling_rate=RATE, return_tensors="pt")
        embed, count = self.model.audio_embed, int(found.audio_embed_sizes)
        ids = torch.full((1, count), embed.config.audio_config.audio_token_id)
        nothing = torch.zeros(1, count, embed.config.hidden_size)
        rows = embed(ids, nothing, found.audio_input_features, found.audio_embed_sizes)
        return torch.as_tensor(rows[0])

    phi4mm = phi4_multimodal

    @torch.no_grad()
    def nemotron_h_omni(self, wave: npt.NDArray[np.float32]) -> Tensor:
        from transformers import ParakeetFeatureExtractor

        found = ParakeetFeatureExtractor(checkpoints_nemotron.MELS)(
            wave, sampling_rate=RATE, return_tensors="pt"
        )
        heard = self.model.get_audio_features(found.input_features, found.attention_mask)
        return torch.as_tensor(heard.pooler_output)

    @torch.no_grad()
    def gemma4(self, wave: npt.NDArray[np.float32]) -> Tensor:
        from transformers import Gemma4AudioFeatureExtractor

        extractor = Gemma4AudioFeatureExtractor(GEMMA_AUDIO["subsampling_conv_channels"][0])
        found = extractor([wave], return_tensors="pt")
        heard = self.model.model.get_audio_features(found.input_features, found.input_features_mask)
        return torch.as_tensor(heard.pooler_output[heard.attention_mask])


def tones(seconds: float, rate: int = RATE, seed: int = 0) -> npt.NDArray[np.float32]:
    """A gliding chord over a little noise, with values that 16 bits can hold."""
    rng, time = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    pitches = rng.uniform(100, 2000, (3, 1)) * (1 + 0.1 * np.sin(3 * time))
    wave = 0.2 * np.sin(2 * np.pi * pitches * time).sum(0) + rng.normal(0, 0.01, len(time))
    levels = np.round(wave * 2**15).clip(-(2**15), 2**15 - 1)
    return np.asarray(levels / 2**15, np.float32)


def sound(
    samples: npt.NDArray[np.float32], format: str = "wav", rate: int = RATE, codec: str = ""
) -> bytes:
    """A file of mono samples, or of [channels, samples]."""
    channels = np.atleast_2d(samples)
    layout = (
        "mono" if len(channels) == 1 else f"{len(channels)}c" if len(channels) > 2 else "stereo"
    )
    file = BytesIO()
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec or FORMATS[format], rate=rate)
        stream.codec_context.layout = layout
        stream.codec_context.open()
        context = stream.codec_context
        packed = np.ascontiguousarray(channels.T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        whole = av.AudioResampler(context.format, layout, rate, context.frame_size or 4096)
        for part in (*whole.resample(frame), *whole.resample(None), None):
            container.mux(stream.encode(part))
    return file.getvalue()
