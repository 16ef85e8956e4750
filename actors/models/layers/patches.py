"""What is before and after the blocks: bytes to embedded patches, patches to tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.gemm.gemm import Gemm
from actors.models.layers.block import NORMS, Affine, Norm

Rgb = tuple[float, float, float]


def folded_embedding(weight: Tensor, bias: Tensor, mean: Rgb, std: Rgb) -> Affine:
    """The patch embedding for `uint8 - 128` instead of normalised float pixels, in float32.

    Every frame of weight [width, 3, frames, patch, patch] sees the same picture, so the frames are
    summed. Centred bytes are exact in bfloat16; uncentred bytes would lose bits in the GEMM.
    """
    means = torch.tensor(mean, dtype=torch.float64, device=weight.device)
    shift = 128 - means[:, None, None] * 255
    folded = scaled_to_bytes(weight.double().sum(2), std)
    return Affine(
        folded.flatten(1).float(), (bias.double() + (folded * shift).sum((1, 2, 3))).float()
    )


def scaled_to_bytes(weight: Tensor, std: Rgb) -> Tensor:
    """A patch embedding [width, 3, patch, patch] for bytes instead of pixels, in float64."""
    stds = torch.tensor(std, dtype=torch.float64, device=weight.device)
    return weight.double() / (stds[:, None, None] * 255)


def centred(patches: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 - 128, exact in any dtype with at least 8 bits of precision, in one pass."""
    return torch.sub(patches, 128.0, out=torch.empty_like(patches, dtype=dtype))


class Merger:
    """One token from merge_size ** 2 patches: norm, linear, GELU, linear."""

    def __init__(
        self, norm: Affine, up: Affine, down: Affine, kind: Norm = "layer", epsilon: float = 1e-6
    ) -> None:
        """`norm`: over each patch, or over all patches of a token, as its size says."""
        self.norm = norm
        self.kind = kind
        self.epsilon = epsilon
        self.up = Gemm([up.weight], [up.bias], "bias")
        self.down = Gemm([down.weight], [down.bias], "bias")
        self.nothing = torch.zeros_like(norm.weight, dtype=torch.float32)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[patches, width] to [tokens, out width]; transformers: Qwen3VLVisionPatchMerger.

        `out`: where to write the rows, such as columns of wider rows.
        """
        x = self.normed(x.reshape(-1, len(self.norm.weight))).view(-1, self.up.weights[0].shape[1])
        return self.down(0, F.gelu(self.up(0, x)), out)

    def normed(self, x: Tensor) -> Tensor:
        if not x.is_cuda or x.dtype == torch.float32:
            return NORMS[self.kind](x, self.norm, self.epsilon)
        from actors.kernels.triton.elementwise import norm  # Triton needs CUDA

        centred = self.kind == "layer"
        by = self.norm
        return norm(x, self.nothing, by.weight, by.bias, self.epsilon, centred=centred)
