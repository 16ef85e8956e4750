"""`make soak-nodes`: two Ray nodes under light load for hours. Once a minute, something is killed.

Exits with 1 if an answer is wrong or missing, if a request fails that its fault does not excuse, or
if memory, open files, processes, objects or files in shared memory grow or are left over.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.serve.test_several_nodes import RAY

os.environ.update(RAY)  # before Ray is imported

from ray import serve
from rich.console import Console
from rich.table import Table

from actors.media import decode_worker
from encoder_service.app import build
from encoder_service.client import Client
from encoder_service.config import parse
from tests.chaos import __main__ as chaos
from tests.chaos.callers import Callers, Phase, known_files
from tests.chaos.faults import ENCODERS, Recovered
from tests.chaos.nodes import NODE_KILLED, TwoNodes
from tests.processes import Clocks, command, family, status
from tests.serve.nodes import Node, nodes
from tests.serve.object_store import used
from tests.serve.three_nodes import IMAGES, options
from tests.soak_service import MOST_GROWTH, growth, private_bytes
from tests.waiting import within

MINUTE = 60.0
BEFORE_SECONDS = 10.0
"""Load before each fault."""
PAUSE_SECONDS = 2.0
"""Pause between two requests of a caller."""
SAMPLE_SECONDS = 10.0
OLD_SECONDS = 1200.0
"""Minimum age of a process whose growth counts, because it warms up in its first minutes."""
MOST_FILES = 10
"""How many more open files a process may have."""
SOCKETS = 2 * ENCODERS
"""Directories of killed encoders stay for a minute, and until another encoder starts."""
OURS = {"Encoder", "Ingress", "Router", "decoder"}
"""Kinds of processes whose growth is judged. Ray's own, and this process, are only shown."""


class Watch(threading.Thread):
    """Samples memory and open files of this process and all its descendants."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.clocks = Clocks()
        self.started = time.monotonic()
        self.points: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        """For each process: seconds, bytes, open files."""
        self.kinds: dict[int, str] = {}
        self.shared: set[str] = set()
        """Files in /dev/shm that a process mapped."""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            numbers = living()
            self.clocks.look(numbers)
            for number in numbers:
                with suppress(OSError, AssertionError):  # it has exited
                    self._look(number)

    def _look(self, number: int) -> None:
        seconds = time.monotonic() - self.started
        point = (seconds, private_bytes(number), len(os.listdir(f"/proc/{number}/fd")))
        self.kinds[number] = kind(number)  # Ray renames its processes after they have started
        self.points[number].append(point)
        for line in Path(f"/proc/{number}/maps").read_text().splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                self.shared.add(line.split(maxsplit=5)[5])

    def stop(self) -> None:
        self.ended.set()
        self.join()

    def cores(self) -> float:
        """Cores in use, on average."""
        return sum(self.clocks.seconds.values()) / (time.monotonic() - self.started)

    def table(self) -> tuple[Table, list[str]]:
        """Returns a row for each kind of process, and those of our processes that grew."""
        shown = Table(title="processes", title_justify="left")
        for name in (
            "kind",
            "number",
            "MiB first / last",
            "most growth, MiB",
            "files first / last",
        ):
            shown.add_column(name, justify="left" if name == "kind" else "right")
        grew = []
        for name in sorted(set(self.kinds.values())):
            found = [self.points[number] for number, each in self.kinds.items() if each == name]
            longest = max(found, key=len)
            old = [one for one in found if one[-1][0] - one[0][0] >= OLD_SECONDS]
            rises = [growth([(seconds, size) for seconds, size, _ in one]) for one in old]
            most = max(rises, key=lambda rise: rise[1], default=None)
            files = [(one[len(one) // 2][2], one[-1][2]) for one in old]
            if name in OURS and (
                any(grown > MOST_GROWTH * level for level, grown in rises)
                or any(last > first + MOST_FILES for first, last in files)
            ):
                grew.append(name)
            shown.add_row(
                name,
                f"{len(found)}, {len(old)} old",
                " / ".join(f"{longest[place][1] / 2**20:.0f}" for place in (0, -1)),
                f"{most[1] / 2**20:+.1f} of {most[0] / 2**20:.0f}" if most else "",
                " / ".join(str(longest[place][2]) for place in (0, -1)),
            )
        return shown, grew


def kind(number: int) -> str:
    """The kind of a process: the title that Ray gives it, or its program."""
    words = Path(f"/proc/{number}/cmdline").read_text().strip("\0").split("\0")
    if number == os.getpid():
        return "callers and driver"
    if decode_worker.__name__ in words:
        return "decoder"
    if title := re.match(r"ray::(?:.*ServeReplica:encoder:)?(\w+)", words[0]):
        return title[1]
    return next(
        (one for one in map(os.path.basename, words) if one.endswith(".py")), command(number)
    )


def living() -> list[int]:
    """This process and all its descendants, without zombies."""
    found = []
    for number in family(os.getpid()):
        with suppress(OSError):  # it has exited
            if status(number)[0] != "Z":
                found.append(number)
    return found


class Faults(TwoNodes):
    """The faults of `make chaos` that are over soon, and one more."""

    def __init__(self, found: Sequence[Node], random: Random) -> None:
        super().__init__(found)
        self.random = random
        chosen = ("an encoder is killed", "an ingress is killed", "the router is killed")
        self.named = {name: self.named[name] for name in (*chosen, NODE_KILLED)}
        self.named["a decoder process is killed"] = self.kill_decoder

    def kill_decoder(self) -> Recovered:
        before = decoders()
        os.kill(self.random.choice(before), signal.SIGKILL)
        return lambda: len(decoders()) == len(before)


def decoders() -> list[int]:
    return [number for number in living() if kind(number) == "decoder"]


def soak(
    folder: Path, faults: Faults, watch: Watch, seconds: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns a row for each kind of fault, as in `make chaos`, and what is left at the end."""
    sections = {"preprocess": {"processes": 1}, "cache": {"max_bytes": 0}}
    made = parse(options(folder).model_dump() | sections)
    serve.run(build(made.model_dump()), name="encoder", route_prefix="/")
    within(120, faults.ready)
    first = faults.where.http
    with Client(first) as client:
        known = known_files(client, IMAGES)
    empty = used().bytes
    callers = Callers(faults.sources(made), known, PAUSE_SECONDS)
    phases: dict[str, list[Phase]] = defaultdict(lambda: [Phase(), Phase(), Phase()])
    recoveries: dict[str, list[float | None]] = defaultdict(list)
    watch.start()
    callers.start()
    start = time.monotonic()
    while (begun := time.monotonic()) + MINUTE <= start + seconds:
        name = faults.random.choice(sorted(faults.named))
        time.sleep(BEFORE_SECONDS)
        parts = [callers.next_phase()]
        struck = time.monotonic()
        recoveries[name].append(chaos.until(faults.strike(name), struck))
        parts.append(callers.next_phase())
        time.sleep(max(BEFORE_SECONDS, begun + MINUTE - time.monotonic()))
        parts.append(callers.next_phase())
        for whole, part in zip(phases[name], parts, strict=True):
            whole.add(part)
        row = chaos.row(name, recoveries[name][-1], *parts)
        shown = [row[key] for key in ("fault", "recovery_seconds", "right", "failed", "wrong")]
        print(f"{begun - start:6.0f} s", *shown, *row["messages"], flush=True)
    left: dict[str, float] = {}
    try:
        callers.stop()
    except RuntimeError:
        left["requests that were never answered"] = 1
    watch.stop()
    left |= {
        "outstanding patches": chaos.rest(lambda: chaos.total(first, chaos.OUTSTANDING)),
        "bytes in row memory": chaos.rest(lambda: chaos.total(first, chaos.ROW_MEMORY)),
        "bytes in the object stores": chaos.rest(lambda: max(0, used().bytes - empty)),
    }
    rows = []
    for name, parts in sorted(phases.items()):
        times = recoveries[name]
        slowest = None if None in times else max(filter(None, times))
        rows.append(chaos.row(name, slowest, *parts))
        rows[-1]["fault"] += f", {len(times)} times"
        rows[-1]["wrong"] += faults.spared(name, rows[-1]["messages"])
    return rows, left


