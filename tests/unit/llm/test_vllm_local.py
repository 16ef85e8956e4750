"""The place "local" over a stand-in for vLLM's own half: requests wait until the engine has their
rows. Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from threading import Timer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.device import Device
from actors.engine.slices import Pace, Step
from actors.engine.video_chunks import rows_of
from actors.errors import EncodeFailed
from actors.families.registry import read
from actors.media.patchify import patchifier_of
from actors.options import ActorOptions, ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing
from actors.types import Clip, Item, ItemPlan, Size
from encoder_service.engines import vllm_patches
from encoder_service.engines.vllm_plugin import SWITCH_SECONDS
from encoder_service.llm.embedder import copied
from tests.small_presets import write_small
from tests.unit.vllm_half import ECConnectorRole, configured, running
from tests.waiting import until

FAMILIES = ("qwen2vl-7b", "qwen25vl-7b", "qwen35-27b")


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

    def __init__(self, module: ModuleType, model: str, **options: Any) -> None:
        vllm = self.config = configured(model, **options)
        connect = module.EncoderServiceConnector
        self.worker = connect(vllm, ECConnectorRole.WORKER)
        self.scheduler = connect(vllm, ECConnectorRole.SCHEDULER)
        self.cache: dict[str, Tensor] = {}
        self.spec: ModelSpec = self.worker.encoder.spec

    def step(self, *requests: Images, tokens: int = 1, computed: int = 0) -> list[Images]:
        """One turn of vLLM's loop: those of the requests that could be scheduled. `tokens`: of each
        of them, of which `computed` are there already."""
        scheduled = []
        for request in requests:
            if self.scheduler.ensure_cache_available(request, computed):
                for index, feature in enumerate(request.mm_features):
                    if self.scheduler.has_cache_item(feature.identifier):
                        self.scheduler.update_state_after_alloc(request, index)
                scheduled.append(request)
        new = [
            SimpleNamespace(req_id=str(n), num_computed_tokens=computed)
            for n in range(len(scheduled))
        ]
        step = SimpleNamespace(
            total_num_scheduled_tokens=len(scheduled) * tokens,
            num_scheduled_tokens={one.req_id: tokens for one in new},
            scheduled_new_reqs=new[::2],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.req_id for one in new[1::2]],
                num_computed_tokens=[computed] * len(new[1::2]),
            ),
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step))
        self.worker.start_load_caches(self.cache)
        return scheduled

    def until(self, request: Images) -> None:
        until(lambda: request in self.step(request), 60)


@pytest.fixture(params=FAMILIES)
def halves(
    request: pytest.FixtureRequest, connector_module: ModuleType, tmp_path: Path
) -> Iterator[Halves]:
    made = Halves(connector_module, str(write_small(tmp_path, request.param)))
    yield made
    made.worker.shutdown()


def elements(**tensors: Tensor) -> dict[str, Any]:
    return {name: SimpleNamespace(data=tensor) for name, tensor in tensors.items()}


def picture(seed: int, width: int = 160, height: int = 96) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=random)


def as_vllm(item: Item, spec: ModelSpec, dtype: torch.dtype) -> Tensor:
    """An item's patches as vLLM's processor has them: raster order, both frames, normalised."""
    from encoder_service.engines.vllm_patches import ordered

    patches = [torch.as_tensor(item.patches), torch.as_tensor(item.patches)]
    if item.later is not None:
        patches[1] = torch.as_tensor(item.later)
    where = torch.arange(item.plan.patches).view(-1, 1).repeat(1, 3 * spec.sizing.patch_size**2)
    back = ordered(where, item.plan.grid_thw, spec)[:, 0].argsort()
    both = torch.stack([one[back].view(len(back), 3, -1) for one in patches], 2)
    if dtype == torch.uint8:
        return both.flatten(1)
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (spec.mean, spec.std))
    return ((both / 255 - mean) / std).flatten(1).to(dtype)


def test_rows_of_images_and_videos_are_the_engines(halves: Halves) -> None:
    spec, patchifier = halves.spec, patchifier_of(halves.spec)
    plan, patches = patchifier.patchify(picture(1))
    image = Item(plan, patches.numpy())
    clip = Clip(Size(112, 84), 6, 2.0)
    assert spec.video
    video = patchifier.patchify_video(clip, [picture(i, 112, 84) for i in spec.video.indices(clip)])
    engine = halves.worker.encoder.engine
    forms: dict[str, Callable[[Item], Tensor]] = {
        "vllm's": lambda item: as_vllm(item, spec, torch.float32),
        "vllm's bytes": lambda item: as_vllm(item, spec, torch.uint8),
        "cut": lambda item: copied(item).data,
    }
    for form, made_of in forms.items():
        items = {}
        for name, keys, item in (
            ("image", ("pixel_values", "image_grid_thw"), image),
            ("video", ("pixel_values_videos", "video_grid_thw"), video),
        ):
            data = made_of(item), torch.tensor(item.plan.grid_thw)
            made = elements(**dict(zip(keys, data, strict=True)))
            items[f"{name} {form}"] = (name, made, item.plan.tokens)
        halves.until(Images("a", items))
        for item, rows in zip((image, video), map(halves.cache.pop, items), strict=True):
            assert torch.equal(rows, rows_of(engine.submit(item).result()))


def as_pixels(image: Tensor, plan: ItemPlan, spec: ModelSpec) -> Tensor:
    """An image as vllm_pixels.py keeps it."""
    return image.permute(1, 2, 0).reshape(plan.patches, 3 * spec.sizing.patch_size**2)


def test_rows_of_images_that_were_kept_whole_are_the_engines(halves: Halves) -> None:
    side = halves.spec.sizing.patch_size * 2  # a merge block
    shown = picture(1, 12 * side, 9 * side)
    plan, patches = patchifier_of(halves.spec).patchify(shown)
    grid = torch.tensor(plan.grid_thw)
    data = elements(pixel_values=as_pixels(shown, plan, halves.spec), image_grid_thw=grid)
    halves.until(Images("a", {"image": ("image", data, plan.tokens)}))
    expected = halves.worker.encoder.engine.submit(Item(plan, patches.numpy())).result()
    assert torch.equal(halves.cache["image"], rows_of(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_vllms_tower_gets_patches_of_images_that_were_kept_whole(
    connector_module: ModuleType, family: str, tmp_path: Path
) -> None:
    from encoder_service.engines.vllm_patches import as_vllm_cuts

    spec = read(ModelOptions(id=str(write_small(tmp_path, family)), load_format="dummy"))
    assert isinstance(spec.sizing, BlockSizing)
    side = spec.sizing.patch_size * 2
    shown = picture(1, 12 * side, 9 * side)
    plan, patches = patchifier_of(spec).patchify(shown)
    found = as_vllm_cuts(as_pixels(shown, plan, spec), plan.grid_thw, spec.sizing)
    assert found.equal(as_vllm(Item(plan, patches.numpy()), spec, torch.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_vllms_tower_gets_patches_of_what_was_cut(
    connector_module: ModuleType, family: str, tmp_path: Path
) -> None:
    spec = read(ModelOptions(id=str(write_small(tmp_path, family)), load_format="dummy"))
    patchifier = patchifier_of(spec)
    plan, patches = patchifier.patchify(picture(1, 300, 200))
    assert spec.video
    clip = Clip(Size(112, 84), 6, 2.0)
    video = patchifier.patchify_video(clip, [picture(i, 112, 84) for i in spec.video.indices(clip)])
    for kind, item in (("image", Item(plan, patches.numpy())), ("video", video)):
        pixels, grid = vllm_patches.KEYS[kind]
        data = {pixels: copied(item).data, grid: torch.tensor(item.plan.grid_thw)}
        feature = SimpleNamespace(modality=kind, data=elements(**data))
        vllm_patches.cut_for_vllm(feature, spec)
        assert feature.data[pixels].data.equal(as_vllm(item, spec, torch.uint8))


def test_the_process_of_vllms_tower_keeps_no_image_whole_and_switches_threads_often(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_local = import_module("encoder_service.engines.vllm_local")
    monkeypatch.setattr(vllm_local, "open_encoder", lambda vllm: SimpleNamespace(pace=Pace(1)))
    connector_module.EncoderServiceConnector(configured("qwen3vl-tiny"), ECConnectorRole.WORKER)
    assert vllm_patches.engine_is_here
    assert sys.getswitchinterval() == SWITCH_SECONDS


class StubEngine:
    """Answers when the test says."""

    def __init__(self, spec: ModelSpec) -> None:
        self.tower = SimpleNamespace(spec=spec)
        self.capacity = SimpleNamespace(budgets=((16, 64),), tokens=(64,))
        self.device = Device(slice_seconds=1)
        self.submitted: list[tuple[Item, Future[Item]]] = []
        self.fails = ""

    def submit(self, item: Item) -> Future[Item]:
        if self.fails:
            raise EncodeFailed(self.fails)
        answer: Future[Item] = Future()
        self.submitted.append((item, answer))
        return answer

    def close(self) -> None:
        pass


class Stubbed(Halves):
    """Halves over an engine that does nothing by itself."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        vllm_local = import_module("encoder_service.engines.vllm_local")
        spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"))
        self.engine = StubEngine(spec)
        monkeypatch.setattr(vllm_local, "open_engine", lambda *args: self.engine)
        super().__init__(module, "qwen3vl-tiny", **options)
        self.items = self.worker.encoder.items

    def submitted(self, count: int) -> list[Future[Item]]:
        """Of everything that was submitted, once there is so much."""
        until(lambda: len(self.engine.submitted) >= count)
        self.worker.encoder.threads.submit(int).result()
        return [answer for _, answer in self.engine.submitted]

    def answer(self, place: int) -> Tensor:
        """Encodes an item that was submitted."""
        item, answer = self.engine.submitted[place]
        rows = item.rows = torch.full((item.plan.tokens, self.spec.width), float(place))
        answer.set_result(item)
        return rows

    def images(self, request_id: str, *names: str, rows: int = 4, **changes: Any) -> Images:
        """A request for images of rows x 4 patches."""
        grid = torch.tensor([1, rows, 4])
        pixels = torch.zeros(4 * rows, 6 * self.spec.sizing.patch_size**2)
        data = elements(pixel_values=pixels, image_grid_thw=grid)
        made = Images(request_id, dict.fromkeys(names, ("image", data, rows)))
        for feature in made.mm_features:
            vars(feature).update(changes)
        return made


