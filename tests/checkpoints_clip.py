"""Small random checkpoints of SigLIP, CLIP and models built on them, as transformers saves them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.checkpoints_tiles import PROCESSOR, TEXT, scatter
from tests.images import photograph

Units = npt.NDArray[np.float32]

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
}
PICTURE = 90
"""SigLIP's image size. Patches cover 84 of the pixels, as they cover 378 of 384 in the original."""

CAPTIONS = ["a cat", "two dogs in the rain", "a cup of coffee", "The Launch of a Rocket!"]

SETTINGS = {key: PROCESSOR[key] for key in ("image_mean", "image_std", "resample")}
CROPPED = {"do_center_crop": True, "size": {"shortest_edge": 84}, "crop_size": 84}


def write_siglip(folder: Path) -> Any:
    """Writes a whole SigLIP in float32 with a random tower; returns transformers' model of it."""
    from transformers import SiglipConfig, SiglipModel

    torch.manual_seed(0)
    text = TOWER | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = SiglipConfig(vision_config=TOWER | {"image_size": PICTURE}, text_config=text)
    model = SiglipModel(config).eval()
    scatter(model.vision_model)
    return written(folder, model, {"size": {"height": PICTURE, "width": PICTURE}})


def write_clip(folder: Path) -> Any:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    text = TOWER | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    model = CLIPModel(CLIPConfig(vision_config=TOWER | {"image_size": 84}, text_config=text)).eval()
    scatter(model.vision_model)
    return written(folder, model, CROPPED)


def write_siglip_texts(folder: Path) -> Any:
    """`write_siglip` with a random text tower, too, and a tokenizer."""
    import sentencepiece
    from transformers import SiglipConfig, SiglipModel, SiglipTokenizer

    torch.manual_seed(0)
    text = TOWER | {"vocab_size": 64, "max_position_embeddings": 32}
    ids = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 1}
    config = SiglipConfig(vision_config=TOWER | {"image_size": PICTURE}, text_config=text | ids)
    model = SiglipModel(config).eval()
    scatter(model)
    trained = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CAPTIONS * 20),
        model_writer=trained,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=-1,
        bos_id=-1,
        unk_id=2,
        eos_id=1,
    )
    (folder / "spiece.model").write_bytes(trained.getvalue())
    # As published: the model sees the padding, without a mask.
    unmasked = {"model_input_names": ["input_ids"]}
    SiglipTokenizer(str(folder / "spiece.model"), **unmasked).save_pretrained(folder)
    return written(folder, model, {"size": {"height": PICTURE, "width": PICTURE}})


FLEXIBLE = {"num_patches": 36}
"""Positions of SigLIP 2 with NaFlex: fewer than an image has in one direction or in both."""
BUDGET = {"max_num_patches": 60, "patch_size": 14, "resample": 2}


def write_siglip2(folder: Path) -> Any:
    """`write_siglip` for SigLIP 2 with NaFlex."""
    from transformers import Siglip2Config, Siglip2Model

    torch.manual_seed(0)
    text = TOWER | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = Siglip2Config(vision_config=TOWER | FLEXIBLE, text_config=text)
    model = Siglip2Model(config).eval()
    scatter(model.vision_model)
    return written(folder, model, BUDGET)


def write_siglip2_texts(folder: Path) -> Any:
    """`write_siglip2` with a random text tower, too, and a tokenizer of letters."""
    from transformers import Siglip2Config, Siglip2Model, Siglip2Tokenizer

    torch.manual_seed(0)
    letters = ["▁", *map(chr, range(ord("a"), ord("z") + 1))]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *letters]
    text = TOWER | {"vocab_size": 64, "max_position_embeddings": 32}
    model = Siglip2Model(Siglip2Config(vision_config=TOWER | FLEXIBLE, text_config=text)).eval()
    scatter(model)
    vocabulary = {name: place for place, name in enumerate(names)}
    # As published: the model sees the padding, without a mask.
    settings = {"model_input_names": ["input_ids"], "padding_side": "right"}
    Siglip2Tokenizer(vocab=vocabulary, merges=[], **settings).save_pretrained(folder)
    return written(folder, model, BUDGET)


TILED = {
    **{"encoder_patch_size": 14, "tile_size": 84, "max_tiles": 4, "resample": 2},
    **{"min_image_tokens": 4, "max_image_tokens": 9},
}
"""LFM2-VL's image processor: a tile has nine tokens."""


