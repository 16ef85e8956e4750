"""What a router makes of the replicas that Serve tells it of, and of calls to them that fail."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from actors.errors import InvalidMedia, NotFound, Unavailable
from actors.rows.protocol import RowsPlace
from actors.rpc.server import TICKETS, Endpoint, ReplicaServer
from actors.store.kept import Kept
from actors.types import Cost, Embedding, Reply, SharedBytes
from router.replicas import serve_fleet
from router.replicas.fleet import (
    PUBLISHED,
    PinnedReplicaUnavailable,
    Replica,
    ReplicaUnreachable,
    ShardLost,
    costs,
)
from router.replicas.serve_fleet import ServeFleet
from tests.unit.fleet import embedding, item, right
from tests.unit.router.test_replica_rpc import NODE, SECONDS, MemoryEncoder

NOWHERE = Endpoint(NODE, "/nowhere", "127.0.0.1:1", "actor", "token")
DEPLOYMENT = ("fleet", "Encoder")


class Handle:
    """Of a deployment, for `check_health`; and the actor of its replica."""

    app_name, deployment_name = DEPLOYMENT

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.batches: list[list[str]] = []
        self.checked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.expired = False
        self.check_health = self.Method(self._check_health)
        self.__ray_call__ = self.Method(self._call)

    class Method:
        def __init__(self, remote: Any) -> None:
            self.remote = remote

    def options(self, **_: Any) -> Handle:
        return self

    async def _call(self, function: Any, tickets: list[str]) -> Any:
        self.batches.append(tickets)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        return [None] * len(tickets) if self.expired else function(self, tickets)

    async def _check_health(self) -> None:
        self.checked += 1
        if self.failures:
            raise self.failures.pop()


@pytest.fixture(autouse=True)
def _replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one deployment, as in a rollout, one that does not say, one version."""
    monkeypatch.setattr(serve_fleet, "node_id", lambda: NODE)
    monkeypatch.setattr(serve_fleet, "CONFIRM_SECONDS", 0.01)
    said = {"a": {"fingerprint": "old"}, "b": {"fingerprint": "new"}, "c": {}}
    named = {name: Replica(metadata, 7, NOWHERE) for name, metadata in said.items()}
    named["d"] = Replica({"fingerprint": "new"}, 7, endpoint=None)
    PUBLISHED[DEPLOYMENT] = named


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, node: str = NODE
) -> AsyncGenerator[tuple[MemoryEncoder, Handle, ServeFleet]]:
    """Replica "a", reached over gRPC."""
    encoder = MemoryEncoder()
    server = ReplicaServer(encoder)
    endpoint = await server.start(node, "127.0.0.1", "actor")
    PUBLISHED[DEPLOYMENT] = {"a": Replica({}, 7, endpoint)}
    handle = Handle()
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: handle)
    fleet = ServeFleet([handle], None)
    async with asyncio.timeout(SECONDS):
        yield encoder, handle, fleet
        PUBLISHED[DEPLOYMENT] = {}
        fleet.reports()
        TICKETS.clear()  # `Handle` exchanges none, and the server would wait for that
        await server.stop(SECONDS)


def test_of_equal_devices_the_fastest_measurement_counts() -> None:
    """The others were measured while something else ran on their device."""

    def replica(device: str, cost: Cost) -> Replica:
        return Replica({"device": device, "cost": asdict(cost)}, 0)

    fast, held_up, slow = Cost(1e-3, 1e-6, 1e-10), Cost(1e-4, 4e-6, 1e-10), Cost(4e-3, 5e-6, 5e-10)
    found = costs(
        {
            "a": replica("H200", held_up),
            "b": replica("L4", slow),
            "c": replica("H200", fast),
            "d": Replica({}, 0),
        }
    )
    assert found == {"a": fast, "b": slow, "c": fast, "d": None}


