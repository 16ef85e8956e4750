"""What a CUDA graph cannot hold is in no tower's forward: values read back, tensors of the host.

On torch's meta device, where values do not exist: reading one fails there as it does in a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.families import registry
from actors.kernels.attention import SegmentAttention, Values
from actors.kernels.gemm import fp8
from actors.models import load
from actors.models.layers.block import ReferenceBlocks
from actors.models.layers.weights import NO_FP8, Fp8Layers, Weights
from actors.options import ModelOptions
from tests import checkpoints, checkpoints_audio
from tests.checkpoints_clip import (
    write_aimv2,
    write_aya,
    write_clip,
    write_clip_texts,
    write_granite4,
    write_idefics3,
    write_janus,
    write_lfm2,
    write_llava,
    write_llava_next,
    write_llava_next_video,
    write_mlcd,
    write_onevision,
    write_ovis2,
    write_paligemma,
    write_siglip,
    write_siglip2,
    write_siglip2_texts,
    write_siglip_texts,
)
from tests.checkpoints_dino import write_dinov2, write_dinov3
from tests.checkpoints_minicpm import write_minicpmv
from tests.checkpoints_molmo import write_molmo2
from tests.checkpoints_nemotron import write_nemotron
from tests.checkpoints_ocr import write_deepseek_ocr, write_deepseek_ocr2
from tests.checkpoints_phi import write_phi4
from tests.checkpoints_pixtral import write_lighton_ocr, write_mistral3, write_pixtral
from tests.checkpoints_step import write_step3, write_step3p7
from tests.checkpoints_tiles import (
    write_gemma3,
    write_gemma4,
    write_internvl,
    write_llama4,
    write_mllama,
)

META = torch.device("meta")

WRITERS: dict[str, Callable[[Path], object]] = {
    **{
        kind: partial(checkpoints.write, model_type=kind)
        for kind in (
            "qwen2_vl",
            "qwen2_5_vl",
            "exaone4_5",
            "qwen3_vl",
            *("glm4v", "glm_ocr", "glm5_next", "hunyuan_vl", "ernie4_5_vl_moe", "minimax_m3_vl"),
            checkpoints.KIMI,
            checkpoints.PADDLE,
            checkpoints.VIDEO_LLAMA,
        )
    },
    "internvl-300M": partial(write_internvl, tower="300M"),
    "internvl-6B": partial(write_internvl, tower="6B"),
    "llama4": write_llama4,
    "mllama": write_mllama,
    "gemma3": write_gemma3,
    "gemma4": partial(write_gemma4, clipped=True),
    "pixtral": write_pixtral,
    "mistral3": write_mistral3,
    "lighton_ocr": write_lighton_ocr,
    "siglip": write_siglip,
    "clip": write_clip,
    "siglip-vectors": write_siglip_texts,
    "clip-vectors": write_clip_texts,
    "siglip2": write_siglip2,
    "siglip2-vectors": write_siglip2_texts,
    "dinov2": write_dinov2,
    "dinov2-vectors": partial(write_dinov2, registers=3, gated=True),
    "lfm2_vl": write_lfm2,
    "lfm2_vl-plain": partial(write_lfm2, plain=True),
    "aimv2": write_aimv2,
    "mlcd": write_mlcd,
    "mlcd-vectors": write_mlcd,
    "dinov3": write_dinov3,
    "dinov3-vectors": partial(write_dinov3, gated=True),
    "llava": partial(write_llava, tower="clip"),
    "llava_next": partial(write_llava_next, tower="siglip"),
    "llava_next_video": write_llava_next_video,
    "granite4_vision": write_granite4,
    "llava_onevision": write_onevision,
    "paligemma": partial(write_paligemma, text="gemma2"),
    "janus": write_janus,
    "aya_vision": partial(write_aya, kind="AyaVision"),
    "cohere2_vision": partial(write_aya, kind="Cohere2Vision"),
    "ovis2": write_ovis2,
    "idefics3": partial(write_idefics3, kind="SmolVLM"),
    "minicpmv4_6": write_minicpmv,
    "phi4_multimodal": write_phi4,
    "molmo2": write_molmo2,
    "nemotron_h_omni": partial(write_nemotron, predicts=True),
    "deepseek_ocr": write_deepseek_ocr,
    "deepseek_ocr2": write_deepseek_ocr2,
    "step3p7": write_step3p7,
    "step3": write_step3,
    **checkpoints_audio.WRITERS,
}


class ShapesOnly(SegmentAttention):
    """In place of a kernel: the result lies over q, as the kernels' does; reads nothing."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        assert self.pixels.alive() == 0, "bytes in the tower's dtype are kept through the blocks"
        return qkv.flatten(1)[:, : qkv[0, 0].numel()]


