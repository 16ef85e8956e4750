"""Functions of transformers' image processors whose modules need torchvision, such as Llama 4's."""

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

import numpy as np
import torch


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


def canvas(width: int, height: int, most: int) -> tuple[int, int]:
    """Height and width in pixels of the canvas of at most `most` tiles of 336 x 336."""
    tile = SimpleNamespace(height=336, width=336)
    # Unwrapped, because its cache needs hashable arguments.
    supported = functions("llama4")["find_supported_resolutions"].__wrapped__(most, tile)
    rows, columns = functions("llama4")["get_best_fit"](
        (height, width), torch.tensor(supported)
    ).tolist()
    return rows, columns
