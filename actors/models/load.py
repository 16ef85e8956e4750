"""From `model:` in the configuration to a tower on a device.

A family's tower.py is imported here, by the name of its folder, when its tower is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from actors.errors import CheckpointError, ConfigError
from actors.families.registry import read
from actors.kernels import attention
from actors.kernels.attention import Attention
from actors.kernels.gemm.fp8 import CAPABILITY
from actors.models import tensors as checkpoint_tensors
from actors.models.layers.block import ATTENTION, BlocksForm, blocks_of
from actors.models.layers.weights import NO_FP8, Fp8Layers, Weights
from actors.models.tower import Family, Tower
from actors.options import BlockChoice, ModelOptions, block_form
from actors.spec.checkpoint import (
    DAMAGED,
    TOKENIZER_FILES,
    Files,
    Json,
    Noted,
    Notes,
    find,
    misstated,
    presets_of,
)
from actors.spec.model_spec import ModelSpec

DUMMY_SEED = 0  # fixed: every replica of a service must give the same embeddings


def family_of(model: ModelSpec) -> Family[Any]:
    """How to build the tower. Raises CheckpointError if `vision_config` lacks or misstates a
    key."""
    tower = import_module(f"actors.families.{model.folder}.tower")
    try:
        family: Family[Any] = tower.family(model)
    except DAMAGED as error:
        part = "the audio encoder's configuration" if model.audio else "vision_config"
        where = misstated(
            {part: dict(model.vision)},
            [{part: dict(one.vision)} for one in examples(model)],
            lambda files: tower.family(replace(model, vision=files[part])),
        )
        raise CheckpointError(
            f"model.id {model.id!r}: {part} lacks or misstates {error}{where}"
        ) from error
    return family


def examples(model: ModelSpec) -> Iterator[ModelSpec]:
    """The specs of the presets of the model's family, and of families that share its folder."""
    for name in presets_of(model.folder, model.family):
        with suppress(CheckpointError):
            yield read(ModelOptions(id=name, load_format="dummy"))


def load(
    options: ModelOptions,
    device: torch.device,
    *,
    captured: bool = False,
    blocks: BlockChoice = "auto",
    fp8: Fp8Layers = NO_FP8,
) -> Tower:
    """Builds the tower. Of the weights, only the tower's are read. Raises CheckpointError.

    `captured`: CUDA graphs will capture the tower; raises StartError, before anything large is
    read, if they cannot. `blocks`: the form of the blocks. Raises ConfigError if the model or the
    device does not support one of these.
    """
    model = read(options)
    if fp8:
        check_fp8(model, device, fp8)
    kernel = choose_attention(model, device, fp8, captured=captured)
    form = form_of_blocks(model, device, blocks)
    tower = assemble(model, tensors(options, model, device), device, kernel, form, fp8)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the graphs that follow need the memory that building used
    return tower


def check_fp8(model: ModelSpec, device: torch.device, layers: Fp8Layers = NO_FP8) -> None:
    """Raises ConfigError if the tower or the device does not support FP8, or if the layers are not
    those of the model."""
    model.check_fp8()
    expected = family_of(model).expected
    linears = {name: name.removesuffix(ATTENTION) for name in layers}
    if unknown := [name for name, linear in linears.items() if f"{linear}.weight" not in expected]:
        raise ConfigError(f"graphs.precision_file: the model has no {', '.join(unknown[:4])}")
    for name, mean in layers.items():
        found = None if mean is None else tuple(mean.shape)
        inputs = None if name.endswith(ATTENTION) else expected[f"{name}.weight"][1:]
        if found != inputs or (mean is not None and not mean.isfinite().all()):
            raise ConfigError(
                f"graphs.precision_file: the mean of {name} does not fit the model: write the file "
                "again with `encoder-service calibrate`"
            )
    if device.type == "cuda" and not has_fp8(device):
        capability = torch.cuda.get_device_capability(device)
        raise ConfigError(
            "graphs.precision is fp8, which needs a GPU of compute capability "
            f"{'{}.{}'.format(*CAPABILITY)}; this one has {'{}.{}'.format(*capability)}: set it to "
            "auto or bf16"
        )