@pytest.fixture
def stubbed(connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubbed]:
    made = Stubbed(connector_module, monkeypatch)
    yield made
    made.worker.shutdown()


def test_a_request_waits_for_all_of_its_images_and_then_holds_none(stubbed: Stubbed) -> None:
    request = stubbed.images("a", "x", "y")
    assert stubbed.step(request) == []
    stubbed.submitted(2)
    rows = [stubbed.answer(0)]
    assert stubbed.step(request) == []
    rows.append(stubbed.answer(1))
    assert stubbed.step(request) == [request]
    assert all(map(torch.equal, rows, stubbed.cache.values()))
    assert list(stubbed.cache) == ["x", "y"]
    assert not stubbed.items


def test_slices_are_launched_before_steps_of_the_model_alone(
    stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Step] = []
    launched: list[int] = []
    pace = stubbed.engine.device.pace
    monkeypatch.setattr(pace, "step", seen.append)
    monkeypatch.setattr(pace, "step_launched", lambda: launched.append(len(seen)))
    stubbed.step(stubbed.images("a", "x", "y"))  # no tokens
    assert seen == []
    text = Images("text", {})
    stubbed.step(text, tokens=8192)
    stubbed.step(text, text, tokens=300, computed=7)
    assert seen == [Step(8192, 0), Step(600, 7)]
    assert launched == [0, 0, 1], "before the next step is prepared, if there is one"


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes scheduling wait for the engine's thread, however busy the machine is."""
    vllm_local = import_module("encoder_service.engines.vllm_local")
    monkeypatch.setattr(vllm_local, "LAUNCHED_SECONDS", 20)


