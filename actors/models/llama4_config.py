"""What config.json says of Llama 4's vision tower, and which tensors that means.

Names are the checkpoint's own. Knows nothing of tensors' values, nor of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.models.packed_weights import Expected, affine, stated
from actors.models.tiled import tile_sizing
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.", "multi_modal_projector.")

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, slots=True)
class Architecture:
    """`vision_config`, as far as the tower depends on it."""

    depth: int
    width: int
    mlp_width: int
    heads: int
    adapter_width: int
    theta: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Architecture:
        """Raises CheckpointError for what this tower does not compute."""
        vision = spec.vision
        rotary = vision.get("rope_parameters") or vision
        with stated(spec):
            widths = {
                int(vision[key])
                for key in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
            }
            if len(widths) != 1:
                raise ValueError(f"projector_input_dim, {widths}: one width is supported")
            return cls(
                depth=int(vision["num_hidden_layers"]),
                width=int(vision["hidden_size"]),
                mlp_width=int(vision["intermediate_size"]),
                heads=int(vision["num_attention_heads"]),
                adapter_width=widths.pop(),
                theta=float(rotary.get("rope_theta", 10000)),
            )

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.width // self.heads


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefix."""
    arch, sizing = Architecture.of(spec), tile_sizing(spec)
    width, adapter = arch.width, arch.adapter_width
    shapes: Expected = {
        "class_embedding": (width,),
        "positional_embedding_vlm": (sizing.side_patches**2 + 1, width),
        "patch_embedding.linear.weight": (width, 3 * sizing.patch_size**2),
        "vision_adapter.mlp.fc1.weight": (adapter, width * sizing.merge_size**2),
        "vision_adapter.mlp.fc2.weight": (adapter, adapter),
        "linear_1.weight": (spec.width, adapter),
        **affine("layernorm_pre", (width,)),
        **affine("layernorm_post", (width,)),
    }
    for layer in range(arch.depth):
        block = f"model.layers.{layer}"
        shapes |= affine(f"{block}.input_layernorm", (width,))
        shapes |= affine(f"{block}.post_attention_layernorm", (width,))
        for name in (*QKV, "self_attn.o_proj"):
            shapes |= affine(f"{block}.{name}", (width, width))
        shapes |= affine(f"{block}.mlp.fc1", (arch.mlp_width, width))
        shapes |= affine(f"{block}.mlp.fc2", (width, arch.mlp_width))
    return shapes
