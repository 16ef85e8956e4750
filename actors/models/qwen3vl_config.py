"""What config.json says of Qwen3-VL's and Qwen3.5's vision tower, and which tensors that means.

Names are the checkpoint's own. Knows nothing of tensors' values, nor of what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.models.layers.block import Activation
from actors.models.packed_weights import BlockNames, affine, expected_blocks, stated
from actors.spec.model_spec import ModelSpec

PREFIXES = ("model.visual.", "visual.")
"""What the tower's tensors are called in a checkpoint: as transformers saves them, as published."""

ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`vision_config`, as far as the tower depends on it."""

    depth: int
    width: int
    mlp_width: int
    heads: int
    out_width: int
    patch_size: int
    merge_size: int
    frames: int
    positions_side: int
    """The learned positions form a square table of this side."""
    taps: tuple[int, ...]
    """Layers that feed the deepstack mergers, in the order of the mergers."""
    activation: Activation
    theta: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Architecture:
        """Raises CheckpointError for what this tower does not compute."""
        vision = spec.vision
        with stated(spec):
            return cls(
                depth=int(vision["depth"]),
                width=int(vision["hidden_size"]),
                mlp_width=int(vision["intermediate_size"]),
                heads=int(vision["num_heads"]),
                out_width=int(vision["out_hidden_size"]),
                patch_size=int(vision["patch_size"]),
                merge_size=int(vision["spatial_merge_size"]),
                frames=int(vision["temporal_patch_size"]),
                positions_side=int(int(vision["num_position_embeddings"]) ** 0.5),
                taps=tuple(int(layer) for layer in vision["deepstack_visual_indexes"]),
                activation=ACTIVATIONS[vision.get("hidden_act", "gelu_pytorch_tanh")],
                theta=float((vision.get("rope_parameters") or {}).get("rope_theta", 10000)),
            )

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.width // self.heads


def expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the tower, without the checkpoint's prefix."""
    arch = Architecture.of(spec)
    patch = (3, arch.frames, arch.patch_size, arch.patch_size)
    merged = arch.width * arch.merge_size**2
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed.weight": (arch.positions_side**2, arch.width),
        **affine("patch_embed.proj", (arch.width, *patch)),
    }
    shapes |= expected_blocks(BlockNames(), arch.depth, arch.width, arch.mlp_width)
    deepstack = {f"deepstack_merger_list.{index}": merged for index in range(len(arch.taps))}
    for merger, normed in {"merger": arch.width, **deepstack}.items():
        shapes |= affine(f"{merger}.norm", (normed,))
        shapes |= affine(f"{merger}.linear_fc1", (merged, merged))
        shapes |= affine(f"{merger}.linear_fc2", (arch.out_width, merged))
    return shapes
