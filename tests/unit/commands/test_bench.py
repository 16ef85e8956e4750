"""What the bench sends and how it reads metrics. That it runs: `make bench`."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from argparse import ArgumentTypeError
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import ray
import ray.serve
from PIL import Image
from ray._common.utils import try_to_create_directory

from actors.errors import StartError
from actors.options import ActorOptions, EncoderOptions, GraphOptions, ModelOptions
from encoder_service.bench import cluster, serve
from encoder_service.bench.arrivals import Traffic
from encoder_service.bench.cluster import OTHER_FILES, ha_proxy
from encoder_service.bench.decoding import measure, rate
from encoder_service.bench.load import (
    Answered,
    Load,
    Result,
    Samples,
    merged,
    pictures_of,
    send,
    shares,
    turned,
    work_between,
)
from encoder_service.bench.mix import parse_mix, requests
from encoder_service.bench.serve import figures
from encoder_service.client.items import ServiceError
from encoder_service.config import is_open, parse
from router.simulate import ITEMS, at_random, drawn


def test_ports_that_are_taken_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster, "PORTS", range(port, port + 1))
        with pytest.raises(StartError, match=rf"1 of the ports {port} to {port} are not free"):
            cluster.free_ports(1)
    assert cluster.free_ports(1) == [port]


def test_mixes() -> None:
    assert parse_mix("336x336*2+1024x768,64x64") == [
        [(336, 336), (336, 336), (1024, 768)],
        [(64, 64)],
    ]
    for wrong in ("", "336", "336x336*0", "0x1", "1x00", "1x1+", "1x1x1", "axb"):
        with pytest.raises(ArgumentTypeError, match="WIDTHxHEIGHT"):
            parse_mix(wrong)


def test_the_mix_of_the_simulator() -> None:
    kinds = parse_mix("heavy-tailed")
    sides = [side for kind in kinds for side, other in kind if side == other]
    assert sorted(set(map(len, kinds))) == sorted(set(ITEMS))
    assert len(sides) == sum(map(len, kinds))
    assert (min(sides), max(sides)) == (128, 2048)
    sizes = [one for items in drawn(Random(1), len(kinds)) for one in items]
    for side, patches in zip(sides, sizes, strict=True):
        assert side % 32 == 0
        assert abs(side / 16 - math.sqrt(patches)) <= 1


def test_what_nobody_answered_has_no_latencies() -> None:
    with pytest.raises(RuntimeError, match=r"nothing was answered: .*overloaded"):
        Result(errors=Counter(overloaded=3)).percentiles_ms(50)


def test_requests_take_turns_and_never_repeat() -> None:
    sent = list(islice(requests([[(64, 48), (32, 32)], [(64, 48)]]), 40))
    assert [len(images) for images in sent] == [2, 1] * 20
    files = [image for images in sent for image in images]
    assert len(set(files)) == len(files)
    assert Image.open(BytesIO(sent[0][0])).size == (64, 48)
    assert Image.open(BytesIO(sent[0][1])).size == (32, 32)
    Image.open(BytesIO(sent[0][0])).load()


def test_others_cannot_enter_the_folder_of_rays_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes its own writable for everybody, whatever the umask."""
    folders = []

    def init(*, _temp_dir: str, **_: Any) -> None:
        try_to_create_directory(_temp_dir)
        folders.append(Path(_temp_dir))

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for name in ("start", "shutdown"):
        monkeypatch.setattr(ray.serve, name, lambda **_: None)
    with cluster.cluster(num_cpus=1):
        assert not is_open(folders[0])
        assert not is_open(folders[0] / "none yet")
        assert is_open(Path("/tmp"))
        assert is_open(Path("/tmp/none yet")), "Ray would make it so"
    assert not folders[0].exists()


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


def test_what_the_simulator_is_told_of_a_fleet() -> None:
    model, kinds = {"id": "qwen3vl-2b", "load_format": "dummy"}, parse_mix("336x336,1024x1024")
    for gpus, sharing in ((0.25, 4), (1.0, 1)):
        options = parse({"model": model, "encoder": {"replicas": 8, "num_gpus": gpus}})
        told = Traffic(options, kinds, routers=2, most_per_second=50.0)
        assert told.patches(kinds) == [[400], [4096]]
        arrivals = at_random(Random(1), told.patches(kinds) * 1000, 35.0)
        outcome = told.simulate(arrivals, 1)
        devices = 8 / sharing
        assert told.scenario(arrivals).sharing == sharing
        assert sum(outcome.busy_seconds) / (devices * outcome.makespan_seconds) == pytest.approx(
            0.7, 0.05
        )