def write_lfm2(folder: Path, *, plain: bool = False) -> Any:
    """`write_siglip2` for LFM2-VL. `plain`: without thumbnail, norm and projector biases."""
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    torch.manual_seed(0)
    vision = TOWER | FLEXIBLE | {"model_type": "siglip2_vision_model", "vision_use_head": False}
    settings = {"projector_use_layernorm": not plain, "projector_bias": not plain}
    config = Lfm2VlConfig(
        vision_config=vision,
        text_config=TEXT,
        projector_hidden_size=80,
        image_token_id=5,
        **settings,
    )
    model = Lfm2VlForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    return written(folder, model, TILED | {"use_thumbnail": not plain})


def write_clip_texts(folder: Path, end: int | None = None) -> Any:
    """`write_clip` with a random text tower, too, and a tokenizer of bytes. `end`: the
    configuration's `eos_token_id`, if it differs from the tokenizer's."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    text = TOWER | {"vocab_size": len(names), "max_position_embeddings": 32}
    text |= {"bos_token_id": len(names) - 2, "eos_token_id": end or len(names) - 1}
    config = CLIPConfig(
        vision_config=TOWER | {"image_size": 84}, text_config=text, projection_dim=48
    )
    model = CLIPModel(config).eval()
    scatter(model)
    vocabulary = {name: place for place, name in enumerate(names)}
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    return written(folder, model, CROPPED)


def units_of(model: Any, folder: str | Path, photographs: Sequence[str]) -> tuple[Units, Units]:
    """Vectors of length 1 from transformers' model and processors, for photographs and CAPTIONS."""
    from transformers import AutoTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil.from_pretrained(folder)
    pictures = [Image.open(BytesIO(photograph(name))).convert("RGB") for name in photographs]
    pixels = processor(pictures, return_tensors="pt")
    tokens = AutoTokenizer.from_pretrained(folder)(CAPTIONS, padding=True, return_tensors="pt")
    with torch.no_grad():
        images = model.get_image_features(**pixels, return_dict=True).pooler_output
        texts = model.get_text_features(**tokens, return_dict=True).pooler_output
    images, texts = (torch.nn.functional.normalize(one).numpy() for one in (images, texts))
    return images, texts


def write_llava(folder: Path, tower: str, **settings: Any) -> Any:
    """`write_siglip` for LLaVA over `clip` or `siglip`; `settings` as in config.json."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    vision = TOWER | {"model_type": f"{tower}_vision_model"}
    vision["image_size"] = 84 if tower == "clip" else PICTURE
    config = LlavaConfig(vision_config=vision, text_config=TEXT, image_token_index=5, **settings)
    model = LlavaForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    square = {"size": {"height": PICTURE, "width": PICTURE}}
    return written(folder, model, CROPPED if tower == "clip" else square)


def write_paligemma(folder: Path, text: str) -> Any:
    """`write_siglip` for PaliGemma: 1 over `gemma`, 2 over `gemma2`."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    torch.manual_seed(0)
    config = PaliGemmaConfig(
        vision_config=TOWER | {"image_size": 84, "vision_use_head": False},
        text_config=TEXT | {"model_type": text, "head_dim": 16, "pad_token_id": 0},
        projection_dim=TEXT["hidden_size"],
        image_token_index=5,
    )
    model = PaliGemmaForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    return written(folder, model, {"size": {"height": 84, "width": 84}})


