"""What config.json says of InternVL's vision tower, and which tensors that means.

Two schemes of names: `internvl` (the repositories that end in -hf) and `internvl_chat` (the first
ones, whose code is not in transformers). Knows nothing of tensors' values, nor of what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.models.layers.block import Norm
from actors.models.packed_weights import Expected, affine, stated
from actors.models.tiled import tile_sizing
from actors.spec.model_spec import ModelSpec

NORMS: Mapping[str, Norm] = {"layer_norm": "layer", "rms_norm": "rms"}


@dataclass(frozen=True, slots=True)
class Names:
    """What one scheme calls the parts of the tower, without the checkpoint's prefix."""

    prefixes: tuple[str, ...]
    class_token: str
    patches: str
    positions: str
    block: str
    qkv: tuple[str, ...]
    qk_norm: tuple[str, str]
    proj: str
    norms: tuple[str, str]
    scales: tuple[str, str]
    projector: tuple[str, str, str]
    """Norm, up, down."""


NATIVE = Names(
    prefixes=(
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    ),
    class_token="embeddings.cls_token",
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    block="encoder.layer",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    qk_norm=("attention.q_norm", "attention.k_norm"),
    proj="attention.projection_layer",
    norms=("layernorm_before", "layernorm_after"),
    scales=("lambda_1", "lambda_2"),
    projector=("layer_norm", "linear_1", "linear_2"),
)

CHAT = Names(
    prefixes=("vision_model.", "mlp1."),
    class_token="embeddings.class_embedding",
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding",
    block="encoder.layers",
    qkv=("attn.qkv",),
    qk_norm=("attn.q_norm", "attn.k_norm"),
    proj="attn.proj",
    norms=("norm1", "norm2"),
    scales=("ls1", "ls2"),
    projector=("0", "1", "3"),
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`vision_config`, as far as the tower depends on it."""

    names: Names
    depth: int
    width: int
    mlp_width: int
    heads: int
    norm: Norm
    epsilon: float
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm over all of q and all of k (the 6B tower)."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Architecture:
        """Raises CheckpointError for what this tower does not compute."""
        vision, native = spec.vision, spec.family == "internvl"
        with stated(spec):
            if vision.get("hidden_act", "gelu") != "gelu":
                raise ValueError(f"hidden_act {vision['hidden_act']!r}: only gelu is supported")
            return cls(
                names=NATIVE if native else CHAT,
                depth=int(vision["num_hidden_layers"]),
                width=int(vision["hidden_size"]),
                mlp_width=int(vision["intermediate_size"]),
                heads=int(vision["num_attention_heads"]),
                norm=NORMS[vision["norm_type"]],
                epsilon=float(vision.get("layer_norm_eps", 1e-6)),
                qkv_bias=bool(vision["attention_bias" if native else "qkv_bias"]),
                qk_norm=bool(vision["use_qk_norm" if native else "qk_normalization"]),
            )

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.width // self.heads


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefix."""
    arch, sizing = Architecture.of(spec), tile_sizing(spec)
    names, width = arch.names, arch.width
    merged = width * sizing.merge_size**2
    norm, up, down = names.projector
    shapes: Expected = {
        names.class_token: (1, 1, width),
        names.positions: (1, 1 + sizing.side_patches**2, width),
        **affine(names.patches, (width, 3, sizing.patch_size, sizing.patch_size)),
        **affine(norm, (merged,)),
        **affine(up, (spec.width, merged)),
        **affine(down, (spec.width, spec.width)),
    }
    for layer in range(arch.depth):
        block = f"{names.block}.{layer}"
        for name in names.norms:
            shapes |= affine(f"{block}.{name}", (width,), bias=arch.norm == "layer")
        for name in names.qkv:
            rows = 3 * width // len(names.qkv)
            shapes |= affine(f"{block}.{name}", (rows, width), bias=arch.qkv_bias)
        if arch.qk_norm:
            shapes |= {f"{block}.{name}.weight": (width,) for name in names.qk_norm}
        shapes |= {f"{block}.{name}": (width,) for name in names.scales}
        shapes |= affine(f"{block}.{names.proj}", (width, width))
        shapes |= affine(f"{block}.mlp.fc1", (arch.mlp_width, width))
        shapes |= affine(f"{block}.mlp.fc2", (width, arch.mlp_width))
    return shapes
