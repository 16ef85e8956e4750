"""The plan for FP8: what `calibrate` writes, what a replica does with it, and what is refused."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.errors import ConfigError
from actors.families.registry import read
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models import load as towers
from actors.models.layers.block import (
    ATTENTION,
    Quantisable,
    ReferenceBlocks,
    computed_by,
)
from actors.models.layers.weights import Fp8Layers
from actors.models.load import build, load, tensors
from actors.models.precision import (
    VERSION,
    LayerPlan,
    PrecisionPlan,
    precision_on,
    read_plan,
    rows_digest,
)
from actors.options import GraphOptions, ModelOptions, validated
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item
from encoder_service import cli
from encoder_service.commands import calibrate
from encoder_service.commands.calibrate import (
    ROWS_COSINE,
    ROWS_ERROR,
    Calibration,
    LayerError,
    relative,
)
from encoder_service.commands.check import missing
from encoder_service.config import fit, parse
from tests.images import jpeg

CPU = torch.device("cpu")
CPU_ONLY = {"device": "cpu", "num_gpus": 0}
TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
LAYERS: Fp8Layers = {
    "blocks.3.mlp.linear_fc1": torch.linspace(-1, 1, 64).bfloat16(),
    "merger.linear_fc1": torch.linspace(-1, 1, 256).bfloat16(),
}


def picture(side: int) -> Item:
    noise = torch.Generator().manual_seed(side)
    image = torch.randint(256, (3, side, side), dtype=torch.uint8, generator=noise)
    plan, patches = patchifier_of(read(TINY)).patchify(image)
    return Item(plan, patches.numpy())


def item_of(path: Path) -> Item:
    cut, patches = patchifier_of(read(TINY)).patchify(decode(path.read_bytes(), "white"))
    return Item(cut, patches.numpy())


def written(folder: Path, **changes: object) -> GraphOptions:
    """Options with a plan for the tiny model."""
    plan = PrecisionPlan(
        version=VERSION,
        model=TINY.id,
        weights=towers.weights_digest(TINY),
        fp8={name: LayerPlan.of(0.03, mean) for name, mean in LAYERS.items()},
        rows_error=0.04,
        rows_cosine=0.999,
        images=1,
    )
    file = folder / "plan.json"
    file.write_text(json.dumps(plan.model_dump(mode="json") | changes))
    return GraphOptions(precision="fp8", precision_file=str(file))


def test_calibrate_writes_what_the_service_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.effect_noise((64, 96), 90).convert("RGB").save(tmp_path / "one.png")
    out = tmp_path / "plan.json"
    images = [str(tmp_path / "one.png")]
    assert cli.main(["calibrate", "configs/tiny.yaml", *images, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "blocks.3.mlp.linear_fc1" in said
    assert "With fewer than 6 images, others may have larger errors than these" in said
    graphs = GraphOptions(precision="fp8", precision_file=str(out))
    plan = read_plan(graphs, TINY, CPU)
    assert plan is not None
    assert f"{len(plan.fp8)} of 18 layers run in FP8" in said
    assert 0 < len(plan.fp8) < 18
    assert plan.rows_error < ROWS_ERROR
    calibration = Calibration(TINY, read(TINY), Device(), [item_of(tmp_path / "one.png")])
    for name, mean in plan.layers.items():
        assert mean is not None
        assert torch.equal(mean, calibration.means[name])


def test_means_are_of_all_images_and_make_layers_more_accurate() -> None:
    items = [picture(64), picture(96)]
    calibration = Calibration(TINY, read(TINY), Device(), items)
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def note(layer: Quantisable, x: Tensor) -> Tensor:
        seen[layer.name].append(x)
        return layer.plain(x)

    spec, weights = read(TINY), tensors(TINY, read(TINY), CPU)
    uncentred = build(spec, weights, CPU, ReferenceBlocks)
    with computed_by(note):
        expected = calibration.encode(uncentred)
    for name, inputs in seen.items():
        mean = (inputs[0].mean(0) + inputs[1].mean(0)) / 2
        assert torch.allclose(mean, calibration.means[name].float(), atol=1e-2)
    with computed_by(lambda layer, x: layer.plain(x)):
        for rows, exact in zip(calibration.encode(calibration.plain), expected, strict=True):
            assert relative(rows, exact) < 1e-5
    after = calibration.deviation(calibration.means).error
    calibration.plain = uncentred
    assert after < 0.92 * calibration.deviation(calibration.means).error


def test_a_replica_computes_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "measuring_seconds", 1e-3)
    item, plain = picture(96), parse({"model": TINY.model_dump(), "encoder": CPU_ONLY})
    rows = {}
    for name, graphs in {"bf16": plain.graphs, "fp8": written(tmp_path)}.items():
        engine = open_engine(plain.model_copy(update={"graphs": graphs}), EncoderMetrics())
        rows[name] = engine.submit(replace(item)).result().rows
        engine.close()
    spec = read(TINY)
    tower = build(spec, tensors(TINY, spec, CPU), CPU, fp8=LAYERS)
    expected = GraphSet(tower, "default", (), Segments(0), Device()).run(None, [item])
    assert relative(rows["fp8"], expected) < 1e-5
    assert 1e-3 < relative(rows["fp8"], rows["bf16"]) < ROWS_ERROR


class Outliers(Mapping[str, Tensor]):
    """Norms have 20 channels that are 50 times as large as the others, as in trained towers, and
    the layers behind them take that back. Two more are equal, and large before the MLP of block 2,
    where what one adds the other takes away."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        found, large = self.weights[name], torch.arange(0, 60, 3)
        if name.startswith("blocks") and name.endswith(("norm1.weight", "norm2.weight")):
            found[large] *= 50
        elif name.startswith("blocks") and name.endswith(("qkv.weight", "linear_fc1.weight")):
            found[:, large] /= 50
        if name == "pos_embed.weight":
            found[:, 2] = found[:, 1]
        elif ".proj." in name or ".linear_fc2." in name:
            found[2] = found[1]
        elif name == "blocks.2.norm2.weight":
            found[1], found[2] = 60, 47
        elif name == "blocks.2.norm2.bias":
            found[1:3] = 0
        elif name == "blocks.2.mlp.linear_fc1.weight":
            found[:, 2] = found[:, 1] * -60 / 47
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