def test_a_step_uses_rows_whose_last_slices_were_launched_when_it_was_scheduled(
    stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, calls = stubbed.images("a", "x"), list[str]()

    def finish() -> bool:
        calls.append("finish")
        Timer(0.001, stubbed.answer, [0]).start()
        return True

    stubbed.step(request)
    (answer,) = stubbed.submitted(1)
    answer.set_running_or_notify_cancel()
    monkeypatch.setattr(stubbed.engine.device.pace, "finish", finish)
    patient(monkeypatch)
    assert stubbed.step(Images("text", {}), request, request)[1:] == [request, request]
    assert calls == ["finish"], "once a step"
    assert not stubbed.items


def test_scheduling_waits_only_for_what_is_being_encoded_and_not_for_long(
    stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_local = import_module("encoder_service.engines.vllm_local")
    request, waits = stubbed.images("a", "x", "y"), list[float]()
    monkeypatch.setattr(vllm_local, "wait", lambda futures, seconds: waits.append(seconds))
    monkeypatch.setattr(stubbed.engine.device.pace, "finish", lambda: True)
    assert stubbed.step(request) == []
    answers = stubbed.submitted(2)
    assert stubbed.step(request) == []
    assert waits == []
    answers[1].set_running_or_notify_cancel()
    assert stubbed.step(request) == []
    assert waits == [vllm_local.LAUNCHED_SECONDS]
    monkeypatch.setattr(stubbed.engine.device.pace, "finish", lambda: False)
    assert stubbed.step(request) == []
    assert len(waits) == 1


def test_the_last_slices_of_an_image_are_launched_while_its_step_is_scheduled(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real engine and pace, and a device that runs steps all the time."""
    patient(monkeypatch)
    pace = halves.worker.encoder.pace
    pace.idle = lambda: False
    pace.times.add(Step(64, 0), 100)
    plan, patches = patchifier_of(halves.spec).patchify(picture(1))
    made = as_vllm(Item(plan, patches.numpy()), halves.spec, torch.uint8)
    grid = torch.tensor(plan.grid_thw)
    data = elements(pixel_values=made, image_grid_thw=grid)
    request = Images("a", {"image": ("image", data, plan.tokens)})
    assert halves.step(request) == []
    until(lambda: pace._slices)
    assert halves.step(request) == [request]
    assert "image" in halves.cache


def test_an_image_of_two_requests_is_encoded_once(stubbed: Stubbed) -> None:
    first, second = stubbed.images("a", "x"), stubbed.images("b", "x")
    stubbed.step(first, second)
    stubbed.submitted(1)
    stubbed.answer(0)
    assert stubbed.step(first, second) == [first, second]  # the second, from vLLM's own cache
    third = stubbed.images("c", "x")
    assert stubbed.step(third) == [third]
    assert len(stubbed.submitted(1)) == 1


@pytest.mark.parametrize("computed", [0, 4])
def test_an_image_that_a_prompt_repeats_is_encoded_once(stubbed: Stubbed, computed: int) -> None:
    """Also if vLLM's prefix cache has the first place, and its encoder cache none."""
    request = stubbed.images("a", "x")
    request.mm_features.append(
        SimpleNamespace(
            **vars(request.mm_features[0]) | {"mm_position": SimpleNamespace(offset=9, length=4)}
        )
    )
    for _ in range(3):
        assert stubbed.step(request, computed=computed) == []
    assert len(stubbed.submitted(1)) == 1
    rows = stubbed.answer(0)
    assert stubbed.step(request, computed=computed) == [request]
    assert torch.equal(stubbed.cache["x"], rows)
    assert not stubbed.items


def test_what_no_request_needs_any_more_is_dropped(stubbed: Stubbed) -> None:
    first, second = stubbed.images("a", "x"), stubbed.images("b", "x", "y")
    stubbed.step(first, second)
    answers = stubbed.submitted(2)
    stubbed.scheduler.request_finished(first)
    assert set(stubbed.items) == {"x", "y"}
    stubbed.scheduler.request_finished(second)
    assert not stubbed.items
    assert all(answer.cancelled() for answer in answers)
    computed = stubbed.images("c", "z")
    stubbed.step(computed)
    assert stubbed.scheduler.ensure_cache_available(computed, num_computed_tokens=4)
    assert not stubbed.items


def test_rows_ahead_of_need_are_bounded_and_the_oldest_come_first(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"))
    halves = Stubbed(connector_module, monkeypatch, ahead_bytes=2 * 4 * spec.width * 4)
    requests = [halves.images(name, name) for name in "abcd"]
    halves.step(*requests)
    halves.submitted(2)
    assert [name for name, item in halves.items.items() if item.rows] == ["a", "b"]
    halves.answer(1)
    assert halves.step(*requests) == [requests[1]]
    halves.submitted(3)
    assert [name for name, item in halves.items.items() if item.rows] == ["a", "c"]
    large = halves.images("e", "e", "f", "g")  # more than there is room for
    for request in requests:
        halves.scheduler.request_finished(request)
    for place in range(3, 6):
        assert halves.step(large) == []
        halves.submitted(place + 1)
        halves.answer(place)
    assert halves.step(large) == [large]
    halves.worker.shutdown()


def test_rows_of_a_request_that_is_ready_take_the_room_of_others(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"))
    halves = Stubbed(connector_module, monkeypatch, ahead_bytes=2 * 4 * spec.width * 4)
    ready = halves.images("ready", "x", "y")
    halves.step(ready, halves.images("other", "z"))
    halves.submitted(2)
    for place in range(2):
        halves.answer(place)
    assert halves.scheduler.ensure_cache_available(ready, 0)
    halves.step()
    assert halves.items["z"].rows is None
    halves.worker.shutdown()


def test_two_items_are_encoded_at_a_time_or_half_a_pack(stubbed: Stubbed) -> None:
    """The largest budget has 64 tokens."""
    large = [stubbed.images(name, name, rows=40) for name in "abcd"]
    small = [stubbed.images(f"small {n}", f"small {n}") for n in range(12)]
    stubbed.step(*large, *small)
    stubbed.submitted(2)
    assert [name for name, item in stubbed.items.items() if item.rows] == ["a", "b"]
    for place in range(4):
        stubbed.answer(place)
        stubbed.step(*large, *small)
        stubbed.submitted(min(4, place + 3))
    assert stubbed.step() == []
    stubbed.submitted(12)
    assert len(stubbed.engine.submitted) == 4 + 8
    stubbed.answer(4)
    stubbed.step()
    stubbed.submitted(13)


def test_items_that_nobody_has_begun_to_encode_are_counted(stubbed: Stubbed) -> None:
    pace = stubbed.worker.encoder.pace
    requests = [stubbed.images(str(n), str(n), rows=40) for n in range(5)]
    stubbed.step(*requests)
    assert pace.waiting == 3
    stubbed.submitted(2)
    stubbed.answer(0)
    until(lambda: stubbed.step(requests[0]))
    stubbed.step(*requests[1:])
    assert pace.waiting == 2
    for request in requests:
        stubbed.scheduler.request_finished(request)
    stubbed.step()
    assert pace.waiting == 0


@pytest.mark.parametrize(("asked", "tokens"), [(768, 768), (None, 2048)])
def test_vllms_scheduler_gets_steps_with_fewer_tokens_if_asked(
    asked: int | None,
    tokens: int,
    connector_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = Stubbed(connector_module, monkeypatch, decode_step_tokens=asked)
    decoding = running(4000)
    assert halves.config.scheduler_config.scheduler_cls([decoding]).schedule() == tokens
    times = halves.worker.encoder.pace.times
    times.add(Step(tokens, 0), 20)
    times.add(Step(tokens, 16_000), 40)
    beside = [decoding, running(16_000, 20_000)]
    fewer = halves.config.scheduler_config.scheduler_cls(beside).schedule()
    assert fewer == (448 if asked else int(0.6 * 2048))  # a graph's, or none is so large
    halves.worker.shutdown()


def test_answers_that_are_being_written_keep_no_large_request_waiting(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that needs more rows than there is room for: its last image is encoded all the same."""
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"))
    halves = Stubbed(connector_module, monkeypatch, ahead_bytes=2 * 4 * spec.width * 4)
    answering, large = halves.images("answering", "x"), halves.images("large", "a", "b", "c")
    halves.step(answering)
    halves.submitted(1)
    halves.answer(0)
    assert halves.step(answering) == [answering]
    for place in (1, 2, 3):
        assert halves.scheduler.ensure_cache_available(answering, 4)
        assert halves.step(large) == []
        halves.submitted(place + 1)
        halves.answer(place)
    assert halves.step(large) == [large]
    halves.worker.shutdown()


def test_what_the_engine_cannot_encode_is_left_to_vllm(
    stubbed: Stubbed, caplog: pytest.LogCaptureFixture
) -> None:
    left = [
        stubbed.images("pruned", "a"),
        stubbed.images("adapted", "b", mm_hash="another"),
        stubbed.images("audio", "c", modality="audio"),
        stubbed.images("large", "d", rows=66),
        stubbed.images("larger", "h", rows=68),
        stubbed.images("embedded", "e", data=elements(image_embeds=torch.zeros(4, 8))),
        stubbed.images(
            "unreadable",
            "f",
            data=elements(pixel_values=torch.ones(()), image_grid_thw=torch.ones(2)),
        ),
    ]
    left.append(stubbed.images("bare", "i", data=None))
    left[0].mm_features[0].mm_position.length = 3
    assert stubbed.step(*left) == left
    assert stubbed.cache == {}
    stubbed.engine.fails = "out of memory"
    request = stubbed.images("failing", "g")
    assert stubbed.step(request) == []
    stubbed.until(request)
    assert stubbed.cache == {}
    assert not stubbed.engine.submitted
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    reasons = [line.partition(", because ")[2].partition(" (vllm:")[0] for line in said]
    assert reasons == [
        "vLLM prunes some of its rows",
        "it is of a LoRA adapter for the tower",
        "the engine takes no items of modality audio",
        "it has 66 tokens, and the largest budget has 64: add a larger one to graphs.token_budgets",
        "it has 68 tokens, and the largest budget has 64: add a larger one to graphs.token_budgets",
        "its data cannot be read: IndexError('tuple index out of range')",
        "it has no pixels or no grid",
        "the engine failed: EncodeFailed('out of memory')",
    ]
    assert stubbed.scheduler.get_ec_connector_stats().data["left"] == 8, "not the embedding"


def test_reasons_do_not_fill_the_log(stubbed: Stubbed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "vllm.encoder_service")
    for rows in range(66, 166, 2):
        stubbed.step(stubbed.images(f"large {rows}", f"item {rows}", rows=rows))
    said = [one for one in caplog.records if "own tower encodes an item" in one.getMessage()]
    assert [one.levelname for one in said] == ["WARNING"] * 20 + ["DEBUG"] * 30


def test_an_item_that_the_engine_failed_on_is_left_by_all_that_need_it(stubbed: Stubbed) -> None:
    stubbed.engine.fails = "out of memory"
    first, second = stubbed.images("a", "x"), stubbed.images("b", "x")
    stubbed.step(first)
    stubbed.until(first)
    stubbed.engine.fails = ""
    assert stubbed.scheduler.ensure_cache_available(second, 0)
    stubbed.scheduler.request_finished(first)
    assert stubbed.scheduler.ensure_cache_available(second, 0), "it was left"
    stubbed.scheduler.request_finished(second)
    assert not stubbed.scheduler.encoder.items


def test_vllms_tower_gets_patches_of_what_it_encodes_after_all(stubbed: Stubbed) -> None:
    columns = 3 * stubbed.spec.sizing.patch_size**2

    def whole(name: str, rows: int = 4) -> Images:
        pixels = torch.zeros(4 * rows, columns, dtype=torch.uint8)
        grid = torch.tensor([1, rows, 4])
        return stubbed.images(
            name, name, rows=rows, data=elements(pixel_values=pixels, image_grid_thw=grid)
        )

    def scheduled(request: Images) -> tuple[int, ...]:
        """The shape of the pixels that vLLM's tower sees."""
        stubbed.scheduler.update_state_after_alloc(request, 0)
        return tuple(request.mm_features[0].data["pixel_values"].data.shape)

    large = whole("large", 66)
    assert stubbed.step(large) == [large]
    for _ in range(2):
        assert scheduled(large) == (66 * 4, 2 * columns)
    stubbed.engine.fails = "out of memory"
    failing = whole("failing")
    stubbed.until(failing)
    assert scheduled(failing) == (16, 2 * columns)
    stubbed.engine.fails = ""
    stubbed.worker.encoder.cached = {"evicted": torch.zeros(4, 8)}  # by the scheduler, just now
    evicted = whole("evicted")
    assert stubbed.scheduler.ensure_cache_available(evicted, 0)
    assert scheduled(evicted) == (16, 2 * columns)
    broken = whole("broken")
    broken.mm_features[0].data["pixel_values"].data = None
    assert scheduled(whole("another")) == (16, 2 * columns)
    stubbed.scheduler.update_state_after_alloc(broken, 0)  # raises nothing


def test_an_id_fails_its_request_alone(stubbed: Stubbed, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM would exit on it."""
    request = stubbed.images("a", "x.y", data=elements(image_grid_thw=torch.tensor([1, 4, 4])))
    other = stubbed.images("b", "z")
    for _ in range(2):
        assert stubbed.step(request, other) == []
    assert caplog.text.count("request a fails: it has the id x.y") == 1
    assert stubbed.scheduler.take_unavailable_requests() == {"a"}
    assert stubbed.scheduler.take_unavailable_requests() == set()
    stubbed.submitted(1)
    stubbed.answer(0)
    assert stubbed.step(other) == [other]


def test_rows_that_do_not_fit_the_device_leave_an_item_to_vllm(
    stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Item) -> Tensor:
        raise torch.OutOfMemoryError("no room to concatenate a video's chunks")

    monkeypatch.setattr(import_module("encoder_service.engines.vllm_local"), "rows_of", full)
    request = stubbed.images("a", "x")
    assert stubbed.step(request) == []
    stubbed.submitted(1)
    stubbed.answer(0)
    assert stubbed.step(request) == [request]
    assert stubbed.cache == {}


@pytest.mark.parametrize(
    ("preset", "dtype", "exact"),
    [
        ("qwen2vl-7b", torch.float32, True),
        ("qwen2vl-7b", torch.float16, True),
        ("qwen2vl-7b", torch.bfloat16, False),
        ("qwen3vl-8b", torch.bfloat16, True),
    ],
)
def test_bytes_from_normalised_pixels(
    connector_module: ModuleType, preset: str, dtype: torch.dtype, exact: bool
) -> None:
    from encoder_service.engines.vllm_patches import bytes_of

    spec = read(ModelOptions(id=preset, load_format="dummy"))
    bytes_ = torch.arange(256).repeat(3, 1)[None]
    mean, std = torch.tensor([spec.mean, spec.std])[..., None]
    found = bytes_of(((bytes_ / 255 - mean) / std).to(dtype), spec).int() - bytes_.flatten(1)
    assert found.abs().max() <= (0 if exact else 1)


class VllmTower:
    device = torch.device("cpu")
    dtype = torch.float32

    def forward(self, x: Tensor, grid: str, *, metadata: str) -> tuple[Tensor, str, str]:
        return x, grid, metadata


def test_vllms_tower_normalises_what_its_processor_left_as_bytes(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from encoder_service.engines.vllm_local import RAW_PIXELS, normalise

    module: Any = ModuleType("qwen3_vl")
    module.Qwen3_VisionTransformer = VllmTower
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.qwen3_vl", module)
    monkeypatch.setattr(VllmTower, "forward", VllmTower.forward)
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    spec = replace(spec, mean=(0.1, 0.5, 0.9), std=(0.2, 0.5, 1.0))
    for options in ({"do_normalize": False}, {"do_rescale": False, "do_normalize": True}):
        with pytest.raises(ValueError, match="both must be false, or none"):
            normalise(options, spec)
    pixels = torch.randint(0, 256, (5, 3, 8), dtype=torch.uint8)
    with caplog.at_level("INFO", "vllm.encoder_service"):
        normalise({"max_pixels": 9}, spec)
    assert "preprocessing is faster with --mm-processor-kwargs" in caplog.text
    assert VllmTower().forward(pixels, "grid", metadata="m")[0] is pixels

    normalise(RAW_PIXELS, spec)
    x, *others = VllmTower().forward(pixels.flatten(1), "grid", metadata="m")
    expected = torch.stack(
        [(pixels[:, c] / 255 - spec.mean[c]) / spec.std[c] for c in range(3)], dim=1
    )
    assert torch.allclose(x, expected.flatten(1), atol=1e-6)
    assert others == ["grid", "m"]


def test_the_engines_memory_is_not_vllms(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_local = import_module("encoder_service.engines.vllm_local")
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    used = iter((10e9, 13e9))
    monkeypatch.setattr(vllm_local, "used_bytes", lambda kind: next(used))
    monkeypatch.setattr(vllm_local, "open_engine", lambda *args: StubEngine(spec))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100e9))
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "device_type", "cuda")
    vllm = configured("qwen3vl-tiny", ahead_bytes=int(2e9))
    vllm.model_config.dtype = torch.bfloat16
    vllm.cache_config = SimpleNamespace(gpu_memory_utilization=0.9)
    vllm_local.open_encoder(vllm).close()
    assert vllm.cache_config.gpu_memory_utilization == pytest.approx(0.9 - 0.03 - 0.02)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 2),
        ({"precision": "auto", "precision_file": "plan.json"}, 2),
        ({"steps_per_doubling": 8}, 8),
    ],
)
def test_the_engine_has_two_budgets_per_doubling_unless_others_are_given(
    given: dict[str, Any], steps: int, connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_local = import_module("encoder_service.engines.vllm_local")
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    opened: list[ActorOptions] = []

    def stub(options: ActorOptions, *_: object) -> StubEngine:
        opened.append(options)
        return StubEngine(spec)

    monkeypatch.setattr(vllm_local, "open_engine", stub)
    vllm_local.open_encoder(configured("qwen3vl-tiny", graphs=given)).close()
    (options,) = opened
    assert options.graphs.steps_per_doubling == steps
    assert options.graphs.precision == given.get("precision", "bf16")


def test_what_was_loaded_is_reported_once(stubbed: Stubbed) -> None:
    encoder = stubbed.scheduler.encoder
    request = stubbed.images("a", "x", "y")
    stubbed.step(request)
    stubbed.submitted(2)
    rows = [stubbed.answer(0), stubbed.answer(1)]
    assert stubbed.scheduler.get_ec_connector_stats() is None
    stubbed.step(request)
    stats = stubbed.scheduler.get_ec_connector_stats()
    report = stats.data
    assert stats.reduce().keys() == {"loaded", "bytes", "mean seconds"}, "what there was"
    assert (report["loaded"], report["left"], report["failed"]) == (2, 0, 0)
    assert report["bytes"] == sum(one.nbytes for one in rows)
    assert len(report["seconds"]) == 2
    assert min(report["seconds"]) > 0
    assert stubbed.scheduler.get_ec_connector_stats() is None
    encoder.cached = {}
    other = stubbed.images("b", "z", modality="audio")
    for _ in range(3):  # vLLM asks at every step
        stubbed.step(other)
    assert stubbed.scheduler.get_ec_connector_stats().data["left"] == 1