def main() -> int:
    parser = ArgumentParser("soak_nodes")
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults")
    parser.add_argument("--json", type=Path, help="a file for all samples")
    given = parser.parse_args()
    console = Console(width=150)
    watch = Watch()
    # A short path, because socket paths have a limit.
    with tempfile.TemporaryDirectory(prefix="es", ignore_cleanup_errors=True) as home:
        for name in ("ray", "tmp", "model"):
            Path(home, name).mkdir()
        os.environ.update(RAY_TMPDIR=home, TMPDIR=f"{home}/tmp")
        with nodes({"num_cpus": 5}, {"num_cpus": 5}, drains=True) as found:
            faults = Faults(found, Random(given.seed))
            rows, left = soak(Path(home, "model"), faults, watch, given.seconds)
        left["processes"] = chaos.rest(lambda: len(living()) - 1)
        left["socket directories"] = max(0, len(os.listdir(f"{home}/tmp")) - SOCKETS)
    left["files in /dev/shm"] = sum(map(os.path.exists, watch.shared))
    processes, grew = watch.table()
    console.print(processes)
    console.print(chaos.table(rows))
    console.print(f"{sum(sum(one['right']) for one in rows)} requests answered right,", end=" ")
    console.print(f"{watch.cores():.2f} cores; left over: {left}")
    if given.json:
        points = {f"{name} {number}": watch.points[number] for number, name in watch.kinds.items()}
        given.json.write_text(json.dumps({"faults": rows, "processes": points}) + "\n")
    broken = [one["fault"] for one in rows if one["wrong"] or one["broken"]]
    broken += [name for name, amount in left.items() if amount] + [f"{one} grew" for one in grew]
    console.print(f"[red]broken: {', '.join(broken)}" if broken else "every promise held")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