class Pixels(TorchDispatchMode):
    """Follows what has the shape of the patches, in the tower's dtype."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape == self.shape and made.dtype == torch.bfloat16:
            self.made.append(weakref.ref(made))
        return made

    def alive(self) -> int:
        assert self.made, "the forward makes nothing of its patches: this test sees nothing"
        return sum(one() is not None for one in self.made)


def forwards(
    options: ModelOptions, *, reference: bool = False, in_fp8: Fp8Layers = NO_FP8
) -> Sequence[Tensor]:
    """Each path once, and once more with videos where those have inputs of their own."""
    model = registry.read(options)
    weights = load.tensors(options, model, META)
    family = load.family_of(model)
    parts = family.parts(model, Weights(weights, META, torch.bfloat16, in_fp8))
    rows = []
    for path in model.paths:
        for videos in (False, True):
            tower = family.tower(model, parts, SegmentAttention(), ReferenceBlocks)
            tokens = 2 * model.sizing.token_range()[1]
            shapes = tower.inputs(path, tokens, 3)
            if videos:
                more = tower.video_inputs(path, tokens)
                if not more:
                    continue
                shapes = shapes | more
            values = {
                name: torch.empty(shape, dtype=dtype, device=META)
                for name, (shape, dtype) in shapes.items()
            }
            shown = values["patches"].view(torch.float32) if model.audio else values["patches"]
            pixels = Pixels(shown.shape)
            attention = SegmentAttention() if reference else ShapesOnly(pixels)
            tower = family.tower(model, parts, attention, ReferenceBlocks)
            with torch.inference_mode(), pixels:
                rows.append(tower.forward(path, values))
    return rows


@pytest.mark.parametrize("kind", WRITERS)
def test_forward_reads_nothing_back_and_keeps_no_pixels(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    options = ModelOptions(
        id=str(tmp_path),
        output="vector" if kind.endswith("-vectors") else "rows",
        tower="audio" if kind in checkpoints_audio.WRITERS else None,
    )
    rows = forwards(options)
    assert {(one.device, one.dtype) for one in rows} == {(META, torch.bfloat16)}
    if kind == "deepseek_ocr2" or kind in checkpoints_audio.CONFORMERS:
        return  # attention of its own, which reads nowhere where segments end
    with pytest.raises(RuntimeError):  # so does the attention that reads where segments end
        forwards(options, reference=True)


@pytest.mark.parametrize(
    ("kind", "inputs", "others"),
    [
        ("qwen3_vl", ("attn.qkv", "linear_fc1"), ("mlp.linear_fc2",)),
        ("qwen2_5_vl", ("attn.qkv", "gate_proj", "merger.mlp.0"), ("down_proj",)),
    ],
)
def test_the_reference_form_in_fp8_reads_nothing_back(
    kind: str,
    inputs: tuple[str, ...],
    others: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the means of a plan. A mean of `inputs` moves to the norm in front of the layer; those
    of `others` are compensated in every forward."""
    compensated = Mock(wraps=fp8.compensated)
    monkeypatch.setattr(fp8, "compensated", compensated)
    checkpoints.write(tmp_path, model_type=kind)
    options = ModelOptions(id=str(tmp_path))
    expected = load.family_of(registry.read(options)).expected
    weights = {name.removesuffix(".weight"): shape for name, shape in expected.items()}
    layers = [name for name in weights if name.endswith((*inputs, *others))]
    rows = forwards(options, in_fp8={name: torch.ones(weights[name][1]) for name in layers})
    assert {(one.device, one.dtype) for one in rows} == {(META, torch.bfloat16)}
    # The last merger's norm is over one patch of the layer's inputs: a part of the mean is left.
    left = [name for name in layers if name.endswith(others) or name.startswith("merger")]
    assert compensated.call_count == len(rows) * len(left) > len(rows)
