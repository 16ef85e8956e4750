"""What the bench sends and how it reads metrics. That it runs: `make bench`."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from itertools import islice

import pytest
from PIL import Image

from encoder_service.bench.load import Result
from encoder_service.bench.mix import parse_mix, requests
from encoder_service.bench.scrape import Samples, work_between
from encoder_service.bench.serve import ROWS, figures


def test_mixes() -> None:
    assert parse_mix("336x336*2+1024x768,64x64") == [
        [(336, 336), (336, 336), (1024, 768)],
        [(64, 64)],
    ]
    for wrong in ("", "336", "336x336*0", "0x1", "1x1+", "1x1x1", "axb"):
        with pytest.raises(ValueError, match="WIDTHxHEIGHT"):
            parse_mix(wrong)


def test_requests_take_turns_and_never_repeat() -> None:
    sent = list(islice(requests([[(64, 48), (32, 32)], [(64, 48)]]), 40))
    assert [len(images) for images in sent] == [2, 1] * 20
    files = [image for images in sent for image in images]
    assert len(set(files)) == len(files)
    assert Image.open(BytesIO(sent[0][0])).size == (64, 48)
    assert Image.open(BytesIO(sent[0][1])).size == (32, 32)
    Image.open(BytesIO(sent[0][0])).load()


def samples(**values: float) -> Samples:
    """Of two replicas; the second does a third of the first's work."""
    return {
        (f"encoder_{name}_total", frozenset({("replica", replica)})): value * share
        for name, value in values.items()
        for replica, share in (("a", 0.75), ("b", 0.25))
    }


def test_work_is_what_counters_grew_by() -> None:
    before = samples(patches=100, graph_hits=10)
    after = samples(patches=500, graph_hits=40, graph_misses=10, tokens=300, padded_tokens=100)
    work = work_between(before, after)
    assert work.patches == 400
    assert work.hit_rate == 0.75
    assert work.padding == 0.25
    assert work.balance == 1.5
    assert work_between(after, after).balance == 0


def test_figures_have_all_rows() -> None:
    alone = Result([0.1], [0.05])
    result = Result([0.1 * i for i in range(1, 101)], [], 100, 10, 20, Counter(), 2.0)
    found = figures(result, work_between({}, samples(patches=100)), alone)
    found |= {"overhead_ratio": 1.0, "overhead_ratio_empty": 1.0}
    assert {key for key, _, _ in ROWS} <= found.keys()
    assert found["p50_ms"] == pytest.approx(5050)
    assert found["p99_ms"] == pytest.approx(9901)
    assert (found["requests_per_second"], found["patches_per_second"]) == (50, 50)
    with pytest.raises(RuntimeError, match="overloaded"):
        figures(Result(errors=Counter(overloaded=3)), work_between({}, {}), alone)