@pytest.mark.parametrize(
    ("fingerprint", "names"), [(None, "abc"), ("old", "ac"), ("new", "bc"), ("other", "c")]
)
def test_only_replicas_of_the_own_model_and_version_are_planned_for(
    fingerprint: str | None, names: str
) -> None:
    fleet = ServeFleet([Handle()], fingerprint)
    reported = {name: one.outstanding_patches for name, one in fleet.reports().items()}
    assert reported == dict.fromkeys(names, 7)
    assert fleet.reports() is fleet.reports()
    assert list(fleet.replicas()) == list(names)


def test_replicas_of_the_own_node_are_told_from_others() -> None:
    away = replace(NOWHERE, node="another")
    named = {"a": away, "b": NOWHERE, "c": away, "d": NOWHERE}
    PUBLISHED[DEPLOYMENT] = {name: Replica({}, 7, where) for name, where in named.items()}
    fleet = ServeFleet([Handle()], None)
    assert list(fleet.reports()) == ["a", "b", "c", "d"]
    assert fleet.near() == {"b", "d"}


def test_the_replicas_of_all_pools_are_one_fleet() -> None:
    """Serve is asked about a replica through the handle of its own pool."""
    handles = []
    for pool in ("small", "big"):
        handles.append(Handle())
        handles[-1].deployment_name = f"Encoder-{pool}"
        about = {"pool": pool, "largest_item": [9]} if pool == "small" else {"pool": pool}
        PUBLISHED["fleet", f"Encoder-{pool}"] = {pool: Replica(about, 7, NOWHERE)}

    async def test() -> None:
        fleet = ServeFleet(handles, None)
        reports = fleet.reports()
        assert {name: one.pool for name, one in reports.items()} == {"small": "small", "big": "big"}
        assert [one.largest_item for one in reports.values()] == [(9,), None]
        assert fleet.reports() is reports
        with pytest.raises(ShardLost):
            await fleet.encode("big", [item(1)], "bfloat16", 5)
        while fleet._confirming:
            await asyncio.sleep(0.01)
        assert [handle.checked for handle in handles] == [0, 1]
        del PUBLISHED["fleet", "Encoder-big"]
        assert list(fleet.reports()) == ["small"]

    asyncio.run(test())


@pytest.mark.parametrize(("node", "where"), [(NODE, "local"), ("another", "remote")])
async def test_bytes_are_counted_by_where_the_replica_is(
    monkeypatch: pytest.MonkeyPatch, node: str, where: str
) -> None:
    async with served(monkeypatch, node) as (encoder, _, fleet):
        encoder.rows[item(2).digest] = SharedBytes(object(), 2**21)
        await fleet.encode("a", [item(1), item(2)], "bfloat16", 5)
        encoder.kept["x"] = Kept.of(item(3), embedding(item(3), "a"))
        await fleet.fetch("a.x")
        counted = {
            tuple(sample.labels.values()): sample.value
            for sample in next(iter(fleet._metrics.bytes.collect())).samples
            if sample.name.endswith("_total")
        }
        rows = 32 + 2**21 + 32  # digests by value, twice
        assert counted == {("items", where): 2 * len(b"item 1"), ("rows", where): rows}


async def test_small_rows_come_with_the_answer_and_large_ones_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as (encoder, handle, fleet):
        reply = await fleet.encode("a", [item(1)], "bfloat16", 5)
        assert right([item(1)], reply.answers)
        assert not handle.batches
        rows = SharedBytes(object(), 2**21)
        encoder.rows[item(2).digest] = rows
        reply = await fleet.encode("a", [item(1), item(2)], "bfloat16", 5)
        assert right([item(1)], reply.answers[:1])
        assert isinstance(reply.answers[1], Embedding)
        assert reply.answers[1].data is rows
        encoder.kept["x"] = Kept.of(item(2), replace(embedding(item(2), "a"), data=rows))
        assert (await fleet.fetch("a.x")).embedding.data is rows