SENSITIVE = "blocks.2.mlp.linear_fc1"


@pytest.fixture(scope="module")
def calibration() -> Iterator[Calibration]:
    spec = read(TINY)
    whole = tensors(TINY, spec, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "tensors", lambda *_: Outliers(whole))
        yield Calibration(TINY, spec, Device(), [picture(64)])


def test_layers_that_outliers_spoil_stay_as_they_are(calibration: Calibration) -> None:
    errors = {name: each.relative for name, each in calibration.errors.items()}
    assert errors.pop(SENSITIVE) > 0.1
    assert max(errors.values()) < 6e-2  # however large the channels: e4m3 has exponents
    plan = calibration.plan(6e-2)
    assert plan.fp8
    assert SENSITIVE not in plan.fp8
    assert not calibration.deviation(errors).fits  # so the limits for the rows matter, too
    assert calibration.deviation(plan.fp8).fits
    assert plan.rows_error < ROWS_ERROR
    assert plan.rows_cosine > ROWS_COSINE


def test_a_layer_whose_outputs_are_all_zero_stays_as_it_is() -> None:
    assert LayerError(operations=1).relative == math.inf


def test_a_bound_that_no_layer_keeps(calibration: Calibration) -> None:
    with pytest.raises(ConfigError, match="no layer can run in FP8"):
        calibration.plan(1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "fp8"}, "precision_file to what `encoder-service calibrate` wrote"),
        ({"precision": "auto"}, "precision is auto: set precision_file to what"),
        ({"precision_file": "plan.json"}, "only with precision: fp8 or auto"),
        (
            {"precision": "fp8", "precision_file": "plan.json", "blocks": "compile"},
            "blocks: compile has no FP8",
        ),
        (
            {"precision": "auto", "precision_file": "plan.json", "blocks": "compile"},
            "blocks: compile has no FP8",
        ),
        ({"precision": "int8"}, "precision"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(GraphOptions, given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "of another"}, "for other weights, those of qwen3vl-tiny"),
        ({"layers": []}, "layers: no such key"),
        ({"fp8": {"merger.linear_fc1": {"error": 0.1, "means": ""}}}, r"Did you mean mean\?"),
        ({"fp8": {"merger.linear_fc1": {"error": 0.1, "mean": "AAAA"}}}, "not a whole number"),
        (
            {"version": 2, "fp8": ["merger.linear_fc1"], "errors": {"merger.linear_fc1": 0.1}},
            r"plan\.json was written by another version of `encoder-service calibrate`",
        ),
    ],
)
def test_a_plan_of_something_else(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(written(tmp_path, **changes), TINY, CPU)


@pytest.mark.parametrize("mean", ["", "!!!!!!!!", "AAA=", torch.full((256,), math.nan)])
def test_a_mean_that_does_not_fit_is_refused_by_check_and_at_start(
    mean: str | Tensor, tmp_path: Path
) -> None:
    layer = {"error": 0.1, "mean": mean}
    if isinstance(mean, Tensor):
        layer = LayerPlan.of(0.1, mean.bfloat16()).model_dump(mode="json")
    graphs = written(tmp_path, fp8={"merger.linear_fc1": layer})
    service = parse(
        {"model": TINY.model_dump(), "encoder": CPU_ONLY, "graphs": graphs.model_dump()}
    )
    for read_it in (lambda: list(missing(service)), lambda: open_engine(service, EncoderMetrics())):
        with pytest.raises(ConfigError, match=r"the mean of merger\.linear_fc1 does not fit"):
            read_it()


def test_calibrate_says_what_is_wrong_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "Calibration", None)
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "cat.jpg").write_bytes(jpeg(64, 64))
    for image, out, message in (
        ("text.jpg", "plan.json", "text.jpg: the file is not an image"),
        ("cat.jpg", "missing/plan.json", "No such file or directory"),
    ):
        given = ["configs/tiny.yaml", str(tmp_path / image), "--out", str(tmp_path / out)]
        assert cli.main(["calibrate", *given]) == 1
        assert message in capsys.readouterr().err


