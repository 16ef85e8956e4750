"""What the packed families share beside their blocks: patches, positions, embedding, merger.

Pure functions of grids and weights. Patches lie in merge-block order: the merge_size ** 2 patches
of one token follow each other. Knows no family, no budget and no device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.gemm.gemm import Gemm
from actors.models.layers.block import NORMS, Affine, Norm
from actors.types import Size

Rgb = tuple[float, float, float]

Resample = Literal["bicubic", "bilinear"]

PositionTaps = Callable[[Tensor, int, int, int], tuple[Tensor, Tensor]]
"""How a learned table of positions is resampled, such as bilinear_taps."""

KEYS = -0.75
"""The parameter of the bicubic kernel, as torch has it."""


def patchify(image: Tensor, resized: Size, patch: int, merge: int) -> Tensor:
    """uint8 [3, height, width] to uint8 [patches, 3 x patch x patch], resized, not normalised.

    Zeros on the right and below where the resized image is not of whole merge blocks.
    """
    block = patch * merge
    whole = padded(resize(image, resized), -resized.width % block, -resized.height % block)
    rows, columns = whole.shape[1] // block, whole.shape[2] // block
    blocks = whole.reshape(3, rows, merge, patch, columns, merge, patch)
    return in_one_piece(blocks.permute(1, 4, 2, 5, 0, 3, 6)).view(-1, 3 * patch**2)


def resize(image: Tensor, size: Size, mode: Resample = "bicubic") -> Tensor:
    """uint8 [3, height, width] to another height and width, with antialiasing.

    As transformers' torchvision backend does on CPU, bit for bit.
    """
    if image.shape[1:] == (size.height, size.width):
        return image
    # A batch of one in true channels-last strides takes torch's vectorised uint8 kernel.
    batch = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, size=(size.height, size.width), mode=mode, antialias=True)[0]


def padded(image: Tensor, right: int, below: int) -> Tensor:
    """Zeros on the right and below; less than none cuts off."""
    return F.pad(image, (0, right, 0, below)) if right or below else image


def in_one_piece(pixels: Tensor) -> Tensor:
    """The same, contiguous. By numpy: it takes half of torch's time, and this thread alone, where
    torch would start threads of its own under each that decodes."""
    return torch.from_numpy(np.ascontiguousarray(pixels.numpy()))


def places(rows: int, columns: int, merge: int) -> Tensor:
    """Row and column of each patch of a grid: int64 [rows x columns, 2].

    Equal to transformers.vision_utils.get_vision_position_ids.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    raster = torch.stack([row, column], -1)
    blocks = raster.view(rows // merge, merge, columns // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def bilinear_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Where a learned table of side x side positions is read to be resampled to a grid.

    Returns int64 [patches, 4] into the flat table and float32 [patches, 4] of weights: bilinear,
    corners aligned, as transformers.vision_utils.get_vision_interpolation_indices_and_weights.
    """
    spans = torch.tensor([rows - 1, columns - 1]).clamp(min=1)
    return linear_taps(places.float() * (side - 1) / spans, side)


def centred_bilinear_taps(
    places: Tensor, rows: int, columns: int, side: int
) -> tuple[Tensor, Tensor]:
    """As bilinear_taps, but with pixel centres aligned, borders repeated."""
    source = (places.float() + 0.5) * side / torch.tensor([rows, columns]) - 0.5
    return linear_taps(source, side)


def linear_taps(source: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Taps and weights of places [patches, 2] on a table of side x side: see bilinear_taps."""
    floor = source.floor()
    below = floor.long()
    index = torch.stack([below, below + 1], -1).clamp(0, side - 1)
    share = source - floor
    weight = torch.stack([1 - share, share], -1)
    taps = index[:, 0, :, None] * side + index[:, 1, None, :]
    weights = weight[:, 0, :, None] * weight[:, 1, None, :]
    return taps.flatten(1), weights.flatten(1)


def bicubic_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """As bilinear_taps, but bicubic with pixel centres aligned: [patches, 16].

    Equal to torch's interpolate and grid_sample with align_corners=False, borders repeated.
    """
    source = (places.float() + 0.5) * side / torch.tensor([rows, columns]) - 0.5
    floor = source.floor()
    offsets = torch.arange(-1, 3)
    index = (floor.long()[..., None] + offsets).clamp(0, side - 1)
    distance = ((source - floor)[..., None] - offsets).abs()
    near = ((KEYS + 2) * distance - (KEYS + 3)) * distance**2 + 1
    far = ((KEYS * distance - 5 * KEYS) * distance + 8 * KEYS) * distance - 4 * KEYS
    weight = torch.where(distance <= 1, near, far)
    taps = index[:, 0, :, None] * side + index[:, 1, None, :]
    weights = weight[:, 0, :, None] * weight[:, 1, None, :]
    return taps.flatten(1), weights.flatten(1)


def window_order(rows: int, columns: int, window: int) -> tuple[Tensor, list[int]]:
    """The tokens of a grid of rows x columns tokens, window after window; tokens of each window.

    Windows are window x window tokens, less at the right and below. Equal to
    transformers.vision_utils.get_vision_window_index.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    inside = (row // window * -(-columns // window) + column // window).flatten()
    return inside.argsort(stable=True), inside.bincount().tolist()


def rotary_tables(
    length: int, head_size: int, theta: float, slower: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of one axis: float32 [length, head_size / 4]; rows and columns share them.

    `slower`: what all frequencies are scaled by.
    """
    axis = head_size // 2
    frequencies = slower / theta ** (torch.arange(0, axis, 2, dtype=torch.float32) / axis)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def folded_embedding(weight: Tensor, bias: Tensor, mean: Rgb, std: Rgb) -> Affine:
    """The patch embedding for `uint8 - 128` instead of normalised float pixels, in float32.

    weight [width, 3, frames, patch, patch] takes the same picture in each frame, so the frames are
    summed. Centred bytes are exact in bfloat16; bytes as they are would lose bits in the product.
    """
    means = torch.tensor(mean, dtype=torch.float64, device=weight.device)
    shift = 128 - means[:, None, None] * 255
    folded = scaled_to_bytes(weight.double().sum(2), std)
    return Affine(
        folded.flatten(1).float(), (bias.double() + (folded * shift).sum((1, 2, 3))).float()
    )


def centred(patches: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 less 128, exact in every dtype of 8 bits of precision or more, in one pass."""
    return torch.sub(patches, 128.0, out=torch.empty_like(patches, dtype=dtype))


def scaled_to_bytes(weight: Tensor, std: Rgb) -> Tensor:
    """A patch embedding [width, 3, patch, patch] for bytes, not normalised pixels, in float64."""
    stds = torch.tensor(std, dtype=torch.float64, device=weight.device)
    return weight.double() / (stds[:, None, None] * 255)


class Merger:
    """One token from merge_size ** 2 patches: norm, linear, GELU, linear."""

    def __init__(
        self, norm: Affine, up: Affine, down: Affine, kind: Norm = "layer", epsilon: float = 1e-6
    ) -> None:
        """`norm`: over each patch, or over the patches of a token: its size says which."""
        self.norm = norm
        self.kind = kind
        self.epsilon = epsilon
        self.up = Gemm([up.weight], [up.bias], "bias")
        self.down = Gemm([down.weight], [down.bias], "bias")
        self.nothing = torch.zeros_like(norm.weight, dtype=torch.float32)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[patches, width] to [tokens, out width]; transformers: Qwen3VLVisionPatchMerger.

        `out`: where the rows shall lie, such as columns of wider rows.
        """
        x = self.normed(x.reshape(-1, len(self.norm.weight))).view(-1, self.up.weights[0].shape[1])
        return self.down(0, F.gelu(self.up(0, x)), out)

    def normed(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        if not x.is_cuda or x.dtype == torch.float32:
            return NORMS[self.kind](x, self.norm, self.epsilon)
        from actors.kernels.triton.elementwise import norm  # Triton needs CUDA

        centred = self.kind == "layer"
        by = self.norm
        return norm(x, self.nothing, by.weight, by.bias, self.epsilon, centred=centred)