async def test_large_rows_of_early_answers_are_taken_before_they_are_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as (encoder, handle, fleet):
        media = [item(number) for number in range(3)]
        rows = [SharedBytes(object(), 2**21) for _ in media]
        encoder.rows = {one.digest: data for one, data in zip(media, rows, strict=True)}
        for _ in media:
            encoder.parts.release()
        found: dict[int, Any] = {}

        def early(reply: Reply) -> None:
            found.update(zip(reply.places, reply.answers, strict=True))

        last = await fleet.encode("a", media, "bfloat16", 10, early=early)
        early(last)
        assert list(found) == [0, 1, 2]
        assert [one.data for one in found.values()] == rows
        assert sum(map(len, handle.batches)) == 3


async def test_tickets_that_come_during_a_hand_over_are_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as (encoder, handle, fleet):
        media = [item(number) for number in range(5)]
        for one in media:
            encoder.rows[one.digest] = SharedBytes(one.digest, 2**21)
        handle.gate.clear()
        first, *others = [
            asyncio.create_task(fleet.encode("a", [one], "bfloat16", 5)) for one in media
        ]
        while True:
            taken = sum(map(len, handle.batches))
            if taken and taken + len(fleet._connections["a"][1]._waiting) == len(media):
                break
            await asyncio.sleep(0.01)
        others[0].cancel()
        handle.gate.set()
        for one, call in zip(media[2:], others[1:], strict=True):
            (answer,) = (await call).answers
            assert isinstance(answer, Embedding)
            assert answer.data is encoder.rows[one.digest]
        await first
        assert sum(map(len, handle.batches)) == len(media)
        assert len(handle.batches) <= 2  # what came after the first call went with the second


@pytest.mark.parametrize(
    "failure",
    [ActorDiedError(), PinnedReplicaUnavailable("gone"), ActorUnavailableError("x", b"x" * 16)],
    ids=lambda failure: type(failure).__name__,
)
async def test_rows_that_cannot_be_taken_are_lost(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch) as (encoder, handle, fleet):
        encoder.rows[item(2).digest] = SharedBytes(object(), 2**21)
        handle.failures = [failure]
        with pytest.raises(ShardLost, match="rows"):
            await fleet.encode("a", [item(2)], "bfloat16", 5)
        await fleet.encode("a", [item(2)], "bfloat16", 5)
        handle.expired = True
        with pytest.raises(ShardLost, match="not taken in time"):
            await fleet.encode("a", [item(2)], "bfloat16", 5)


async def test_what_a_replica_keeps_is_found_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (encoder, _, fleet):
        for name in "xy":
            encoder.kept[name] = Kept.of(item(1), embedding(item(1), "a"))
        found = await fleet.fetch("a.x")
        assert found.media.digest == item(1).digest
        assert found.media.data == b""
        await fleet.release("a.y")
        for reference in ("a.y", "a.z", "c.x", "nonsense", ""):
            says = "encode the item again" if "." in reference else "is not an id"
            with pytest.raises(NotFound, match=says):
                await fleet.fetch(reference)
            with pytest.raises(NotFound, match=says):
                await fleet.release(reference)


async def test_where_rows_of_an_id_are_served_is_what_its_replica_said() -> None:
    there = replace(NOWHERE, rows_unix="/rows", rows_tcp="10.0.0.1:9")
    PUBLISHED[DEPLOYMENT] = {"a": Replica({}, 7, there), "b": Replica({}, 7, NOWHERE)}
    fleet = ServeFleet([Handle()], None)
    assert fleet.rows_place("a.x") == RowsPlace("/rows", "10.0.0.1:9")
    for reference in ("b.x", "c.x", ""):
        with pytest.raises(NotFound):
            fleet.rows_place(reference)


