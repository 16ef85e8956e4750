"""Towers at their published sizes: parameters, and tokens as the family's own processor counts.

The same tokens stand in the README's table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.families.registry import read, readers
from actors.models.load import family_of
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset, preset_names
from actors.types import Size
from tests import llama4
from tests.checkpoints_audio import CONFORMERS
from tests.gpu import test_whole_towers
from tests.gpu.towers import FEWER
from tests.parity.table import FAMILIES as IN_TABLE
from tests.parity.table import TOLERANCE, rows
from tests.parity.test_audio import PUBLISHED as HEARD
from tests.parity.test_deepseek_ocr import closest
from tests.parity.test_minicpmv import published_sizes
from tests.parity.test_naflex import LFM2, lfm2_tokens
from tests.small_presets import SMALL
from tests.step3p7 import Processor
from tests.without_torchvision import processor

SIZES = (Size(336, 336), Size(1920, 1080), Size(1654, 2339))
"""The last is an A4 page at 200 dpi."""

Count = Callable[[Size], int]


def qwen(factor: int, smallest: int, largest: int) -> Count:
    """Tokens as transformers' image processor of the Qwen-VL families resizes."""
    module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")

    def count(size: Size) -> int:
        sides = module.smart_resize(size.height, size.width, factor, smallest, largest)
        return int(prod(sides)) // factor**2

    return count


def glm(size: Size) -> int:
    """Tokens as transformers' image processor of GLM-V resizes, with the published settings."""
    module = import_module("transformers.models.glm4v.image_processing_pil_glm4v")
    limits = {"min_pixels": 12544, "max_pixels": 9633792}
    return int(prod(module.smart_resize(2, size.height, size.width, **limits))) // 28**2


def glm5_next(size: Size) -> int:
    """Tokens as transformers' image processor of GLM-5.3-Flash counts patches."""
    module = import_module("transformers.models.glm5_next.image_processing_pil_glm5_next")
    processor = module.Glm5NextImageProcessorPil()
    patches: int = processor.get_number_of_image_patches(size.height, size.width)
    return patches // 4


