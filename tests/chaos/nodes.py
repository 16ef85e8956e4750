"""The service on two Ray nodes. Routers and encoders of one node talk over unix sockets, those of
different nodes over TCP."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import ray

from encoder_service.bench.cluster import Cluster
from encoder_service.bench.load import Labels, scrape
from encoder_service.config import ServiceOptions
from tests.chaos.faults import ENCODERS, FAULTS, Recovered
from tests.chaos.sources import Source, from_outside, within_ray
from tests.serve.nodes import Node, nodes
from tests.serve.test_several_nodes import RAY
from tests.serve.three_nodes import ready
from tests.serve.tiny import GRPC_PORT

CPUS = 5
"""Of each node. An encoder takes two of them, so there is always one on each node."""
AWAY_SECONDS = 20.0
"""Time from the loss of a node until it is started again."""
NODE_KILLED = "a node is killed"


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    # A short path, because socket paths have a limit.
    with tempfile.TemporaryDirectory(prefix="es", ignore_cleanup_errors=True) as home:
        Path(home, "tmp").mkdir()
        os.environ.update(RAY, RAY_TMPDIR=home, TMPDIR=f"{home}/tmp")
        ray._raylet.Config.initialize("")  # reads the environment again: Ray has been imported
        with nodes({"num_cpus": CPUS}, {"num_cpus": CPUS}) as found:
            yield TwoNodes(found)


class TwoNodes:
    """Two nodes with the service, and its faults, each of which returns once it is in place."""

    def __init__(self, found: Sequence[Node]) -> None:
        """`found`: the first node, which is never lost, and the second."""
        self.nodes = list(found)
        self.where = Cluster(found[0].http, GRPC_PORT)
        self.named: dict[str, Callable[[], Recovered]] = {
            **{name: partial(fault, self.where) for name, fault in FAULTS.items()},
            NODE_KILLED: self.kill_node,
        }

    def strike(self, name: str) -> Recovered:
        recovered = self.named[name]()
        return lambda: recovered() and self.ready()

    def kill_node(self) -> Recovered:
        """Starts another node in its place after a while."""
        self.nodes[1].signal(signal.SIGKILL)
        time.sleep(AWAY_SECONDS)
        self.nodes[1] = self.nodes[1].again()
        return lambda: True

    def ready(self) -> bool:
        """Whether the ingresses behind both proxies may give work to all encoders."""
        return all(ready(node) == ENCODERS for node in self.nodes)

    def sources(self, options: ServiceOptions) -> list[Source]:
        """Callers by value, by id and by handle."""
        urls = [*(node.http for node in self.nodes), self.where.grpc]
        return [
            *(partial(from_outside, url, reference) for url in urls for reference in (False, True)),
            partial(within_ray, options),
        ]

    def spared(self, name: str, messages: Sequence[str]) -> list[str]:
        """The lost connections to the proxy of the node that was not struck. Only these name their
        proxy."""
        struck = {NODE_KILLED: 1, "the proxy is killed": 0}
        if name not in struck:
            return []
        return [one for one in messages if self.nodes[1 - struck[name]].http in one]


class Traffic:
    """Bytes between routers and encoders. Processes that die between two looks lose some."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bytes: Counter[str] = Counter()
        """By `what` and `node` of docs/operations.md: `remote` went over TCP."""
        self._seen: dict[Labels, float] = {}

    def look(self) -> None:
        with suppress(httpx.HTTPError):  # what was missed counts the next time
            for (name, labels), value in scrape(self.url).items():
                if name == "encoder_router_bytes_total":
                    of = dict(labels)
                    grown = value - self._seen.get(labels, 0)
                    self.bytes[f"{of['what']} {of['node']}"] += int(grown)
                    self._seen[labels] = value

    def remote_share(self, what: str) -> float:
        remote, local = (self.bytes[f"{what} {node}"] for node in ("remote", "local"))
        return remote / max(remote + local, 1)

    def __str__(self) -> str:
        return "; ".join(
            f"{what}: {self.bytes[f'{what} remote'] / 1e6:.1f} MB over TCP "
            f"({100 * self.remote_share(what):.0f} %), "
            f"{self.bytes[f'{what} local'] / 1e6:.1f} MB on their node"
            for what in ("items", "rows")
        )
