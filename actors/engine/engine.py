"""The pipeline: waiting items -> pack -> replay -> rows that landed -> the future of each item.

One thread owns the device. It launches the next pack while the last is still on its way back, waits
only when there is nothing to launch, and never waits for a pack to fill. Knows nothing of Ray.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import torch

from actors.engine.budgets import Capacity
from actors.engine.device import Device
from actors.engine.encoded import Encoded, joined
from actors.engine.exact import EXACT
from actors.engine.graphs import SKIPPED, GraphSet
from actors.engine.packing import Packing, oldest_first, smallest_first
from actors.engine.readback import Landing, land
from actors.engine.video_chunks import cut
from actors.errors import EncodeFailed, Unavailable
from actors.models.tower import Tower
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Pack, Source

log = logging.getLogger("ray.serve")

FLIGHTS = 2
"""Packs on the device at a time: one computes, one is on its way back."""


Labels = Sequence[str | None]
"""The graph that serves each path of a pack; None: it runs eagerly; SKIPPED: nothing to run."""


@dataclass(slots=True)
class Ticket:
    """An item that waits, and the future that is answered exactly once."""

    item: Item
    answer: Future[Encoded] = field(default_factory=Future)
    since: float = field(default_factory=monotonic)
    on_device: bool = False
    """Its rows stay there."""
    alone: bool = False
    """A pack with this item failed: it is tried again by itself."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A pack that has been launched."""

    tickets: Sequence[Ticket]
    pack: Pack
    labels: Labels
    landing: Landing
    started: float