def write_janus(folder: Path) -> Any:
    """`write_siglip` for Janus, whose image generator is tiny."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    torch.manual_seed(0)
    vision = {key: value for key, value in TOWER.items() if key != "intermediate_size"}
    config = JanusConfig(
        vision_config=vision | {"image_size": 84, "mlp_ratio": 2.0, "projection_dim": 96},
        text_config=TEXT | {"model_type": "llama"},
        vq_config={
            **{"embed_dim": 8, "num_embeddings": 8, "latent_channels": 32, "base_channels": 32},
            **{"channel_multiplier": [1, 1], "projection_dim": 96, "num_patches": 2},
            "image_token_embed_dim": 96,
        },
        image_token_id=5,
    )
    model = JanusForConditionalGeneration(config).eval()
    scatter(model.model.vision_model)
    scatter(model.model.aligner)
    return written(folder, model, {"size": {"height": 84, "width": 84}})


def write_aya(folder: Path, kind: str) -> Any:
    """`write_siglip` for `AyaVision` or `Cohere2Vision`: nine tokens per tile, up to 12 tiles."""
    module, vision = import_module("transformers"), TOWER | {"image_size": 84}
    torch.manual_seed(0)
    config = getattr(module, f"{kind}Config")(
        vision_config=vision | {"model_type": "siglip_vision_model"},
        text_config=TEXT,
        alignment_intermediate_size=112,
        adapter_layer_norm_eps=1e-3,
        image_token_id=5,
    )
    model = getattr(module, f"{kind}ForConditionalGeneration")(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    return written(folder, model, {"size": {"height": 84, "width": 84}})


def write_idefics3(folder: Path, kind: str) -> Any:
    """`write_siglip` for `Idefics3` or `SmolVLM`: four tokens per tile, two tiles on the longer
    side."""
    module, vision = import_module("transformers"), TOWER | {"image_size": PICTURE}
    torch.manual_seed(0)
    config = getattr(module, f"{kind}Config")(
        vision_config=vision, text_config=TEXT, scale_factor=3, image_token_id=5
    )
    model = getattr(module, f"{kind}ForConditionalGeneration")(config).eval()
    scatter(model.model.vision_model)
    scatter(model.model.connector)
    sizes = {"size": {"longest_edge": 2 * PICTURE}, "max_image_size": {"longest_edge": PICTURE}}
    return written(folder, model, sizes | {"resample": 1})


def write_mlcd(folder: Path) -> Any:
    """`write_clip` for MLCD, whose config.json has the tower's keys at its top level."""
    from transformers import MLCDVisionConfig, MLCDVisionModel

    torch.manual_seed(0)
    model = MLCDVisionModel(MLCDVisionConfig(**TOWER, image_size=84)).eval()
    scatter(model)
    return written(folder, model, CROPPED)


def write_aimv2(folder: Path, *, plain: bool = True) -> Any:
    """`write_siglip` for AIMv2 with cropping. `plain`: no biases, no pooling beside the tower."""
    from transformers import Aimv2VisionConfig, Aimv2VisionModel

    torch.manual_seed(0)
    settings = {"use_head": not plain, "qkv_bias": not plain, "mlp_bias": not plain}
    model = Aimv2VisionModel(Aimv2VisionConfig(**TOWER, image_size=84, **settings)).eval()
    scatter(model)
    return written(folder, model, CROPPED)


def write_ovis2(folder: Path, *, biased: bool = False) -> Any:
    """`write_siglip` for Ovis 2: nine tokens per tile, up to six tiles."""
    from transformers import Ovis2Config, Ovis2ForConditionalGeneration

    torch.manual_seed(0)
    words = {"vocab_size": 72, "num_visual_indicator_tokens": 5, "hidden_stride": 2}
    biases = {"qkv_bias": biased, "mlp_bias": biased}
    config = Ovis2Config(
        vision_config=TOWER | {"image_size": 84} | words | biases,
        text_config=TEXT,
        hidden_size=TEXT["hidden_size"],
        vocab_size=TEXT["vocab_size"],
        image_token_id=5,
        visual_indicator_token_ids=[6, 7, 8, 9, 10],
    )
    model = Ovis2ForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.visual_embeddings_table)
    tiles = {"size": {"height": 84, "width": 84}, "crop_to_patches": True, "max_patches": 6}
    return written(folder, model, tiles)


