"""What config.json says of the two towers of the Step3 families, and which tensors that means.

Step3-VL-10B and Step-3.7 have a Perception Encoder, Step3 has a tower of its own. Names are the
checkpoint's. Knows nothing of tensors' values, nor of what is computed.
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
from actors.spec.model_spec import ModelSpec
from actors.spec.windows import WindowSizing

PREFIXES = ("vision_model.", "vit_", "model.vision_model.", "model.vit_")

PERCEPTION = BlockNames(
    block="transformer.resblocks",
    norm1="ln_1",
    qkv=("attn.in_proj",),
    proj="attn.out_proj",
    norm2="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    scales=("ls_1.gamma", "ls_2.gamma"),
)

ALIASES = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""What the Perception Encoder's own configuration calls what transformers' calls otherwise."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """`vision_config`, as far as the towers depend on it."""

    depth: int
    width: int
    mlp_width: int
    heads: int
    epsilon: float
    table_side: int
    """Rows, or columns, of the learned table of positions."""
    projector_bias: bool

    @classmethod
    def of(cls, spec: ModelSpec) -> Architecture:
        """Of either tower, under the keys of either. Raises CheckpointError."""
        with stated(spec):
            vision = {ALIASES.get(key, key): value for key, value in spec.vision.items()}
            width = int(vision["hidden_size"])
            ratio = vision.get("mlp_ratio")
            return cls(
                depth=int(vision["num_hidden_layers"]),
                width=width,
                mlp_width=int(vision["intermediate_size"] if ratio is None else width * ratio),
                heads=int(vision["num_attention_heads"]),
                epsilon=float(vision.get("layer_norm_eps", 1e-5)),
                table_side=int(vision["image_size"]) // int(vision["patch_size"]),
                projector_bias=bool(vision["projector_bias"]),
            )

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.width // self.heads


def perception_expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the Perception Encoder, without prefix."""
    arch, sizing = Architecture.of(spec), window_sizing(spec)
    width, patch = arch.width, sizing.patch_size
    blocks = expected_blocks(PERCEPTION, arch.depth, width, arch.mlp_width)
    return {
        **affine("conv1", (width, 3, patch, patch), bias=False),
        "positional_embedding": (arch.table_side**2, width),
        **affine("ln_pre", (width,)),
        **{published(name): shape for name, shape in blocks.items()},
        **affine("vit_downsampler1", (2 * width, width, 3, 3)),
        **affine("vit_downsampler2", (4 * width, 2 * width, 3, 3)),
        **affine("large_projector", (spec.width, 4 * width), bias=arch.projector_bias),
    }


def published(name: str) -> str:
    """The checkpoint has `in_proj_weight`, as torch.nn.MultiheadAttention, not `in_proj.weight`."""
    return name.replace(".in_proj.", ".in_proj_")


def step3_expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of Step3's own tower, without prefix."""
    arch, sizing = Architecture.of(spec), window_sizing(spec)
    width, patch = arch.width, sizing.patch_size
    first = int(spec.vision["output_hidden_size"])
    return {
        "embeddings.class_embedding": (1, width),
        **affine("embeddings.patch_embedding", (width, 3, patch, patch)),
        "embeddings.position_embedding.weight": (arch.table_side**2 + 1, width),
        **expected_blocks(CLIP_NAMES, arch.depth, width, arch.mlp_width),
        **affine("downsampler", (first, width, 2, 2)),
        **affine("downsampler2", (2 * first, first, 3, 3)),
        **affine("large_projector", (spec.width, 2 * first), bias=arch.projector_bias),
    }


def window_sizing(spec: ModelSpec) -> WindowSizing:
    """The spec's. Raises CheckpointError if it is of another kind."""
    if not isinstance(spec.sizing, WindowSizing):
        raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing in windows")
    return spec.sizing
