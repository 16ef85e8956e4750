"""The README's table of families: what it says, and what the tests see.

Every comparison of rows in float32 goes through `check`, so that each run tests the table's errors;
it prints the largest that it saw.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

README = Path(__file__).parents[2] / "README.md"

TOLERANCE = 1e-4
"""What no family may exceed: float32, where values are about 1 (of GLM-V about 0.1)."""

MARGIN = 4
"""How much larger an error may be than the README's: another machine adds up in another order."""

SEEN: dict[str, float] = {}
"""The largest error of each family in this test."""

FAMILIES = {
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5 and MoE",
    "qwen3_5_moe": "Qwen3.5 and MoE",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "exaone4_5": "EXAONE 4.5",
    "glm4v": "GLM-4.1V, 4.5V, 4.6V",
    "glm4v_moe": "GLM-4.1V, 4.5V, 4.6V",
    "glm46v": "GLM-4.1V, 4.5V, 4.6V",
    "glm_ocr": "GLM-OCR",
    "glm5_next": "GLM-5.3-Flash",
    "hunyuan_vl": "HunyuanOCR, Hunyuan-VL",
    "minimax_m3_vl": "MiniMax-M3",
    "ernie4_5_vl_moe": "ERNIE-4.5-VL",
    "ernie4_5_moe_vl": "ERNIE-4.5-VL",
    "kimi_vl": "Kimi-VL",
    "kimi_k25": "Kimi-K2.5",
    "pixtral": "Pixtral",
    "mistral3": "Mistral Small 3.1, 3.2",
    "lighton_ocr": "LightOnOCR",
    "paddleocr_vl": "PaddleOCR-VL",
    "video_llama_3": "VideoLLaMA 3",
    "minicpmv4_6": "MiniCPM-V 4.6, 4.7",
    "minicpmv4_7": "MiniCPM-V 4.6, 4.7",
    "internvl": "InternVL 2, 2.5, 3, 3.5",
    "internvl_chat": "InternVL 2, 2.5, 3, 3.5",
    "qianfan_ocr": "Qianfan-OCR",
    "llama4": "Llama 4",
    "mllama": "Llama 3.2 Vision",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "siglip": "SigLIP",
    "siglip2": "SigLIP 2 NaFlex",
    "clip": "CLIP",
    "dinov2": "DINOv2",
    "dinov2_with_registers": "DINOv2",
    "dinov3_vit": "DINOv3",
    "aimv2_vision_model": "AIMv2",
    "mlcd": "MLCD",
    "mlcd_vision_model": "MLCD",
    "lfm2_vl": "LFM2-VL, LFM2.5-VL",
    "llava": "LLaVA 1.5",
    "llava_next": "LLaVA-NeXT",
    "llava_next_video": "LLaVA-NeXT-Video",
    "granite4_vision": "Granite 4 Vision",
    "phi4_multimodal": "Phi-4-multimodal",
    "phi4mm": "Phi-4-multimodal",
    "molmo2": "Molmo 2",
    "nemotron_h_omni": "Nemotron-H Omni",
    "NemotronH_Nano_Omni_Reasoning_V3": "Nemotron-H Omni",
    "llava_onevision": "LLaVA-OneVision",
    "llava_qwen": "LLaVA-OneVision",
    "paligemma": "PaliGemma 1, 2",
    "janus": "Janus",
    "aya_vision": "Aya Vision",
    "cohere2_vision": "Cohere 2 Vision",
    "ovis2": "Ovis 2",
    "idefics3": "Idefics3, SmolVLM 1, 2",
    "smolvlm": "Idefics3, SmolVLM 1, 2",
    "deepseek_vl_v2": "DeepSeek-OCR",
    "DeepseekOCR": "DeepSeek-OCR",
    "deepseek_ocr2": "DeepSeek-OCR 2",
    "step3p7": "Step3-VL-10B, Step-3.7",
    "step_robotics": "Step3-VL-10B, Step-3.7",
    "step3_vl": "Step3 (321B)",
    "whisper": "Whisper",
    "qwen2_audio": "Qwen2-Audio",
    "voxtral": "Voxtral",
    "qwen2_5_omni": "Qwen2.5-Omni",
    "qwen3_omni_moe": "Qwen3-Omni",
    "qwen3_asr": "Qwen3-ASR",
    "phi4_multimodal-audio": "Phi-4-multimodal audio",
    "phi4mm-audio": "Phi-4-multimodal audio",
    "nemotron_h_omni-audio": "Nemotron-H Omni audio",
    "gemma4-audio": "Gemma 4 audio",
}
"""The family of each `model_type`; Pixtral's tower and LLaVA-OneVision's own names, both within
`llava`, have families of their own."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    tokens: list[int]
    error: float
    """The largest that was seen when the table was written."""
    published: list[str]
    """The fixtures of tests/data/published."""


@lru_cache
def rows() -> dict[str, Row]:
    """Of each family."""
    table = README.read_text().split("\n## Models\n")[1].split("\n## ")[0]
    found = {}
    for line in table.splitlines():
        if error := re.search(r"\| (\S+) from ", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            tokens = next(cell for cell in cells if re.fullmatch(r"\d+(, \d+)+", cell))
            held = [] if cells[-1] == "none" else cells[-1].split(", ")
            found[cells[0]] = Row([int(one) for one in tokens.split(", ")], float(error[1]), held)
    return found


def check(model_type: str, ours: Tensor, exact: Tensor) -> None:
    """Rows in float32 of a family against its reference."""
    family = FAMILIES[model_type]
    error = float((ours - exact).abs().max())
    SEEN[family] = max(error, SEEN.get(family, 0.0))
    most = min(TOLERANCE, MARGIN * rows()[family].error)
    assert error < most, f"{family}: {error:.1e} is not under {most:.0e}"
