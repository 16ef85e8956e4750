"""A private Ray cluster on this machine with Serve on free ports, for the duration of a block."""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex

from actors.errors import StartError
from encoder_service.config import ServiceOptions, resources

APPLICATION = "encoder"
MOST_CONNECTIONS, OTHER_FILES = 4096, 2500
"""HAProxy as Serve starts it: connections, which take two open files each, and other open files."""
PORTS = range(20_000, 30_000)
"""Above the ports of Ray's workers, below those that Linux gives to outgoing connections, so that a
free port stays free until Serve listens there."""
SPARE_CPUS = 4
"""For Serve's own actors and other processes next to the service."""


@dataclass(frozen=True, slots=True)
class Cluster:
    http: str
    grpc_port: int
    """Where the ingresses of `service` listen."""

    @property
    def grpc(self) -> str:
        return f"grpc://127.0.0.1:{self.grpc_port}"


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on. Raises StartError."""
    found = []
    with ExitStack() as stack:
        for port in random.sample(PORTS, len(PORTS)):
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise StartError(f"{count} of the ports {PORTS.start} to {PORTS.stop - 1} are not free")


def logical_cpus(options: ServiceOptions) -> int:
    """The CPUs to declare to Ray so that all replicas can be placed."""
    asked = resources(options, most=True)["CPU"]
    return max(os.cpu_count() or 1, round(asked + 0.5) + SPARE_CPUS)


@contextmanager
def cluster(num_cpus: int, object_store_bytes: int | None = None) -> Iterator[Cluster]:
    """Starts the cluster, yields its addresses, and stops it with everything that runs on it."""
    # Anyone who can call Ray's own ports can run code here, so they must be protected by a token.
    # `ray.init` asks for one unless it is told not to. This token leaves no file in $HOME.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    home = tempfile.mkdtemp(prefix="es")  # short: the paths of sockets have a limit
    umask = os.umask(0o077)  # of Ray's processes too
    os.environ.update(ha_proxy(home, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    # Behind HAProxy, a deleted replica otherwise drains for half a minute.
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    import ray  # reads its environment when it is imported
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    http_port, grpc_port = free_ports(2)
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            _temp_dir=f"{home}/ray",  # which Ray makes writable for all: `home` protects it
            log_to_driver=False,
            logging_level="WARNING",
            namespace="serve",
        )
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": http_port},
        )
        yield Cluster(f"http://127.0.0.1:{http_port}", grpc_port)
        serve.shutdown()
    finally:
        ray.shutdown()
        os.umask(umask)
        shutil.rmtree(home, ignore_errors=True)


def ha_proxy(home: str, most_files: int) -> dict[str, str]:
    """Returns the environment with which HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1) starts on any
    machine.

    Serve waits forever if one of HAProxy's ports is taken, or if HAProxy may open too few files for
    its connections. By default, all clusters of a machine share HAProxy's files. `most_files`: the
    hard limit of open files.
    """
    metrics_port, stats_port = free_ports(2)
    found = {
        "METRICS_PORT": str(metrics_port),
        "STATS_PORT": str(stats_port),
        "CONFIG_FILE_LOC": f"{home}/haproxy/haproxy.cfg",
        "SOCKET_PATH": f"{home}/haproxy/admin.sock",
        "METRICS_SOCKET_PATH": f"{home}/haproxy/metrics.sock",
        "SERVER_STATE_BASE": f"{home}/haproxy",
        "SERVER_STATE_FILE": f"{home}/haproxy/server-state",
    }
    if 0 <= most_files < 2 * MOST_CONNECTIONS + OTHER_FILES:  # -1: no limit
        found["MAXCONN"] = str(max(100, (most_files - OTHER_FILES) // 2))
    return {f"RAY_SERVE_HAPROXY_{name}": value for name, value in found.items()}


@contextmanager
def service(options: ServiceOptions, where: Cluster) -> Iterator[None]:
    """The whole service of a configuration at `/`, ready to encode."""
    from ray import serve

    from encoder_service.app import build

    ingress = options.ingress.model_copy(update={"grpc_port": where.grpc_port})
    args = options.model_copy(update={"ingress": ingress}).model_dump(exclude_unset=True)
    try:
        serve.run(build(args), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:  # names the deployment that failed, not why
        found = serve.status().applications[APPLICATION].deployments.values()
        why = "\n".join(each.message for each in found if each.message)
        raise StartError(f"{error}\n{why}") from None
    try:
        yield
    finally:
        serve.delete(APPLICATION)
