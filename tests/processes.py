"""Processes of a private cluster: ids, CPU time and cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import ray


def actors() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in named if each["name"].startswith("SERVE_"))


def process(name: str) -> int:
    actor = ray.get_actor(name, namespace="serve")
    number: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return number


def ours() -> list[int]:
    """Ids of this process and all its descendants: Ray, Serve, HAProxy."""
    return family(os.getpid())


def family(ancestor: int) -> list[int]:
    """Ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for number in numbers(Path("/proc")):
        with suppress(OSError):  # it has exited
            children.setdefault(int(status(number)[1]), []).append(number)
    found = [ancestor]
    for number in found:  # `found` grows meanwhile
        found += children.get(number, [])
    return found


class Clocks:
    """CPU seconds of processes so far; those of exited processes as last seen."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def look(self, processes: Iterable[int]) -> dict[int, float]:
        """CPU seconds of these processes and of all earlier ones, by process id."""
        for number in processes:
            with suppress(OSError):
                user, system = status(number)[11:13]
                self.seconds[number] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return dict(self.seconds)


def command(number: int) -> str:
    """The name of a process. Raises OSError if it has exited."""
    return Path(f"/proc/{number}/comm").read_text().strip()


def run_apart(some: Iterable[int], processes: Iterable[int]) -> None:
    """Pins `some` of the processes to one half of the cores and the others to the other half."""
    chosen = set(some)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    for number in processes:
        allowed = cores[:half] if number in chosen else cores[half:]
        for thread in numbers(Path(f"/proc/{number}/task")):
            with suppress(OSError):  # it has exited
                os.sched_setaffinity(thread, allowed)


def numbers(folder: Path) -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir(folder) if name.isdigit())


def status(number: int) -> list[str]:
    """Fields of /proc/N/stat after the name: state, parent, ... Raises OSError if it has exited."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
