"""Image processors of transformers whose modules need torchvision, such as Llama 4's.

Gives their functions, and classes that resize with torch, as torchvision does too.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache
def functions(family: str) -> Mapping[str, Any]:
    module = find_spec(f"transformers.models.{family}.image_processing_{family}")
    assert module
    assert module.origin
    tree = ast.parse(Path(module.origin).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names: dict[str, Any] = {"torch": torch, "np": np, "math": math, "SizeDict": object}
    names |= {"defaultdict": defaultdict, "lru_cache": lru_cache}
    exec(compile(tree, module.origin, "exec"), names)
    return names


class Backend:
    """Replaces TorchvisionBackend."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def __call__(self, image: Tensor, **settings: Any) -> Any:
        """The batch of one image, uint8 [3, height, width], not normalised."""
        names = inspect.signature(self._preprocess).parameters.keys() - {"images", "kwargs"}
        given = {name: getattr(self, name, None) for name in names} | settings
        given |= {"do_normalize": False, "rescale_factor": 1 / 255, "disable_grouping": True}
        return self._preprocess([image], **given)

    def _preprocess(self, images: list[Tensor], **settings: Any) -> Any:
        raise NotImplementedError

    def resize(self, image: Tensor, size: Any, resample: int, **how: Any) -> Tensor:
        mode = {2: "bilinear", 3: "bicubic"}[int(resample)]
        return F.interpolate(image, (size.height, size.width), mode=mode, antialias=True)

    def rescale(self, image: Tensor, factor: float) -> Tensor:
        return image * factor

    def rescale_and_normalize(
        self, images: Tensor, do_rescale: bool, factor: float, *normalization: Any
    ) -> Tensor:
        return images * factor


@lru_cache
def processor(family: str, name: str) -> Any:
    """The class of an image processor, with Backend as its base."""
    module = find_spec(f"transformers.models.{family}.image_processing_{family}")
    assert module
    assert module.origin
    names: dict[str, Any] = {"__package__": f"transformers.models.{family}", "__name__": family}
    for node in ast.parse(Path(module.origin).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names["TorchvisionBackend"], node.decorator_list = Backend, []
        with suppress(ImportError):
            exec(compile(ast.Module([node], []), module.origin, "exec"), names)
    return names[name]


def canvas(width: int, height: int, most: int) -> tuple[int, int]:
    """Height and width in pixels of the canvas of at most `most` tiles of 336 x 336."""
    tile = SimpleNamespace(height=336, width=336)
    # Unwrapped, because its cache needs hashable arguments.
    supported = functions("llama4")["find_supported_resolutions"].__wrapped__(most, tile)
    rows, columns = functions("llama4")["get_best_fit"](
        (height, width), torch.tensor(supported)
    ).tolist()
    return rows, columns
