"""Rows in float8_e4m3 through the whole service in one process, over HTTP and gRPC."""

from __future__ import annotations

import asyncio

import numpy as np

from actors.families import registry
from actors.options import ModelOptions
from encoder_service.client import Embedding
from encoder_service.config import ServiceOptions
from encoder_service.service import Service
from tests.images import jpeg
from tests.unit.api.test_plan import Encoding, clients
from tests.videos import video

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")


def check(small: Embedding, whole: Embedding) -> float:
    """That each value has the documented error. Returns the relative RMS of all."""
    exact = whole.numpy()
    largest = np.abs(exact).max(1, keepdims=True)
    error = np.abs(small.numpy() - exact)
    assert (small.dtype, small.shape) == ("float8_e4m3", whole.shape)
    assert (len(small.data), len(small.scales)) == (exact.size, 4 * len(exact))
    assert (error <= np.maximum(np.abs(exact) / 16, largest / 458_752) * (1 + 1e-5)).all()
    return float(np.sqrt((error**2).sum() / (exact**2).sum()))


def test_rows_of_images_and_videos() -> None:
    sources = [jpeg(640, 480), video(8, size=(96, 64)), jpeg(64, 64)]

    async def run() -> None:
        fleet = Encoding(MODEL)
        service = Service(ServiceOptions(model=MODEL), registry.read(MODEL), fleet)
        async with clients(service) as both:
            for one in both:
                whole = await one.encode(sources, "float32")
                small = await one.encode(sources, "float8_e4m3")
                errors = [check(*pair) for pair in zip(small, whole, strict=True)]
                assert max(errors) < 3e-2
                print("float8_e4m3: relative RMS", *(f"{error:.4f}" for error in errors))
                (left,) = await one.encode(sources[1:2], "float8_e4m3", evs_rate=0.5)
                (kept,) = await one.encode(sources[1:2], "float32", evs_rate=0.5)
                assert left.kept_rows == kept.kept_rows
                check(left, kept)
        fleet.pipeline.close()

    asyncio.run(run())
