"""An item on its way to vLLM's engine, for the place "local", in one of three forms.

- vLLM's own patches, [patches, 3 x temporal x patch x patch], have every pixel of an image twice.
- The API process keeps images *whole* where it can (vllm_pixels.py): resized pixels, uint8 [height,
  width, 3], in the shape of as many patches, [patches, 3 x patch x patch]. The engine's process
  (vllm_local.py) cuts them, on the GPU.
- The Chat replica (llm/embedder.py) sends patches that are *cut* as the engine takes them, uint8
  [frames, patches, 3 x patch x patch]: of the one or two frames of each temporal group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.media.patchify import cut_blocks
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing, WindowedSizing
from actors.types import ItemPlan

log = logging.getLogger("vllm.encoder_service")

KEYS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""vLLM's names for an item's patches and its grid, by modality."""
TEMPORAL_PATCH_SIZE = 2
"""Of all families that place "local" takes."""

engine_is_here = False
"""Whether vLLM's engine runs in this process: its `LLM` without multiprocessing, or a fork of the
API process. Images are not kept whole there, because the engine tries its tower on patches of the
same image processor."""


def kept_whole(images: Tensor, patch_size: int) -> Tensor:
    """Images [images, 3, height, width] as they are sent, [images, patches, 3 x patch x patch].
    Copies them only if they are not [height, width, 3] in memory."""
    return images.permute(0, 2, 3, 1).reshape(len(images), -1, 3 * patch_size**2)


def pixels_and_grid(feature: Any) -> tuple[Any, Any]:
    """Those of an item, as vLLM wraps them. Pixels are patches, or an image that was kept whole.
    What the item lacks is None."""
    pixels, grid = KEYS.get(feature.modality, ("", ""))
    data = feature.data or {}
    return data.get(pixels), data.get(grid)


def has_rows(feature: Any) -> bool:
    """Whether a client sent an item's rows, so that nobody has to encode it."""
    return f"{feature.modality}_embeds" in (feature.data or {})


def is_whole(pixels: Tensor, spec: ModelSpec) -> bool:
    return pixels.shape[1:] == (3 * spec.sizing.patch_size**2,)


def is_cut(pixels: Tensor) -> bool:
    return pixels.ndim == 3


def cut(pixels: Tensor, grid: Sequence[int], sizing: BlockSizing) -> Tensor:
    """Cuts an image that was kept whole into patches, uint8 [patches, 3 x patch x patch]."""
    patch, (_, rows, columns) = sizing.patch_size, grid
    image = pixels.view(rows * patch, columns * patch, 3).permute(2, 0, 1)
    return cut_blocks(image, patch, sizing.merge_size)


def as_vllm_cuts(pixels: Tensor, grid: Sequence[int], sizing: BlockSizing) -> Tensor:
    """Cuts it into vLLM's patches, uint8 [patches, 3 x temporal x patch x patch]."""
    return joined(cut(pixels, grid, sizing)[None])


def joined(frames: Tensor) -> Tensor:
    """vLLM's patches of one or two frames, uint8 [frames, patches, 3 x patch x patch]. One frame is
    repeated."""
    count, patches, _ = frames.shape
    channels = frames.view(count, patches, 3, -1).permute(1, 2, 0, 3)
    return channels.expand(-1, -1, TEMPORAL_PATCH_SIZE, -1).reshape(patches, -1)


def cut_for_vllm(feature: Any, spec: ModelSpec) -> None:
    """Gives vLLM's tower its own patches of an item, whatever its form."""
    try:
        pixels, grid = pixels_and_grid(feature)
        if pixels is None:
            return
        shape = grid.data.tolist()
        if is_whole(pixels.data, spec):
            pixels.data = as_vllm_cuts(pixels.data, shape, block_sizing(spec))
        elif is_cut(pixels.data):
            pixels.data = joined(ordered(pixels.data, shape, spec, back=True))
    except Exception as error:  # may not end vLLM's scheduler
        log.error("an image cannot be cut for vLLM's tower: %r", error)


def block_sizing(spec: ModelSpec) -> BlockSizing:
    assert isinstance(spec.sizing, BlockSizing)  # of all TOWERS
    return spec.sizing


def patches_of(pixels: Tensor, plan: ItemPlan, spec: ModelSpec) -> tuple[Tensor, Tensor | None]:
    """Converts any of the three forms to `Item.patches` and `Item.later`. In vLLM's patches, the
    frames of a temporal group follow one another within each channel."""
    if is_cut(pixels):
        frames = pixels.unbind()
        return frames[0], frames[1] if plan.frames else None
    grid = plan.grid_thw
    if is_whole(pixels, spec):
        return ordered(cut(pixels, grid, block_sizing(spec)), grid, spec), None
    size = spec.sizing.patch_size**2
    channels = pixels.view(len(pixels), 3, -1, size)
    first = ordered(bytes_of(channels[:, :, 0], spec), grid, spec)
    if not plan.frames:
        return first, None
    return first, ordered(bytes_of(channels[:, :, -1], spec), grid, spec)


def bytes_of(patches: Tensor, spec: ModelSpec) -> Tensor:
    """Converts [patches, 3, pixels], which may be normalised, to uint8 [patches, 3 x pixels]. Exact
    except for bfloat16 values above 2, which may become the next byte."""
    if patches.dtype != torch.uint8:
        mean, std = torch.tensor([spec.mean, spec.std], device=patches.device)[..., None]
        patches = ((patches.float() * std + mean) * 255).round_().clamp_(0, 255).to(torch.uint8)
    return patches.flatten(1)


def ordered(patches: Tensor, grid: Sequence[int], spec: ModelSpec, *, back: bool = False) -> Tensor:
    """Orders patches [..., patches, bytes] by window, as our patchifier does, if the tower has
    windows. `back`: from that order to vLLM's."""
    if not isinstance(spec.sizing, WindowedSizing):
        return patches
    order = torch.from_numpy(spec.sizing.order(*grid[-2:])[0]).to(patches.device)
    if back:
        order = order.argsort()
    tokens = patches.view(-1, len(order), spec.sizing.merge_size**2 * patches.shape[-1])
    return tokens[:, order].reshape(patches.shape)
