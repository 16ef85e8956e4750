"""transformers' image processors whose modules need torchvision, which torch replaces here.

torch computes what they call from torchvision, bit for bit.
"""

from __future__ import annotations
import __future__

import ast
import itertools
import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.image_processing_utils import BatchFeature
from transformers.image_transforms import group_images_by_shape, reorder_images
from transformers.video_utils import group_videos_by_shape, reorder_videos

MODES = {2: "bilinear", 3: "bicubic"}
"""By PIL.Image.Resampling."""

OWN = (
    *("patch_size", "dynamic_hd", "max_crops", "overlap_margins", "pooling_size"),
    *("downsample_ratio", "min_num_patches", "max_num_patches", "max_model_len"),
)
"""Settings of the classes themselves."""


class Backend:
    """What processors call of TorchvisionBackend. Does not normalise: pixels are 0 to 255."""

    def resize(
        self, image: Tensor, size: Any, resample: int, antialias: bool = True, **_: Any
    ) -> Tensor:
        return resized(image, (size.height, size.width), MODES[int(resample)], antialias)

    def rescale_and_normalize(self, images: Tensor, *_: Any, **__: Any) -> Tensor:
        return images.float()


def resized(
    image: Tensor, size: tuple[int, int], mode: str = "bilinear", antialias: bool = True
) -> Tensor:
    """[..., channels, height, width]."""
    batch = image if image.dim() == 4 else image[None]
    if batch.shape[2:] != tuple(size):
        batch = F.interpolate(batch, tuple(size), mode=mode, antialias=antialias)
    return batch.view(*image.shape[:-2], *size)


def padded(image: Tensor, sides: list[int], fill: list[int]) -> Tensor:
    """`sides`: left, above, right, below."""
    left, above, right, below = sides
    return F.pad(image, (left, right, above, below), value=fill[0])


@lru_cache
def processor(family: str, name: str, *, pixels: bool = True) -> Any:
    """An instance of the class with its default settings. Without `pixels` it calls nothing of
    torchvision: its images stay as they are."""
    kind = "video" if "Video" in name else "image"
    found = find_spec(f"transformers.models.{family}.{kind}_processing_{family}")
    assert found
    assert found.origin
    body: list[ast.stmt] = []
    for node in ast.parse(Path(found.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            body.append(node)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            node.decorator_list, node.bases = [], [ast.Name("Backend", ast.Load())]
            node.body = [one for one in node.body if not public(one)]
            body.append(node)
    module = ast.fix_missing_locations(ast.Module(body, []))
    names: dict[str, Any] = {
        **{"torch": torch, "F": F, "math": math, "itertools": itertools, "Backend": Backend},
        **{"BatchFeature": BatchFeature, "SizeDict": SimpleNamespace},
        **{"group_images_by_shape": group_images_by_shape, "reorder_images": reorder_images},
        **{"group_videos_by_shape": group_videos_by_shape, "reorder_videos": reorder_videos},
        "tvF": SimpleNamespace(
            resize=lambda image, size: resized(image, size) if pixels else image,
            pad=lambda image, sides, fill: padded(image, sides, fill) if pixels else image,
        ),
        "PILImageResampling": SimpleNamespace(BICUBIC=3, BILINEAR=2),
        **dict.fromkeys(("IMAGENET_STANDARD_MEAN", "IMAGENET_STANDARD_STD"), [0.5] * 3),
        **dict.fromkeys(("OPENAI_CLIP_MEAN", "OPENAI_CLIP_STD"), [0.5] * 3),
        **dict.fromkeys((f"{name}Kwargs", f"{name}InitKwargs", "VideoMetadata")),
    }
    exec(compile(module, found.origin, "exec", flags=__future__.annotations.compiler_flag), names)
    return names[name]()


def public(node: ast.stmt) -> bool:
    """Whether it is a method around the one that computes, which needs the rest of the class."""
    return isinstance(node, ast.FunctionDef) and node.name in ("__init__", "preprocess")


def processed(family: str, name: str, images: list[Tensor], **settings: Any) -> Any:
    """Processes images, uint8 [3, height, width], or videos with frames first. Returns the outputs,
    whose pixels are floats of 0 to 255."""
    one = processor(family, name)
    size = settings.pop("size", None) or getattr(one, "size", {})
    given: dict[str, Any] = {
        **{"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255},
        **{"do_normalize": True, "do_convert_rgb": True, "disable_grouping": True},
        **{"resample": one.resample, "image_mean": one.image_mean, "image_std": one.image_std},
        "return_tensors": None,
    }
    own = {key: getattr(one, key) for key in OWN if hasattr(one, key)}
    return one._preprocess(images, size=SimpleNamespace(**size), **given | own | settings)