class Engine:
    """Packs, launches and lands. `submit` may be called from any thread."""

    def __init__(
        self,
        tower: Tower,
        graphs: Mapping[str, GraphSet],
        capacity: Capacity,
        device: Device,
        metrics: EncoderMetrics,
        packing: Packing = smallest_first,
    ) -> None:
        self.tower = tower
        self.graphs = graphs
        self.capacity = capacity
        self.device = device
        self.metrics = metrics
        self.packing = packing
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._flights: deque[Flight] = deque()
        self._landed = monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> Future[Item]:
        answer = self._submit(item, on_device=item.on_device)
        whole: Future[Item] = Future()

        def done(one: Future[Encoded]) -> None:
            if one.cancelled() or not whole.set_running_or_notify_cancel():
                return
            if error := one.exception():
                whole.set_exception(error)
                return
            made = one.result()
            item.rows, item.source = made.rows, made.source
            item.queue_seconds, item.encode_seconds = made.queue_seconds, made.encode_seconds
            whole.set_result(item)

        whole.add_done_callback(lambda w: answer.cancel() if w.cancelled() else None)
        answer.add_done_callback(done)
        return whole

    def _submit(self, item: Item, *, on_device: bool = False) -> Future[Encoded]:
        """Queues an item. Cancelling the future drops the item if it has not been launched yet.

        A video beyond what a pack holds is queued run by run, and answered as one. `on_device`: its
        rows are not brought to the host.
        """
        tickets = [Ticket(run, on_device=on_device) for run in cut(item, self.capacity)]
        with self._changed:
            if self._closed:
                raise Unavailable("this encoder is stopping: try again")
            self._waiting.extend(tickets)
            self._changed.notify()
        if len(tickets) == 1:
            return tickets[0].answer
        self.metrics.video_runs.inc(len(tickets))
        return joined([ticket.answer for ticket in tickets])

    def stalled_seconds(self) -> float:
        """How long nothing has landed although something should: a device that hangs shows here.

        A long queue that moves is no stall.
        """
        with self._changed:
            since = [ticket.since for ticket in list(self._waiting)[:1]]
            since += [flight.started for flight in list(self._flights)]
            return monotonic() - max(self._landed, min(since)) if since else 0.0

    def alive(self) -> bool:
        """Whether the thread that answers still runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Answers what is waiting, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # a bug of ours: nobody may wait for ever because of it
            log.critical("the engine's thread ended", exc_info=error)
            with self._changed:
                self._closed = True
                left = [*self._waiting, *(t for f in self._flights for t in f.tickets)]
            for ticket in left:
                with suppress(InvalidStateError):  # answered or cancelled
                    ticket.answer.set_exception(Unavailable(f"the encoder broke down: {error}"))

    def _step(self) -> bool:
        """Launches what waits, lands what is due. False: closed, and everything is answered."""
        taken = self._take(wait=not self._flights)
        if taken:
            self._launch(*taken)
        if self._flights and (len(self._flights) == FLIGHTS or not taken):
            self._land(self._flights[0])
            self._flights.popleft()
        return bool(taken or self._flights or self._waiting or not self._closed)

    def _take(self, *, wait: bool) -> tuple[list[Ticket], Pack] | None:
        """The pack of the item that has waited longest. None: nothing waits."""
        with self._changed:
            while not self._waiting and wait and not self._closed:
                self._changed.wait()
            waiting = [t for t in self._waiting if not t.answer.cancelled()]
            if not waiting:
                self._waiting.clear()
                return None
            together = waiting[:1] if waiting[0].alone else waiting
            pack = oldest_first([t.item.plan for t in together], self.capacity, self.packing)
            chosen = set(pack.items)
            self._waiting = deque(t for i, t in enumerate(waiting) if i not in chosen)
        # From here on an item can no longer be cancelled; one that just was leaves its place empty.
        taken = [waiting[i] for i in pack.items]
        taken = [t for t in taken if t.alone or t.answer.set_running_or_notify_cancel()]
        return (taken, pack) if taken else None

    def _launch(self, tickets: Sequence[Ticket], pack: Pack) -> None:
        started = monotonic()
        items = [ticket.item for ticket in tickets]
        plans = [item.plan for item in items]
        graphs = [self.graphs[path] for path in self.tower.spec.paths]
        try:
            with torch.inference_mode():
                paths = list(zip(graphs, pack.budgets, strict=True))
                labels = [path.label(budget, plans) for path, budget in paths]
                self.device.fork()
                outputs = [path.run(budget, items) for path, budget in paths]
                self.device.join()
                with self.device.running():
                    packed = self.tower.postprocess(outputs, plans)
                    tokens = [plan.tokens for plan in plans]
                    stays = [ticket.on_device for ticket in tickets]
                    landing = land(self.device, packed, tokens, stays)
        except Exception as error:
            self._failed(tickets, error)
            return
        self._flights.append(Flight(tickets, pack, labels, landing, started))

    def _land(self, flight: Flight) -> None:
        try:
            rows = flight.landing.wait()
        except Exception as error:
            self._failed(flight.tickets, error)
            return
        before, self._landed = self._landed, monotonic()
        # Packs land in the order of their launches: what two of them share counts once.
        self.metrics.busy_seconds.inc(self._landed - max(before, flight.started))
        seconds = self._landed - flight.started
        self._count(flight)
        self.metrics.encode_seconds.observe(seconds)
        source: Source = "eager" if None in flight.labels else "graph"
        for ticket, landed in zip(flight.tickets, rows, strict=True):
            waited = flight.started - ticket.since
            self.metrics.queue_seconds.observe(waited)
            ticket.answer.set_result(Encoded((landed,), source, waited, seconds))

    def _failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """One bad item must not harm the others: each is tried again by itself."""
        self._landed = monotonic()
        if not self.device.alive():
            log.critical("the device is lost (%s): ending this process to be replaced", error)
            os._exit(70)
        log.error("a pack of %d items failed: %s", len(tickets), error, exc_info=error)
        for ticket in tickets:
            if ticket.alone:
                grid = ticket.item.plan.grid_thw
                ticket.answer.set_exception(
                    EncodeFailed(f"the encoder failed on an item of grid {grid}: {error}")
                )
        retried = [t for t in tickets if not t.alone]
        for ticket in retried:
            ticket.alone = True
        with self._changed:
            self._waiting.extendleft(reversed(retried))

    def _count(self, flight: Flight) -> None:
        metrics, tickets = self.metrics, flight.tickets
        metrics.pack_items.observe(len(tickets))
        metrics.patches.inc(sum(t.item.plan.patches for t in tickets))
        metrics.tokens.inc(sum(t.item.plan.tokens for t in tickets))
        metrics.pack_outcomes.labels(outcome(flight.labels)).inc()
        for index, (path, budget, label) in enumerate(
            zip(self.tower.spec.paths, flight.pack.budgets, flight.labels, strict=True)
        ):
            tokens = [t.item.plan.path_tokens[index] for t in tickets]
            if not any(tokens):
                continue
            served = sum(map(bool, tokens))
            if label is None:
                captured = self.capacity.budgets[index]
                reason = "beyond_budgets" if captured else "off"
                if budget is not None:
                    reason = "first_sight"
                metrics.graph_misses.labels(path, reason).inc(served)
                continue
            metrics.graph_hits.labels(path, label, self.device.backend).inc(served)
            metrics.captured_graphs.labels(path).set(self.graphs[path].captured())
            if budget is not None and label != EXACT:
                metrics.padded_tokens.labels(path).inc(budget - sum(tokens))


def outcome(labels: Labels) -> str:
    """What ran on each path, in the model's order, such as graph/skip or eager/graph."""
    words = {None: "eager", SKIPPED: SKIPPED}
    return "/".join(words.get(label, "graph") for label in labels)
