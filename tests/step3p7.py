"""transformers' image processor of Step-3.7, without its module, which needs torchvision."""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

METHODS = ("_is_extreme_aspect", "_plan_patches", "_get_image_patches")


@lru_cache
def functions() -> dict[str, Any]:
    """Its methods by name. torch replaces what they call from torchvision, bit for bit."""
    from transformers.image_transforms import divide_to_patches

    found = find_spec("transformers.models.step3p7.image_processing_step3p7")
    assert found
    assert found.origin
    (processor,) = (
        node
        for node in ast.parse(Path(found.origin).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Step3p7ImageProcessor"
    )
    methods: list[ast.stmt] = [
        node
        for node in processor.body
        if isinstance(node, ast.FunctionDef) and node.name in METHODS
    ]
    for node in methods:
        assert isinstance(node, ast.FunctionDef)
        node.decorator_list = []
    names: dict[str, Any] = {"torch": torch, "SizeDict": SimpleNamespace}
    names["divide_to_patches"] = divide_to_patches
    exec(compile(ast.Module(methods, []), found.origin, "exec"), names)
    return names


class Processor:
    def __init__(self, whole: int, crop: int, longest: int) -> None:
        self.whole, self.crop, self.max_image_size = whole, crop, longest

    def plan(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of crops; 0, 0 if there are none."""
        planned = functions()["_plan_patches"](self, width, height, self.whole, self.crop)
        return planned[4], planned[3]

    def views(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Cuts uint8 [3, height, width] into the whole view and the crops, each [3, side, side]."""
        cut = functions()["_get_image_patches"]
        whole, crops, _, _ = cut(self, image, self.whole, self.crop, None)
        side = SimpleNamespace(height=self.crop, width=self.crop)
        return whole, [self.resize(one[None], side, None)[0] for one in crops]

    def _is_extreme_aspect(self, width: int, height: int) -> bool:
        return bool(functions()["_is_extreme_aspect"](width, height))

    def _plan_patches(self, *sizes: int) -> Any:
        return functions()["_plan_patches"](self, *sizes)

    def pad(self, images: list[Tensor], pad_size: Any) -> list[Tensor]:
        return [
            F.pad(one, (0, pad_size.width - one.shape[2], 0, pad_size.height - one.shape[1]))
            for one in images
        ]

    def resize(self, images: Tensor, size: Any, resample: None) -> Tensor:
        if images.shape[2:] == (size.height, size.width):
            return images
        return F.interpolate(images, (size.height, size.width), mode="bilinear", antialias=True)