class Echo:
    """A service that answers at once, and refuses every third request."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def encode(self, images: list[bytes]) -> tuple[float, int]:
        self.seen += images
        refused = len(self.seen) % 3 == 0
        await asyncio.sleep(0)
        if refused:
            raise ServiceError("overloaded", "later")
        return 0.0, 100


def test_a_load_in_parts_is_the_whole_load_and_no_picture_is_sent_twice() -> None:
    load = Load(5, 21, math.inf)
    parts = shares(load, 3)
    assert [part.concurrency for part in parts] == [2, 2, 1]
    assert sum(part.requests for part in parts) == 21
    assert len(shares(load, 8)) == 5, "more callers than requests at a time: some are idle"
    ways = [Echo() for _ in parts]
    results = [
        asyncio.run(send(way.encode, part, pictures_of([[(32, 32)]], place, turn=1)))
        for place, (way, part) in enumerate(zip(ways, parts, strict=True))
    ]
    whole = merged(results)
    assert (whole.total("images"), whole.errors) == (15, Counter(overloaded=6))
    assert whole.total("embedding_bytes") == 1500
    seen = [image for way in ways for image in way.seen]
    assert len(set(seen)) == len(seen) == 21


class Slow(Echo):
    """Answers nothing before all have come."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.barrier = asyncio.Barrier(requests)

    async def encode(self, images: list[bytes]) -> tuple[float, int]:
        await self.barrier.wait()
        return 0.0, 0


def test_at_random_times_nobody_waits_for_an_answer_to_another() -> None:
    load = Load(2, 12, math.inf, per_second=200.0)
    parts = shares(load, 2)
    assert [(part.per_second, part.seed) for part in parts] == [(100.0, 0), (100.0, 1)]
    result = asyncio.run(send(Slow(12).encode, load, requests([[(32, 32)]])))
    assert len(result.answered) == 12
    assert max(one.latency_seconds for one in result.answered) > 0.02, (
        "none was answered before the last came"
    )
    timed = replace(load, requests=2**31, seconds=0.3)
    found = asyncio.run(send(Echo().encode, timed, requests([[(8, 8)]])))
    assert 20 < found.total("images") + found.errors["overloaded"] < 120


def test_callers_are_ahead_of_each_other() -> None:
    kinds = [[(32 + side, 32)] for side in range(100)]
    assert turned(kinds, 0) == kinds
    assert turned(kinds, 3) == kinds[11:] + kinds[:11]


def test_ha_proxy_fits_the_machine() -> None:
    found = ha_proxy("/tmp/x", 4096)
    assert 2 * int(found["RAY_SERVE_HAPROXY_MAXCONN"]) + OTHER_FILES <= 4096
    ports = {found[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS")}
    assert len(ports - {"9101", "8404"}) == 2
    assert found["RAY_SERVE_HAPROXY_SOCKET_PATH"].startswith("/tmp/x/")
    for plenty in (20_000, -1):
        assert "RAY_SERVE_HAPROXY_MAXCONN" not in ha_proxy("/tmp/x", plenty)


def test_a_rate_counts_what_ended_and_keeps_so_many_under_way() -> None:
    under_way, most = 0, 0
    lock = threading.Lock()

    def begin(done: Any) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        threading.Timer(0.01, end, [done]).start()

    def end(done: Any) -> None:
        nonlocal under_way
        with lock:
            under_way -= 1
        answer: Future[int] = Future()
        answer.add_done_callback(done)
        answer.set_result(0)

    found = rate(begin, 3, 0.2)
    assert most == 3
    assert 0 < found <= 3 / 0.01


def test_the_engine_alone() -> None:
    options = ActorOptions(
        model=ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"),
        encoder=EncoderOptions(device="cpu", num_gpus=0),
        graphs=GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0),
    )
    found = measure(options, next(requests([[(64, 64), (32, 32)]])), 4, 0.05)
    assert min(found) > 0


def test_figures_have_all_rows() -> None:
    alone = Result([Answered(0.1, 0.05, 1, 10, 20)])
    answered = [Answered(0.1 * i, 0.02, 1, 10, 20) for i in range(1, 101)]
    result = Result(answered, Counter(), 2.0)
    found = figures(result, work_between({}, samples(patches=100)), alone)
    found |= {"engine_ratio": 1.0, "pipeline_ratio": 1.0, "ready_seconds": 1.0}
    apart = ("steady_", "burst_", "simulated_")  # the figures of arrivals.py
    rows = [row for row in serve.ROWS if not row[0].startswith(apart)]
    assert {key for key, _, _ in rows} <= found.keys()
    assert found["p50_ms"] == pytest.approx(5050)
    assert found["p99_ms"] == pytest.approx(9901)
    assert found["loaded_overhead_ms"] == pytest.approx(20)
    several = Result([Answered(0.1, -0.1, 2, 10, 20)], Counter(), 2.0)
    assert "loaded_overhead_ms" not in figures(several, work_between({}, samples(patches=1)), alone)
    assert (found["requests_per_second"], found["patches_per_second"]) == (50, 50)
    with pytest.raises(RuntimeError, match="overloaded"):
        figures(Result(errors=Counter(overloaded=3)), work_between({}, {}), alone)