def has_fp8(device: torch.device) -> bool:
    """Whether the device has FP8 tensor cores. The CPU only emulates them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def tensors(options: ModelOptions, model: ModelSpec, device: torch.device) -> Mapping[str, Tensor]:
    """The tower's weights, keyed by the checkpoint's names without their prefix.

    Weights of a checkpoint are on the CPU; random ones are made on the tower's device.
    """
    family = family_of(model)
    if model.dummy:
        return checkpoint_tensors.Dummy(family.expected, DUMMY_SEED, device, family.faint)
    unused = family.unused - family.expected.keys()
    files = find(options)
    reason = partial(reason_for, options, files)
    return checkpoint_tensors.load(files, family.prefixes, family.expected, unused, reason)


def weights_digest(options: ModelOptions) -> str:
    """SHA-256 of the tower's weights and, if it takes texts, of the tokenizer's files. Does not
    depend on what the checkpoint is called."""
    model, files, digest = read(options), find(options), sha256()
    for name in TOKENIZER_FILES if model.text else ():
        if path := files.path(name):
            digest.update(f"{name} {sha256(path.read_bytes()).hexdigest()}".encode())
    if model.dummy:
        return f"dummy {DUMMY_SEED} {digest.hexdigest()}"
    for name, tensor in sorted(tensors(options, model, torch.device("cpu")).items()):
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def reason_for(options: ModelOptions, files: Files, name: str) -> str:
    """Finds the key of config.json that decides whether a tensor is expected, by trying other
    values. Empty if there is none."""
    noted = Noted(files)
    model = read(options, noted)
    expected = name in family_of(model).expected
    config = noted.read_json("config.json") or {}
    part = "audio_config" if model.audio else "vision_config"
    own = dict(leaves(config.get(part) or {}, (part,)))
    defaults = dict(leaves(dict(model.vision), (part,)))
    for path, value in (own | defaults | dict(leaves(config))).items():
        for other in others(value):
            changed = deepcopy(config)
            with suppress(CheckpointError, ArithmeticError, AttributeError, LookupError, TypeError):
                place = changed
                for key in path[:-1]:
                    place = place.setdefault(key, {})
                place[path[-1]] = other
                another = read(options, Notes(noted.contents | {"config.json": changed}))
                if (name in family_of(another).expected) is not expected:
                    return f". Whether {name} exists depends on {'.'.join(path)}, which is {value}"
    return ""


def leaves(config: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys of nested objects, with their values."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def others(value: Any) -> list[Any]:
    """Values to try instead: fewer and more layers, the opposite switch, an empty and a longer
    list."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [1, 2 * value]
    return [[], value + value[-1:]] if isinstance(value, list) else []


def build(
    model: ModelSpec,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    blocks: BlocksForm | None = None,
    fp8: Fp8Layers = NO_FP8,
) -> Tower:
    """Builds the tower with the fastest attention and, unless `blocks` is given, the fastest
    blocks."""
    blocks = blocks or form_of_blocks(model, device)
    return assemble(model, tensors, device, choose_attention(model, device, fp8), blocks, fp8)


def choose_attention(
    model: ModelSpec, device: torch.device, fp8: Fp8Layers = NO_FP8, *, captured: bool = False
) -> Attention:
    dtype: torch.dtype = getattr(torch, model.dtype)
    size, in_fp8 = family_of(model).head_size, any(name.endswith(ATTENTION) for name in fp8)
    return attention.choose(device, dtype, size, captured=captured, fp8=in_fp8)


def assemble(
    model: ModelSpec,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    kernel: Attention,
    blocks: BlocksForm,
    fp8: Fp8Layers = NO_FP8,
) -> Tower:
    dtype: torch.dtype = getattr(torch, model.dtype)
    family = family_of(model)
    parts = family.parts(model, Weights(tensors, device, dtype, fp8))
    return family.tower(model, parts, kernel, blocks)


def form_of_blocks(
    model: ModelSpec, device: torch.device, asked: BlockChoice = "auto"
) -> BlocksForm:
    on_cuda = device.type == "cuda"
    return blocks_of(block_form(asked, on_cuda=on_cuda, dtype=model.dtype, fast=model.fast_blocks))