def hunyuan(size: Size) -> int:
    """Tokens as transformers' processor of Hunyuan-VL counts placeholders, as it is published."""
    module = import_module("transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl")
    processor = module.HunYuanVLImageProcessorPil(min_pixels=262144, max_pixels=4194304)
    rows, columns = processor.get_number_of_image_patches(size.height, size.width)
    return int(rows // 2 * (columns // 2 + 1) + 2)


def gemma4(size: Size) -> int:
    """Tokens as transformers' image processor of Gemma 4 resizes."""
    module = import_module("transformers.models.gemma4.image_processing_pil_gemma4")
    sides = module.get_aspect_ratio_preserving_size(size.height, size.width, 16, 280 * 9, 3)
    return int(prod(sides)) // 48**2


def kimi(size: Size) -> int:
    """Tokens by the published rule: at most 4096 whole patches, then padded to blocks of 28."""
    scale = min(1.0, (4096 / (size.width // 14 * (size.height // 14))) ** 0.5)
    down, across = (-(-int(pixels * scale) // 28) for pixels in (size.height, size.width))
    return down * across


def pixtral(longest: int, block: int) -> Count:
    """Tokens as transformers' image processor of Pixtral resizes, with the published settings."""
    module = import_module("transformers.models.pixtral.image_processing_pil_pixtral")

    def count(size: Size) -> int:
        image = np.empty((1, size.height, size.width), np.bool_)
        layout = {"input_data_format": "channels_first"}
        sides = module.get_resize_output_image_size(image, longest, block, **layout)
        return int(prod(sides)) // block**2

    return count


def paddleocr(size: Size) -> int:
    """Tokens as transformers' image processor of PaddleOCR-VL resizes, as it is published."""
    module = import_module("transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl")
    return int(prod(module.smart_resize(size.height, size.width, 28, 147384, 2822400))) // 28**2


def siglip2(size: Size) -> int:
    """Tokens as transformers' image processor of SigLIP 2 resizes, as it is published."""
    module = import_module("transformers.models.siglip2.image_processing_pil_siglip2")
    sides = module.get_image_size_for_max_num_patches(size.height, size.width, 16, 256)
    return int(prod(sides)) // 16**2


def lfm2_vl(size: Size) -> int:
    """Tokens as transformers' processor of LFM2-VL counts placeholders, as it is published."""
    return lfm2_tokens(size, LFM2)


def minicpmv(size: Size) -> int:
    """Tokens as transformers' image processor of MiniCPM-V cuts slices, as it is published."""
    return sum(height * width // 56**2 for height, width in published_sizes(size, 448, 9))


def kimi_k25(size: Size) -> int:
    """Tokens by the published rule: at most 16384 patches and 512 on a side, then padded."""
    begun = max(1, size.width // 14) * max(1, size.height // 14)
    sides = (512 * 14 / size.width, 512 * 14 / size.height)
    scale = min(1.0, (16384 / begun) ** 0.5, *sides)
    down, across = (-(-int(pixels * scale) // 28) for pixels in (size.height, size.width))
    return down * across


def got_ocr2(side: int, tokens: int) -> Count:
    """Tokens as transformers' image processor of InternVL and Aya Vision cuts tiles."""
    module = import_module("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    processor = module.GotOcr2ImageProcessorPil(size={"height": side, "width": side})
    settings = {"crop_to_patches": True}

    def count(size: Size) -> int:
        tiles: int = processor.get_number_of_image_patches(size.height, size.width, settings)
        return tokens * tiles

    return count


def cohere2(size: Size) -> int:
    """Tokens as transformers' image processor of Cohere 2 Vision cuts tiles."""
    rule = llama4.functions("cohere2_vision")["get_optimal_tiled_canvas"]
    tiles = prod(rule((size.height, size.width), (512, 512), 1, 12))
    return 256 * (tiles + 1 if tiles > 1 else 1)


def ovis2(size: Size) -> int:
    """Tokens as transformers' image processor of Ovis 2 cuts tiles, as it is published."""
    module = import_module("transformers.models.ovis2.image_processing_pil_ovis2")
    tiles = prod(module.get_min_tile_covering_grid((size.height, size.width), 448, 12))
    return 256 * (tiles + 1 if tiles > 1 else 1)


def llama_4(size: Size) -> int:
    """Tokens as transformers' image processor of Llama 4 cuts tiles."""
    tiles = prod(llama4.canvas(size.width, size.height, 16)) // 336**2
    return 144 * (tiles + 1 if tiles > 1 else 1)


def mllama(size: Size) -> int:
    """Rows of the tiles that transformers' image processor of Llama 3.2 Vision cuts."""
    module = import_module("transformers.models.mllama.image_processing_pil_mllama")
    sides = module.get_optimal_tiled_canvas(size.height, size.width, 4, 560)
    return 1601 * int(prod(sides)) // 560**2


def llava_next(size: Size) -> int:
    """Tokens as transformers' processor of LLaVA-NeXT counts placeholders."""
    given = {"patch_size": 14, "num_additional_image_tokens": 1}
    return placeholders("llava_next", "LlavaNext", size, 336, given) - 1  # of the class token


def granite4(size: Size) -> int:
    """Tokens as transformers' processor of Granite 4 Vision counts placeholders."""
    settings = Preset("granite-vision-4.1-4b").files
    given = {"patch_size": 16, "num_additional_image_tokens": 0, "downsample_rate": "4/8"}
    module = import_module("transformers.models.granite4_vision.processing_granite4_vision")
    kind = module.Granite4VisionProcessor
    pinpoints = settings["preprocessor_config.json"]["image_grid_pinpoints"]
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pinpoints), **given
    )
    processor._get_unpadded_features = partial(kind._get_unpadded_features, processor)
    tokens: int = kind._get_number_of_features(processor, size.height, size.width, 384, 384)
    return tokens


def phi4(size: Size) -> int:
    """Tokens as transformers' image processor of Phi-4-multimodal counts them."""
    rule = processor("phi4_multimodal", "Phi4MultimodalImageProcessor", pixels=False)
    image = torch.empty(()).expand(3, size.height, size.width)
    _, mask = rule.dynamic_preprocess(image, 448, 14, 32, max_num=36)
    down, across = mask[::2, 0].sum(), mask[0, ::2].sum()
    return 256 + 16 + 1 + int(down * (across + 1))


def molmo2(size: Size) -> int:
    """Tokens as transformers' image processor of Molmo 2 counts them."""
    rule = processor("molmo2", "Molmo2ImageProcessor")
    return int(rule.get_number_of_image_patches(size.height, size.width))


def nemotron(size: Size) -> int:
    """Tokens as transformers' image processor of Nemotron-H Omni counts them."""
    rule = processor("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3ImageProcessor")
    grid = rule._preprocess.__globals__["get_patch_grid_size"]
    rows, columns = grid(size.height, size.width, 16, 2, 1024, 13312)
    return int(rows * columns // 4)


def onevision(size: Size) -> int:
    """Tokens as transformers' processor of LLaVA-OneVision counts placeholders."""
    given = {"num_image_tokens": 27**2, "vision_aspect_ratio": "anyres_max_9"}
    return placeholders("llava_onevision", "LlavaOnevision", size, 384, given)


def placeholders(family: str, name: str, size: Size, side: int, given: dict[str, Any]) -> int:
    folder = f"transformers.models.{family}"
    kind = getattr(import_module(f"{folder}.processing_{family}"), f"{name}Processor")
    pil = import_module(f"{folder}.image_processing_pil_{family}")
    processor = SimpleNamespace(image_processor=getattr(pil, f"{name}ImageProcessorPil")(), **given)
    processor._get_unpadded_features = partial(kind._get_unpadded_features, processor)
    tokens: int = kind._get_number_of_features(processor, size.height, size.width, side, side)
    return tokens


def idefics3(size: Size) -> int:
    """Tokens as transformers' image processor of SmolVLM2 cuts tiles, as it is published."""
    module = import_module("transformers.models.smolvlm.image_processing_pil_smolvlm")
    edges = {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}
    processor = module.SmolVLMImageProcessorPil(**edges)
    tiles: int = processor.get_number_of_image_patches(size.height, size.width, edges)[0]
    return 9**2 * tiles


def deepseek(size: Size) -> int:
    """Tokens by the published rule: 273 of the whole, and the nearest canvas of 2 to 9 crops."""
    if max(size.width, size.height) <= 640:
        return 273
    columns, rows = closest(size.width, size.height)
    return 273 + 10 * rows * (10 * columns + 1)


def deepseek2(size: Size) -> int:
    """Tokens as transformers' image processor of DeepSeek-OCR 2 cuts crops."""
    module = import_module("transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2")
    if max(size.width, size.height) <= 768:
        return 257
    sides = module.get_optimal_tiled_canvas((size.height, size.width), (768, 768), 2, 6)
    return 257 + 144 * int(prod(sides))


def step3(size: Size) -> int:
    """Tokens as transformers' image processor of Step-3.7 plans crops."""
    return 169 + 81 * prod(Processor(728, 504, 3024).plan(size.width, size.height))


@dataclass(frozen=True)
class Published:
    """One preset."""

    preset: str
    row: str
    """Its family in the README's table."""
    million_parameters: int
    tokens: Count


PUBLISHED = [
    Published("qwen3vl-8b", "Qwen3-VL", 576, qwen(32, 65536, 16777216)),
    Published("qwen3vl-8b", "Qwen3-VL-MoE", 576, qwen(32, 65536, 16777216)),
    Published("qwen35-27b", "Qwen3.5 and MoE", 461, qwen(32, 65536, 16777216)),
    Published("qwen2vl-7b", "Qwen2-VL", 676, qwen(28, 3136, 12845056)),
    Published("qwen25vl-7b", "Qwen2.5-VL", 677, qwen(28, 3136, 12845056)),
    Published("exaone45-33b", "EXAONE 4.5", 1286, qwen(28, 3136, 1003520)),
    Published("glm41v-9b", "GLM-4.1V, 4.5V, 4.6V", 892, glm),
    Published("glm-ocr", "GLM-OCR", 434, glm),
    Published("glm53-flash", "GLM-5.3-Flash", 564, glm5_next),
    Published("hunyuan-ocr", "HunyuanOCR, Hunyuan-VL", 457, hunyuan),
    Published("minimax-m3", "MiniMax-M3", 866, qwen(28, 3136, 451584)),
    Published("ernie45vl-28b", "ERNIE-4.5-VL", 775, qwen(28, 3136, 4816896)),
    Published("kimivl-a3b", "Kimi-VL", 448, kimi),
    Published("kimik25", "Kimi-K2.5", 471, kimi_k25),
    Published("pixtral-12b", "Pixtral", 435, pixtral(1024, 16)),
    Published("mistral-small31", "Mistral Small 3.1, 3.2", 439, pixtral(1540, 28)),
    Published("lighton-ocr", "LightOnOCR", 410, pixtral(1540, 28)),
    Published("paddleocr-vl", "PaddleOCR-VL", 439, paddleocr),
    Published("videollama3-7b", "VideoLLaMA 3", 429, qwen(14, 3136, 3211264)),
    Published("minicpmv-4.6", "MiniCPM-V 4.6, 4.7", 548, minicpmv),
    Published("lfm25vl-1.6b", "LFM2-VL, LFM2.5-VL", 426, lfm2_vl),
    Published("internvl3-8b", "InternVL 2, 2.5, 3, 3.5", 332, got_ocr2(448, 256)),
    Published("internvl3-78b", "InternVL 2, 2.5, 3, 3.5", 5709, got_ocr2(448, 256)),
    Published("internvl3-8b", "Qianfan-OCR", 332, got_ocr2(448, 256)),
    Published("llama4-scout", "Llama 4", 872, llama_4),
    Published("llama32-vision-11b", "Llama 3.2 Vision", 895, mllama),
    Published("gemma3-4b", "Gemma 3", 420, lambda size: 256),
    Published("gemma4-31b", "Gemma 4", 576, gemma4),
    Published("siglip-so400m", "SigLIP", 413, lambda size: 27**2),
    Published("siglip2-base-naflex", "SigLIP 2 NaFlex", 86, siglip2),
    Published("clip-vit-l-336", "CLIP", 304, lambda size: 24**2 + 1),
    Published("dinov2-base", "DINOv2", 87, lambda size: 16**2 + 1),
    Published("dinov3-vitb16", "DINOv3", 86, lambda size: 14**2 + 5),
    Published("aimv2-large-224", "AIMv2", 309, lambda size: 16**2),
    Published("mlcd-bigg-448", "MLCD", 1842, lambda size: 32**2 + 1),
    Published("llava15-7b", "LLaVA 1.5", 312, lambda size: 24**2),
    Published("llava-next-7b", "LLaVA-NeXT", 312, llava_next),
    Published("llava-next-video-7b", "LLaVA-NeXT-Video", 312, llava_next),
    Published("granite-vision-4.1-4b", "Granite 4 Vision", 579, granite4),
    Published("phi4-multimodal", "Phi-4-multimodal", 411, phi4),
    Published("molmo2-4b", "Molmo 2", 439, molmo2),
    Published("nemotron-3-nano-omni", "Nemotron-H Omni", 814, nemotron),
    Published("llava-onevision-7b", "LLaVA-OneVision", 415, onevision),
    Published("paligemma2-3b", "PaliGemma 1, 2", 415, lambda size: 16**2),
    Published("janus-pro-1b", "Janus", 310, lambda size: 24**2),
    Published("aya-vision-8b", "Aya Vision", 604, got_ocr2(364, 169)),
    Published("command-a-vision", "Cohere 2 Vision", 810, cohere2),
    Published("ovis2-2b", "Ovis 2", 679, ovis2),
    Published("smolvlm2-2b", "Idefics3, SmolVLM 1, 2", 434, idefics3),
    Published("deepseek-ocr", "DeepSeek-OCR", 401, deepseek),
    Published("deepseek-ocr2", "DeepSeek-OCR 2", 454, deepseek2),
    Published("step3vl-10b", "Step3-VL-10B, Step-3.7", 1981, step3),
    Published("step3-321b", "Step3 (321B)", 4675, step3),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.preset)
def test_tokens_are_the_processors_and_the_readmes(published: Published) -> None:
    model = read(ModelOptions(id=published.preset, load_format="dummy"))
    tokens = [model.sizing.plan(size).tokens for size in SIZES]
    assert tokens == [published.tokens(size) for size in SIZES]
    assert tokens == rows()[published.row].tokens


def test_every_model_type_has_its_row_and_every_row_its_proof() -> None:
    assert set(IN_TABLE) == {"pixtral", "llava_qwen", *readers(), *CONFORMERS}
    proven = {published.row for published in PUBLISHED} | {IN_TABLE[kind] for kind in HEARD}
    assert set(IN_TABLE.values()) == set(rows()) == proven
    assert all(0 < row.error <= TOLERANCE for row in rows().values())


def test_every_preset_is_small_and_full_size_in_some_test() -> None:
    """Qwen3-VL and DeepSeek-OCR have tiny presets, and their own way to fewer layers."""
    full = {name for name in preset_names() if not name.endswith("-tiny")}
    assert full == set(test_whole_towers.PRESETS)
    ours = {"qwen3vl-2b", "qwen3vl-8b", "deepseek-ocr"}
    assert full - set(SMALL) == ours
    assert full - set(FEWER) == ours | {"deepseek-ocr2"}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.preset)
def test_parameters(published: Published) -> None:
    model = read(ModelOptions(id=published.preset, load_format="dummy"))
    shapes = family_of(model).expected.values()
    assert round(sum(prod(shape) for shape in shapes) / 1e6) == published.million_parameters


def vision(preset: str) -> dict[str, Any]:
    return dict(read(ModelOptions(id=preset, load_format="dummy")).vision)


def test_deepseek_ocr_is_as_transformers_configures_the_same_towers() -> None:
    module = import_module("transformers.models.unlimited_ocr.configuration_unlimited_ocr")
    sam, clip = module.UnlimitedOcrSamVisionConfig(), module.UnlimitedOcrVisionEncoderConfig()
    ours = vision("deepseek-ocr")
    assert ours["image_size"] == sam.image_size
    assert ours["width"]["sam_vit_b"] == {
        "layers": sam.num_hidden_layers,
        "width": sam.hidden_size,
        "heads": sam.num_attention_heads,
        "global_attn_indexes": list(sam.global_attn_indexes),
        "downsample_channels": list(sam.downsample_channels),
    }
    assert ours["width"]["clip-l-14-224"] == {
        "layers": clip.num_hidden_layers,
        "width": clip.hidden_size,
        "heads": clip.num_attention_heads,
        "image_size": clip.image_size,
        "patch_size": clip.patch_size,
    }
    assert module.UnlimitedOcrTextConfig().hidden_size == 1280
    assert read(ModelOptions(id="deepseek-ocr", load_format="dummy")).width == 1280


def test_step3vl_is_as_transformers_configures_step_3_7() -> None:
    theirs = import_module("transformers.models.step3p7.configuration_step3p7")
    config, ours = theirs.Step3p7VisionConfig(), vision("step3vl-10b")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        assert ours[key] == getattr(config, key)
    assert (ours["image_size"], ours["patch_size"]) == (config.image_size, config.patch_size)
    assert ours["mlp_ratio"] == pytest.approx(config.mlp_ratio)
    assert ours["hidden_act"] == config.hidden_act


def test_step3_is_eva_clip_without_its_last_layer() -> None:
    """transformers has no Step3. EVA-CLIP-4B-14 has 64 layers of 1792, heads of 112, this ratio."""
    ours = vision("step3-321b")
    assert (ours["hidden_size"], ours["num_hidden_layers"]) == (1792, 64 - 1)
    assert ours["hidden_size"] // ours["num_attention_heads"] == 112
    assert ours["intermediate_size"] == round(1792 * 8.571428571428571)


def test_mistral_is_as_transformers_configures_it() -> None:
    theirs = import_module("transformers.models.mistral3.configuration_mistral3").Mistral3Config()
    config, ours = theirs.vision_config, vision("mistral-small31")
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert ours[key] == getattr(config, key)
    assert (ours["image_size"], ours["patch_size"]) == (config.image_size, config.patch_size)
    model = read(ModelOptions(id="mistral-small31", load_format="dummy"))
    assert model.sizing.merge_size == theirs.spatial_merge_size
    assert ours["projector_bias"] == theirs.multimodal_projector_bias
