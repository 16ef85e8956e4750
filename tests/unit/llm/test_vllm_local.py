"""The place "local" over a stand-in for vLLM's own half: requests wait until the engine has their
rows. Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.video_chunks import rows_of
from actors.media.patchify import patchifier_of
from actors.spec.model_spec import ModelSpec
from actors.types import Clip, Item, Size
from tests.small_presets import write_small
from tests.unit.vllm_half import ECConnectorRole, config, stand_in

FAMILIES = ("qwen2vl-7b", "qwen25vl-7b", "qwen35-27b")


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """encoder_service.engines.vllm_connector as vLLM would load it."""
    stand_in(monkeypatch)
    import encoder_service.engines.vllm_connector as module

    yield module
    for name in ("vllm_connector", "vllm_local"):
        sys.modules.pop(f"encoder_service.engines.{name}", None)


@dataclass
class Images:
    """A request of vLLM, as far as the connector reads it."""

    request_id: str
    items: Mapping[str, Any]
    """By identifier, what vLLM's processor made of it, and its rows."""
    mm_features: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.mm_features = []
        offset = 0
        for name, (modality, data, tokens) in self.items.items():
            place = SimpleNamespace(offset=offset, length=tokens)
            self.mm_features.append(
                SimpleNamespace(
                    identifier=name, mm_hash=name, modality=modality, data=data, mm_position=place
                )
            )
            offset += tokens

    def get_num_encoder_embeds(self, index: int) -> int:
        return int(self.mm_features[index].mm_position.length)


class Halves:
    """Both halves of the connector, and what vLLM does with them."""

    def __init__(self, module: ModuleType, model: Path, **options: Any) -> None:
        vllm = config(None)
        vllm.ec_transfer_config.ec_connector_extra_config = {
            "place": "local",
            "graphs": {"token_budgets": [16, 64, 256]},
            **options,
        }
        vllm.ec_transfer_config.get_from_extra_config = (
            vllm.ec_transfer_config.ec_connector_extra_config.get
        )
        vllm.parallel_config = SimpleNamespace(world_size_across_dp=1)
        vllm.load_config = SimpleNamespace(load_format="dummy")
        vllm.model_config.model, vllm.model_config.revision = str(model), None
        vllm.model_config.dtype = torch.float32
        connect = module.EncoderServiceConnector
        self.worker = connect(vllm, ECConnectorRole.WORKER)
        self.scheduler = connect(vllm, ECConnectorRole.SCHEDULER)
        self.cache: dict[str, Tensor] = {}
        self.spec: ModelSpec = self.worker.encoder.spec

    def step(self, *requests: Images) -> list[Images]:
        """One turn of vLLM's loop: those of the requests that could be scheduled."""
        scheduled = []
        for request in requests:
            if self.scheduler.ensure_cache_available(request, 0):
                for index, feature in enumerate(request.mm_features):
                    if self.scheduler.has_cache_item(feature.identifier):
                        self.scheduler.update_state_after_alloc(request, index)
                scheduled.append(request)
        metadata = self.scheduler.build_connector_meta(None)
        if scheduled:
            self.worker.bind_connector_metadata(metadata)
            self.worker.start_load_caches(self.cache)
        return scheduled

    def until(self, request: Images) -> None:
        end = time.monotonic() + 60
        while request not in self.step(request):
            assert time.monotonic() < end
            time.sleep(0.001)


@pytest.fixture(params=FAMILIES)
def halves(
    request: pytest.FixtureRequest, connector_module: ModuleType, tmp_path: Path
) -> Iterator[Halves]:
    made = Halves(connector_module, write_small(tmp_path, request.param))
    yield made
    made.worker.shutdown()


def elements(**tensors: Tensor) -> dict[str, Any]:
    return {name: SimpleNamespace(data=tensor) for name, tensor in tensors.items()}


def picture(seed: int, width: int = 160, height: int = 96) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=random)


def as_vllm(item: Item, spec: ModelSpec, dtype: torch.dtype) -> Tensor:
    """An item's patches as vLLM's processor has them: raster order, both frames, normalised."""
    from encoder_service.engines.vllm_local import in_order

    patches = [torch.as_tensor(item.patches), torch.as_tensor(item.patches)]
    if item.later is not None:
        patches[1] = torch.as_tensor(item.later)
    where = torch.arange(item.plan.patches).view(-1, 1).repeat(1, 3 * spec.sizing.patch_size**2)
    back = in_order(where, item.plan, spec)[:, 0].argsort()
    both = torch.stack([one[back].view(len(back), 3, -1) for one in patches], 2)
    if dtype == torch.uint8:
        return both.flatten(1)
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (spec.mean, spec.std))
    return ((both / 255 - mean) / std).flatten(1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_rows_of_images_and_videos_are_the_engines(halves: Halves, dtype: torch.dtype) -> None:
    spec, patchifier = halves.spec, patchifier_of(halves.spec)
    plan, patches = patchifier.patchify(picture(1))
    image = Item(plan, patches.numpy())
    clip = Clip(Size(112, 84), 6, 2.0)
    assert spec.video
    video = patchifier.patchify_video(clip, [picture(i, 112, 84) for i in spec.video.indices(clip)])
    items = {}
    for name, keys, item in (
        ("image", ("pixel_values", "image_grid_thw"), image),
        ("video", ("pixel_values_videos", "video_grid_thw"), video),
    ):
        data = as_vllm(item, spec, dtype), torch.tensor(item.plan.grid_thw)
        items[name] = (name, elements(**dict(zip(keys, data, strict=True))), item.plan.tokens)
    halves.until(Images("a", items))
    engine = halves.worker.encoder.engine
    for name, item in (("image", image), ("video", video)):
        assert torch.equal(halves.cache[name], rows_of(engine.submit(item).result()))
