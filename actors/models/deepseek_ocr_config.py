"""What config.json says of DeepSeek-OCR's towers, and which tensors that means.

Names are the checkpoint's own (`seperator` and `layrnorm` too). Knows nothing of tensors' values,
nor of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.errors import CheckpointError
from actors.models.packed_weights import (
    CLIP_NAMES,
    BlockNames,
    Expected,
    affine,
    expected_blocks,
    stated,
)
from actors.spec.crops import CropSizing
from actors.spec.model_spec import ModelSpec

PREFIXES = (
    *("model.sam_model.", "model.vision_model.", "model.projector."),
    *("model.image_", "model.view_"),
)

UNUSED = frozenset({"embeddings.patch_embedding.weight", "embeddings.position_ids"})
"""CLIP's own patch embedding: its patches are SAM's features."""

WINDOW = 14
NECK_CHANNELS = 256
MLP_RATIO = 4
"""The three are constants of the published code."""

SAM_BLOCKS = BlockNames(up=("mlp.lin1",), down="mlp.lin2")


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of one tower."""

    depth: int
    width: int
    heads: int

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class Architecture:
    """`vision_config`, as far as the towers depend on it."""

    sam: Transformer
    clip: Transformer
    whole_view: frozenset[int]
    """SAM's layers without windows."""
    halving: tuple[int, int]
    """Channels after each of the convolutions that end SAM."""
    clip_side: int
    """Rows, or columns, of CLIP's table of positions."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Architecture:
        """Raises CheckpointError for what these towers do not compute."""
        with stated(spec):
            towers = spec.vision["width"]
            sam, clip = towers["sam_vit_b"], towers["clip-l-14-224"]
            first, second = sam["downsample_channels"]
            if second != clip["width"]:
                raise ValueError(f"downsample_channels {second}: CLIP's width is {clip['width']}")
            return cls(
                sam=Transformer(sam["layers"], sam["width"], sam["heads"]),
                clip=Transformer(clip["layers"], clip["width"], clip["heads"]),
                whole_view=frozenset(sam["global_attn_indexes"]),
                halving=(int(first), int(second)),
                clip_side=clip["image_size"] // clip["patch_size"],
            )

    @property
    def head_size(self) -> int:
        """Values of a head of CLIP, whose attention is the shared one."""
        return self.clip.head_size


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the towers, without the checkpoint's prefix."""
    arch, sizing = Architecture.of(spec), crop_sizing(spec)
    clip, channels = arch.clip.width, NECK_CHANNELS
    first, second = arch.halving
    return {
        **expected_sam(arch, sizing),
        **affine("neck.0", (channels, arch.sam.width, 1, 1), bias=False),
        **affine("neck.1", (channels,)),
        **affine("neck.2", (channels, channels, 3, 3), bias=False),
        **affine("neck.3", (channels,)),
        **affine("net_2", (first, channels, 3, 3), bias=False),
        **affine("net_3", (second, first, 3, 3), bias=False),
        "embeddings.class_embedding": (clip,),
        "embeddings.position_embedding.weight": (arch.clip_side**2 + 1, clip),
        **affine("pre_layrnorm", (clip,)),
        **expected_blocks(CLIP_NAMES, arch.clip.depth, clip, MLP_RATIO * clip),
        **affine("layers", (spec.width, clip + second)),
        "newline": (spec.width,),
        "seperator": (spec.width,),
    }


def expected_sam(arch: Architecture, sizing: CropSizing) -> Expected:
    """SAM's layers, and what is before them."""
    width, side = arch.sam.width, sizing.image_patches
    patch = sizing.crops.patch_size
    shapes: Expected = {
        **affine("patch_embed.proj", (width, 3, patch, patch)),
        "pos_embed": (1, side, side, width),
    }
    shapes |= expected_blocks(SAM_BLOCKS, arch.sam.depth, width, MLP_RATIO * width)
    for layer in range(arch.sam.depth):
        trained = side if layer in arch.whole_view else WINDOW
        table = (2 * trained - 1, arch.sam.head_size)
        shapes |= {f"blocks.{layer}.attn.rel_pos_{axis}": table for axis in "hw"}
    return shapes


def crop_sizing(spec: ModelSpec) -> CropSizing:
    """The spec's. Raises CheckpointError if it is of another kind."""
    if not isinstance(spec.sizing, CropSizing):
        raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing with crops")
    return spec.sizing