def test_check_warns_of_a_plan_elsewhere_and_refuses_one_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    graphs = GraphOptions(precision="fp8", precision_file=str(path))
    service = parse(
        {"model": TINY.model_dump(), "encoder": CPU_ONLY, "graphs": graphs.model_dump()}
    )
    (warning,) = missing(service)
    assert warning == (
        f"graphs.precision_file {path} is not on this machine; every encoder node needs it"
    )
    path.mkdir()
    with pytest.raises(ConfigError, match=r"graphs\.precision_file cannot be read: .*directory"):
        list(missing(service))
    path.rmdir()
    for content in ("no JSON", "{}"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"graphs\.precision_file cannot be read: "):
            list(missing(service))
    written(tmp_path, version=1)
    with pytest.raises(ConfigError, match="written by another version"):
        list(missing(service))
    written(tmp_path)
    assert not list(missing(service))


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    graphs = GraphOptions(precision="fp8", precision_file=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="precision_file cannot be read"):
        read_plan(graphs, TINY, CPU)


def test_a_layer_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"the model has no blocks\.99\.attn\.qkv"):
        load(TINY, CPU, fp8={"blocks.99.attn.qkv": None})


@pytest.mark.parametrize("precision", ["fp8", "auto"])
def test_families_without_fp8_are_refused(precision: str) -> None:
    for name in ("siglip-so400m", "gemma4-31b", "deepseek-ocr", "internvl3-8b"):
        options = parse(
            {
                "model": {"id": name, "load_format": "dummy"},
                "graphs": {"precision": precision, "precision_file": "plan.json"},
            }
        )
        with pytest.raises(ConfigError, match=r"which the family .+ does not have"):
            fit(options, read(options.model))


