"""Attention over tables, by Triton and on Hopper, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from actors.kernels.attention import Attention, SegmentAttention
from actors.kernels.attention_fp8 import FEWEST_KEYS, attended
from actors.kernels.break_points import at_break_points
from tests.gpu.compared import difference, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_device")]
pytest.importorskip("triton")

from actors.kernels.attention import HEAD_SIZES, TritonAttention  # noqa: E402
from actors.kernels.hopper import attention as hopper  # noqa: E402
from actors.kernels.hopper.attention import HopperAttention  # noqa: E402
from actors.kernels.hopper.attention_fp8 import long_kernels  # noqa: E402
from actors.kernels.hopper.cuda import CAPABILITY  # noqa: E402
from actors.kernels.triton import attention_kernel  # noqa: E402
from actors.kernels.triton.elementwise import rotate_  # noqa: E402

KERNELS = [
    *((size, torch.bfloat16) for size in HEAD_SIZES),
    *((size, torch.float16) for size in (64, 72, 128)),
]
"""Each is compiled for seconds, in two forms."""
LAYOUTS = [[400], [1], [63, 64, 65], [1, 127, 128, 129, 400], [1100, 4, 2048]]


def expected_attention(
    qkv: Tensor, lengths: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    reference = SegmentAttention()
    return reference(qkv.to(dtype), reference.metadata(lengths, len(qkv), len(lengths)))


@pytest.mark.parametrize("lengths", LAYOUTS, ids=str)
@pytest.mark.parametrize(("size", "dtype"), KERNELS, ids=str)
def test_attention_in_every_head_size_and_budget(
    size: int, dtype: torch.dtype, lengths: list[int]
) -> None:
    used, tiles = sum(lengths), TritonAttention()
    for patches in (used, used + 37, 8192):
        qkv = torch.randn(patches, 3, 4, size, dtype=dtype)
        qkv[used:] = float("nan")
        values = on_gpu(tiles.metadata(lengths, patches, 16))
        out = tiles(qkv.clone(), values)[:used]
        assert difference(out, expected_attention(qkv[:used], lengths)) < 4e-3


@pytest.mark.parametrize("chip", [(8, 6), (12, 0)])
@pytest.mark.parametrize("size", [72, 88, 128])
def test_attention_as_other_chips_compute_it(
    size: int, chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tiles, and loads without TMA, on this GPU."""
    cuda = SimpleNamespace(get_device_capability=lambda _: chip)
    monkeypatch.setattr(attention_kernel, "torch", SimpleNamespace(cuda=cuda))
    test_attention_in_every_head_size_and_budget(size, torch.bfloat16, LAYOUTS[-1])


def hopper_tiles(size: int, dtype: torch.dtype) -> HopperAttention:
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("not compute capability 9.0")
    kernels = hopper.kernels_for(torch.device("cuda"), dtype, size)
    assert kernels, "attention.cu does not compile"
    return HopperAttention(kernels, size)


# One strip, blocks of keys filled and not, segments that the ring just holds and just not, a last
# round that is cut into parts, and into strips that groups share, all at once. A ring has a form
# for large budgets, in which CTAs share keys and values.
HOPPER_LAYOUTS = [
    [1],
    [400],
    [480, 481, 720, 721],
    [400] * 20,
    [79, 80, 81, 95, 96, 97, 193],
    [2048, 1, 128, 129, 160],
    [300] * 40,
    [1024],
    [4096],
    [8160],
    [2600] * 3,
    [5000, 480, 4999, 1],
]


