"""Functions of transformers' Llama 4 image processor, whose module needs torchvision."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@lru_cache
def functions() -> Mapping[str, Any]:
    module = find_spec("transformers.models.llama4.image_processing_llama4")
    assert module
    assert module.origin
    tree = ast.parse(Path(module.origin).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names: dict[str, Any] = {"torch": torch, "math": math, "SizeDict": object}
    names |= {"defaultdict": defaultdict, "lru_cache": lru_cache}
    exec(compile(tree, module.origin, "exec"), names)
    return names


def canvas(width: int, height: int, most: int) -> tuple[int, int]:
    """Height and width in pixels of the canvas of at most `most` tiles of 336 x 336."""
    tile = SimpleNamespace(height=336, width=336)
    # Unwrapped, because its cache needs hashable arguments.
    supported = functions()["find_supported_resolutions"].__wrapped__(most, tile)
    rows, columns = functions()["get_best_fit"]((height, width), torch.tensor(supported)).tolist()
    return rows, columns