@pytest.mark.parametrize(("capability", "has"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8_are_refused(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if has:
        towers.check_fp8(read(TINY), torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=r"compute capability 8\.9; this one has 8\.6"):
        towers.check_fp8(read(TINY), torch.device("cuda"))


def test_rows_of_other_plans_are_other_rows(tmp_path: Path) -> None:
    plain = rows_digest(GraphOptions(), TINY, CPU)
    one = rows_digest(written(tmp_path), TINY, CPU)
    written(tmp_path)
    layers = json.loads((tmp_path / "plan.json").read_text())["fp8"]
    name, layer = layers.popitem()
    fewer = rows_digest(written(tmp_path, fp8=layers), TINY, CPU)
    other = layers | {name: layer | {"mean": "AAA="}}
    centred = rows_digest(written(tmp_path, fp8=other), TINY, CPU)
    again = rows_digest(written(tmp_path, fp8={name: layer} | layers, images=7), TINY, CPU)
    assert len({plain, one, fewer, centred}) == 4
    assert again == one


def capable(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return torch.device("cuda")


def test_auto_runs_in_fp8_where_the_gpu_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = written(tmp_path)
    auto = fp8.model_copy(update={"precision": "auto"})
    assert read_plan(auto, TINY, CPU) is None
    assert precision_on(auto, CPU) == "bf16"
    assert read_plan(auto, TINY, capable(monkeypatch, (8, 6))) is None
    for capability in ((8, 9), (9, 0), (12, 0)):
        device = capable(monkeypatch, capability)
        assert precision_on(auto, device) == "fp8"
        assert read_plan(auto, TINY, device) == read_plan(fp8, TINY, device)


def test_auto_needs_no_plan_where_it_is_not_used(tmp_path: Path) -> None:
    auto = GraphOptions(precision="auto", precision_file=str(tmp_path / "none.json"))
    assert read_plan(auto, TINY, CPU) is None
    service = parse({"model": TINY.model_dump(), "encoder": CPU_ONLY, "graphs": auto.model_dump()})
    (warning,) = missing(service)
    assert warning.endswith("not on this machine; every encoder node whose GPU has FP8 needs it")
    open_engine(service, EncoderMetrics()).close()


def test_rows_are_shared_only_by_devices_that_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the keys of a shared cache: an image's rows in bf16 must not answer for those in FP8."""
    fp8 = written(tmp_path)
    auto = fp8.model_copy(update={"precision": "auto"})
    plain = rows_digest(GraphOptions(), TINY, CPU)
    assert rows_digest(auto, TINY, CPU) == plain
    assert rows_digest(auto, TINY, capable(monkeypatch, (8, 6))) == plain
    found = {rows_digest(auto, TINY, capable(monkeypatch, one)) for one in ((8, 9), (9, 0))}
    assert found == {rows_digest(fp8, TINY, CPU)}
    assert plain not in found
    layers = json.loads((tmp_path / "plan.json").read_text())["fp8"]
    attention = {"blocks.0.attn.qkv" + ATTENTION: {"error": 0.01}}
    written(tmp_path, fp8=layers | attention)
    ada, hopper, blackwell = (
        rows_digest(auto, TINY, capable(monkeypatch, one)) for one in ((8, 9), (9, 0), (12, 0))
    )
    assert ada == blackwell != hopper, "9.0 alone has FP8 attention"
    assert hopper == rows_digest(fp8, TINY, CPU)