@pytest.mark.parametrize("lengths", HOPPER_LAYOUTS, ids=str)
@pytest.mark.parametrize("size", hopper.RINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_equals_plain_attention_and_leaves_keys_and_values(
    size: int, lengths: list[int], dtype: torch.dtype
) -> None:
    tiles, used = hopper_tiles(size, dtype), sum(lengths)
    for ring in hopper.RINGS[size]:
        patches = used + 9 + ring.from_patches
        qkv = torch.randn(patches, 3, 16, size, dtype=dtype)
        qkv[used:] = float("nan")
        values = on_gpu(tiles.metadata(lengths, patches, len(lengths) + 3))
        written = qkv.clone()
        out = tiles(written, values)[:used]
        assert difference(out, expected_attention(qkv[:used], lengths)) < 4e-3
        assert torch.equal(written[:used, 1:], qkv[:used, 1:])
        assert written[used:].isnan().all()


@pytest.mark.parametrize("lengths", [[400] * 20, [2600, 64, 480, 1]], ids=str)
@pytest.mark.parametrize("size", hopper.RINGS)
def test_on_hopper_the_same_is_the_same_every_time(size: int, lengths: list[int]) -> None:
    """What is copied over something that is still being read shows as another result."""
    tiles = hopper_tiles(size, torch.bfloat16)
    for ring in hopper.RINGS[size]:
        patches = sum(lengths) + ring.from_patches
        qkv = torch.randn(patches, 3, 16, size, dtype=torch.bfloat16)
        values = on_gpu(tiles.metadata(lengths, patches, len(lengths)))
        first = tiles(qkv.clone(), values)
        assert all(torch.equal(tiles(qkv.clone(), values), first) for _ in range(20))


def assert_launches_are_one(
    attend: Callable[[Tensor], Tensor], qkv: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In few launches, and in more than there are rounds of items."""
    whole = qkv.clone()
    attend(whole)
    patches, _, heads, size = qkv.shape
    for count in (2, 3, 7, 60):
        most = 4 * patches**2 * heads * size / (count - 0.5)
        monkeypatch.setattr(hopper, "LAUNCH_OPERATIONS", most)
        reached: list[None] = []
        with at_break_points(partial(reached.append, None)):
            parts = qkv.clone()
            attend(parts)
        assert len(reached) in (count + 1, 2 * (count + 1))  # FP8: of long and of short segments
        assert torch.equal(parts, whole)


LAUNCHED_LAYOUTS = [
    *([1], [400] * 20, [480, 481, 720, 721], [4096], [8160], [32400]),
    *([2600] * 3, [5000, 480, 4999, 1], [9000, 17, 8200, 3000]),
]


@pytest.mark.parametrize("lengths", LAUNCHED_LAYOUTS, ids=str)
@pytest.mark.parametrize("size", hopper.RINGS)
def test_on_hopper_several_launches_are_one(
    size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = hopper_tiles(size, torch.bfloat16)
    for ring in hopper.RINGS[size]:
        patches = sum(lengths) + 9 + ring.from_patches
        qkv = torch.randn(patches, 3, 16, size, dtype=torch.bfloat16)
        values = on_gpu(tiles.metadata(lengths, patches, len(lengths)))
        assert_launches_are_one(partial(tiles, values=values), qkv, monkeypatch)


@pytest.mark.parametrize("lengths", LAUNCHED_LAYOUTS[3:], ids=str)
@pytest.mark.parametrize("size", hopper.RINGS)
def test_in_fp8_several_launches_are_one(
    size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = fp8_tiles(size, monkeypatch, fewest=2000)
    qkv = torch.randn(sum(lengths), 3, 16, size, dtype=torch.bfloat16)
    values = on_gpu(tiles.metadata(lengths, len(qkv), len(lengths)))
    attend = partial(tiles.fp8, values=values, cos=None, sin=None)
    assert_launches_are_one(attend, qkv, monkeypatch)


@pytest.mark.parametrize(
    ("attention", "patches"),
    [
        (TritonAttention, 600),
        (TritonAttention, 4096),
        (partial(hopper_tiles, 72, torch.bfloat16), 600),
        (partial(hopper_tiles, 72, torch.bfloat16), 9000),
    ],
    ids=["triton-600", "triton-4096", "hopper-600", "hopper-9000"],
)
def test_a_poisoned_neighbour_stays_alone(attention: Callable[[], Attention], patches: int) -> None:
    lengths, tiles = [100, 200, 300], attention()
    qkv = torch.randn(patches, 3, 2, 72, dtype=torch.bfloat16)
    values = on_gpu(tiles.metadata(lengths, patches, 3))
    clean = tiles(qkv.clone(), values).clone()
    qkv[100:300] = float("nan")
    out = tiles(qkv.clone(), values)
    assert torch.equal(out[:100], clean[:100])
    assert torch.equal(out[300:600], clean[300:600])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("patches", [1000, 3000, 9000])
@pytest.mark.parametrize(
    ("size", "dtype"), [(64, torch.bfloat16), (72, torch.bfloat16), (72, torch.float16)], ids=str
)
def test_on_hopper_scores_may_grow_without_bound(
    size: int, dtype: torch.dtype, patches: int, sign: int
) -> None:
    tiles = hopper_tiles(size, dtype)
    qkv = torch.randn(patches, 3, 2, size, dtype=dtype)
    # Up to hundreds, all of one sign, and larger from key to key.
    qkv[:, 0] = sign
    qkv[:, 1] = qkv[:, 1].abs() * torch.linspace(0, 60, patches)[:, None, None]
    values = on_gpu(tiles.metadata([patches], patches, 1))
    expected = expected_attention(qkv, [patches], torch.float64)
    assert difference(tiles(qkv.clone(), values), expected) < 4e-3


def fp8_tiles(
    size: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16, fewest: int = 1
) -> HopperAttention:
    """`fewest`: of patches in a segment that is in FP8."""
    kernels, long = hopper_tiles(size, dtype).forms, long_kernels(torch.device("cuda"), dtype, size)
    assert long, "attention_fp8.cu does not compile"
    monkeypatch.setattr(long, "fewest", fewest)
    monkeypatch.setitem(FEWEST_KEYS, size, fewest)
    return HopperAttention([kernel for _, kernel in kernels], size, long)


# Segments that start at a multiple of 16 patches, and that do not, which TMA cannot copy from.
FP8_LAYOUTS = [
    *([1], [127, 128], [129, 400], [400] * 20, [1024], [8160]),
    *([63, 64, 65], [1, 127, 128, 129, 400], [2600, 641, 480, 17], [5000, 480, 4999, 1]),
]


@pytest.mark.parametrize("lengths", FP8_LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, torch.bfloat16) for size in hopper.RINGS), (72, torch.float16)],
    ids=str,
)
def test_attention_in_fp8_is_what_is_emulated_and_leaves_keys_and_values(
    size: int, dtype: torch.dtype, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, used = fp8_tiles(size, monkeypatch, dtype, min(lengths)), sum(lengths)
    qkv = torch.randn(used + 9, 3, 4, size, dtype=dtype)
    qkv[used:] = float("nan")
    values = on_gpu(tiles.metadata(lengths, len(qkv), len(lengths) + 3))
    written = qkv.clone()
    out = tiles.fp8(written, values, None, None)[:used]
    expected = torch.zeros(used, 4 * size)
    attended(qkv[:used], lengths, expected)
    assert difference(out, expected) < 3e-2
    assert difference(out, expected_attention(qkv[:used], lengths)) < 7e-2
    assert torch.equal(written[:used, 1:], qkv[:used, 1:])
    assert written[used:].isnan().all()


@pytest.mark.parametrize("lengths", [[300, 700, 64, 1200, 5], [65, 9000, 3], [80]], ids=str)
@pytest.mark.parametrize("size", hopper.RINGS)
def test_in_fp8_all_are_rotated_and_short_segments_stay_in_16_bits(
    size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, used = fp8_tiles(size, monkeypatch, fewest=512), sum(lengths)
    qkv, angle = (
        torch.randn(used, 3, 4, size, dtype=torch.bfloat16),
        6 * torch.rand(used, size // 2),
    )
    values = on_gpu(tiles.metadata(lengths, used, len(lengths)))
    out = tiles.fp8(qkv.clone(), values, angle.cos(), angle.sin())
    rotate_(qkv, angle.cos(), angle.sin())
    expected, ends = expected_attention(qkv, lengths), torch.tensor(lengths).cumsum(0).tolist()
    for length, end in zip(lengths, ends, strict=True):
        rows = slice(end - length, end)
        off = difference(out[rows], expected[rows])
        assert off < (7e-2 if length >= 512 else 4e-3)
        assert (off > 2e-2) == (length >= 512)


@pytest.mark.parametrize("lengths", [[400] * 20, [2600, 641, 480, 1], [15376]], ids=str)
@pytest.mark.parametrize("size", hopper.RINGS)
def test_in_fp8_the_same_is_the_same_every_time(
    size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = fp8_tiles(size, monkeypatch, fewest=min(lengths))
    qkv = torch.randn(sum(lengths), 3, 16, size, dtype=torch.bfloat16)
    values = on_gpu(tiles.metadata(lengths, len(qkv), len(lengths)))
    first = tiles.fp8(qkv.clone(), values, None, None)
    again = (tiles.fp8(qkv.clone(), values, None, None) for _ in range(20))
    assert all(torch.equal(each, first) for each in again)


def test_in_fp8_too_a_poisoned_neighbour_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, tiles = [113, 208, 300], fp8_tiles(72, monkeypatch, fewest=113)
    qkv = torch.randn(640, 3, 2, 72, dtype=torch.bfloat16)
    values = on_gpu(tiles.metadata(lengths, 640, 3))
    clean = tiles.fp8(qkv.clone(), values, None, None).clone()
    qkv[113:321] = float("nan")
    out = tiles.fp8(qkv.clone(), values, None, None)
    assert torch.equal(out[:113], clean[:113])
    assert torch.equal(out[321:621], clean[321:621])