PINPOINTS = [[PICTURE * rows, PICTURE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
ASPECT = "anyres_max_4"
"""Of nine tiles, about four remain."""


def write_llava_next(folder: Path, tower: str) -> Any:
    """`write_onevision` for LLaVA-NeXT over `clip`, or over `siglip` with several layers."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    torch.manual_seed(0)
    clip = tower == "clip"
    side = 84 if clip else PICTURE
    grid = [[height * side // PICTURE, width * side // PICTURE] for height, width in PINPOINTS]
    several = {"vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"}
    config = LlavaNextConfig(
        vision_config=TOWER | {"model_type": f"{tower}_vision_model", "image_size": side},
        text_config=TEXT,
        image_grid_pinpoints=grid,
        image_token_index=5,
        **({} if clip else several),
    )
    model = LlavaNextForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    sizes = CROPPED if clip else {"size": {"height": side, "width": side}}
    return written(folder, model, sizes | {"image_grid_pinpoints": grid})


def write_llava_next_video(folder: Path) -> Any:
    """`write_llava_next` over `clip` with videos."""
    from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

    torch.manual_seed(0)
    grid = [[height * 84 // PICTURE, width * 84 // PICTURE] for height, width in PINPOINTS]
    config = LlavaNextVideoConfig(
        vision_config=TOWER | {"model_type": "clip_vision_model", "image_size": 84},
        text_config=TEXT,
        image_grid_pinpoints=grid,
        image_token_index=5,
        video_token_index=6,
    )
    model = LlavaNextVideoForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    return written(folder, model, CROPPED | {"image_grid_pinpoints": grid})


def write_granite4(folder: Path) -> Any:
    """`write_siglip` for Granite 4 Vision: tiles of 2 x 2 windows of 2 x 2 tokens."""
    from transformers import Granite4VisionConfig, Granite4VisionForConditionalGeneration

    torch.manual_seed(0)
    side = 8 * TOWER["patch_size"]
    grid = [[height * side // PICTURE, width * side // PICTURE] for height, width in PINPOINTS]
    config = Granite4VisionConfig(
        vision_config=TOWER
        | {"model_type": "siglip_vision_model", "image_size": side, "vision_use_head": False},
        text_config=TEXT | {"model_type": "granite4_vision_text", "pad_token_id": 0},
        qformer_config={
            **{"model_type": "blip_2_qformer", "intermediate_size": 80, "num_hidden_layers": 1},
            **{"cross_attention_frequency": 1, "use_qformer_text_input": False},
        },
        downsample_rate="2/4",
        deepstack_layer_map=[(-3, 1), (-1, 0)],
        spatial_vision_layer=-2,
        spatial_target_layers=[2, 3, 4, 5],
        vision_feature_select_strategy="full",
        image_grid_pinpoints=grid,
        image_token_index=5,
    )
    model = Granite4VisionForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.layerwise_projectors)
    scatter(model.model.spatial_projectors)
    sizes = {"size": {"height": side, "width": side}, "image_grid_pinpoints": grid}
    return written(folder, model, sizes)


def write_onevision(folder: Path) -> Any:
    """`write_siglip` for LLaVA-OneVision, whose tower ends with the layer that is used."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    torch.manual_seed(0)
    vision = TOWER | {"model_type": "siglip_vision_model", "image_size": PICTURE}
    config = LlavaOnevisionConfig(
        vision_config=vision | {"vision_use_head": False},
        text_config=TEXT,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio=ASPECT,
        image_token_index=5,
        video_token_index=6,
    )
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    square = {"size": {"height": PICTURE, "width": PICTURE}}
    return written(folder, model, square | {"image_grid_pinpoints": PINPOINTS})


def write_llava_qwen(folder: Path) -> Any:
    """The same weights in lmms-lab's format, with its tensor names and config.json.

    Its `mm_vision_tower` is in llava_onevision.spec.QWEN_TOWERS only if a test puts it there.
    """
    with tempfile.TemporaryDirectory() as native:
        model = write_onevision(Path(native))
    config = {
        "model_type": "llava",
        "architectures": ["LlavaQwenForCausalLM"],
        "hidden_size": TEXT["hidden_size"],
        "image_aspect_ratio": ASPECT,
        "image_grid_pinpoints": PINPOINTS,
        "mm_newline_position": "one_token",
        "mm_patch_merge_type": "spatial_unpad",
        "mm_projector_type": "mlp2x_gelu",
        "mm_spatial_pool_mode": "bilinear",
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "small",
    }
    names = {
        "model.vision_tower.": "model.vision_tower.vision_tower.vision_model.",
        "model.multi_modal_projector.linear_1.": "model.mm_projector.0.",
        "model.multi_modal_projector.linear_2.": "model.mm_projector.2.",
        "model.image_newline": "model.image_newline",
        "model.language_model.": "model.",
        "lm_head.": "lm_head.",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        (old,) = (prefix for prefix in names if name.startswith(prefix))
        weights[names[old] + name.removeprefix(old)] = tensor.clone()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


def written(folder: Path, model: Any, processor: dict[str, Any]) -> Any:
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | processor))
    return model
