"""The vision towers of Qwen3-VL and, without deepstack, of Qwen3.5; dense and MoE have the same.

Computes what transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel computes for images,
under the checkpoint's own names. Knows nothing of graphs, budgets or where weights come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.models import packed
from actors.models.layers.block import Style
from actors.models.packed_tower import Parts, Positions
from actors.models.packed_weights import BlockNames, Weights
from actors.models.qwen3vl_config import Architecture
from actors.spec.model_spec import ModelSpec


def parts(spec: ModelSpec, weights: Weights) -> Parts:
    """The tower's, from tensors as qwen3vl_config.expected names them."""
    arch = Architecture.of(spec)

    def merger(name: str) -> packed.Merger:
        return packed.Merger(
            norm=weights.affine(f"{name}.norm"),
            up=weights.affine(f"{name}.linear_fc1"),
            down=weights.affine(f"{name}.linear_fc2"),
        )

    # Features follow each other in the order of layers, whatever the order of the mergers.
    deepstack = (arch.taps.index(layer) for layer in sorted(arch.taps))
    mergers = [
        merger("merger"),
        *(merger(f"deepstack_merger_list.{index}") for index in deepstack),
    ]

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        rows = x.new_empty(len(x) // arch.merge_size**2, spec.width)
        columns = rows.chunk(len(mergers), dim=1)  # no concatenation: rows are most of the memory
        for hidden, merge, out in zip([x, *tapped], mergers, columns, strict=True):
            merge(hidden, out)
        return rows

    return Parts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=weights.blocks(BlockNames(), arch.depth),
        style=Style(arch.heads, arch.activation),
        head=head,
        taps=arch.taps,
        positions=Positions(
            weights.place(weights.tensors["pos_embed.weight"]), packed.bilinear_taps, 4
        ),
        theta=arch.theta,
    )