async def test_a_replica_that_is_lost_takes_what_it_kept_along() -> None:
    PUBLISHED[DEPLOYMENT] = {name: Replica({}, 7, NOWHERE) for name in "ab"}
    fleet = ServeFleet([Handle()], None)
    with pytest.raises(Unavailable, match="cannot be reached"):  # still listed: perhaps later
        await fleet.fetch("b.x")
    PUBLISHED[DEPLOYMENT] = {"a": Replica({}, 7, NOWHERE)}
    with pytest.raises(NotFound):
        await fleet.fetch("b.x")
    PUBLISHED[DEPLOYMENT] = {}
    with pytest.raises(Unavailable, match="known here yet"):  # a router that has just started
        await fleet.release("b.x")
    await asyncio.sleep(0)


@pytest.mark.parametrize("large", [False, True])
def test_a_keeper_that_never_answers_is_not_waited_for(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts the connection and says nothing, or has no time to hand its rows over."""
    monkeypatch.setattr(serve_fleet, "FETCH_SECONDS", 0.2)

    async def test() -> None:
        async with served(monkeypatch) as (encoder, handle, fleet):
            silent = socket.create_server(("127.0.0.1", 0))
            if large:
                handle.gate.clear()
                rows = SharedBytes(object(), 2**21)
                encoder.kept["x"] = Kept.of(item(2), replace(embedding(item(2), "a"), data=rows))
            else:
                tcp = f"127.0.0.1:{silent.getsockname()[1]}"
                PUBLISHED[DEPLOYMENT] = {"a": Replica({}, 7, replace(NOWHERE, tcp=tcp))}
            with silent, pytest.raises(Unavailable, match="encode the item again"):
                await fleet.fetch("a.x")
            if not large:  # asked for its health without an answer: it is not waited for again
                with pytest.raises(Unavailable, match="replica a"):
                    async with asyncio.timeout(0.1):
                        await fleet.release("a.x")
            handle.gate.set()

    asyncio.run(test())


async def test_an_error_of_the_replica_is_not_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (encoder, handle, fleet):
        encoder.failure = InvalidMedia("x")
        with pytest.raises(InvalidMedia):
            await fleet.encode("a", [item(1)], "bfloat16", 5)
        with pytest.raises(InvalidMedia):
            await fleet.check("a")
        encoder.failure = None
        await fleet.check("a")
        assert not handle.checked


async def test_replicas_may_be_asked_for_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve scrapes a router in a thread, and a channel is closed in the event loop."""
    async with served(monkeypatch) as (_, _, fleet):
        await fleet.encode("a", [item(1)], "bfloat16", 5)
        channel, _ = fleet._connections["a"]
        PUBLISHED[DEPLOYMENT] = {}
        assert await asyncio.to_thread(fleet.replicas) == {}
        assert fleet.reports() == {}
        assert not fleet._connections
        assert channel._closing
        await channel._closing


async def test_a_replica_that_is_gone_is_unreachable() -> None:
    with pytest.raises(ReplicaUnreachable, match="gone"):
        await ServeFleet([Handle()], None).encode("z", [item(1)], "bfloat16", 5)


@pytest.mark.parametrize(
    ("failures", "asked"),
    [
        ([], 1),
        ([RayTaskError("check_health", "", ValueError("sick"))], 1),
        ([ActorDiedError()] * 3, 4),
        ([ActorDiedError()] * 99, serve_fleet.CONFIRMATIONS),
    ],
    ids=["well", "sick", "well again", "dead"],
)
async def test_serve_is_asked_about_a_replica_that_is_unreachable(
    failures: list[Exception], asked: int
) -> None:
    handle = Handle()
    handle.failures = list(failures)
    fleet = ServeFleet([handle], None)
    for _ in range(2):  # once for all calls that fail meanwhile
        with pytest.raises(ReplicaUnreachable):
            await fleet.encode("a", [item(1)], "bfloat16", 5)
    async with asyncio.timeout(SECONDS):
        while fleet._confirming:
            await asyncio.sleep(0.01)
    assert handle.checked in {asked, 2 * asked if asked == 1 else asked}
    PUBLISHED[DEPLOYMENT] = {}
    fleet.reports()
    await asyncio.sleep(0)
