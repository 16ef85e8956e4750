"""The engine: waiting items -> pack -> replay -> readback -> each item's future.

One thread owns the device. It launches the next pack while the previous one is still being read
back (not with a pace), waits only when there is nothing to launch, and never waits for a pack to
fill. Knows no Ray.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from actors.engine.budgets import Capacity
from actors.engine.device import Device, start_readback
from actors.engine.graphs import EXACT, SKIPPED, GraphSet
from actors.engine.packing import Packing, oldest_first, smallest_first
from actors.engine.traffic import ItemTokens
from actors.engine.video_chunks import cut, joined
from actors.errors import EncodeFailed, Unavailable
from actors.kernels.gemm.fp8 import Fp8Rows
from actors.models.tower import Tower
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Cost, Item, Pack

log = logging.getLogger("ray.serve")

MOST_LAUNCHED = 2
"""Packs on the device at a time: one is computed, one is read back. With a pace only one, because
launching takes as long as computing, and rows that stay on the device need no readback."""

Labels = Sequence[str | None]
"""The graph that serves each path of a pack. None: it runs eagerly. SKIPPED: it has no tokens."""


@dataclass(slots=True)
class WaitingItem:
    """An item in the queue, and its future, which is completed exactly once."""

    item: Item
    answer: Future[Item] = field(default_factory=Future)
    since: float = field(default_factory=monotonic)
    alone: bool = False  # a pack with this item failed: it is retried by itself


@dataclass(frozen=True, slots=True)
class LaunchedPack:
    waiting: Sequence[WaitingItem]
    pack: Pack
    labels: Labels
    readback: Callable[[], list[Tensor | Fp8Rows]]
    started: float


class Engine:
    """Packs, launches and reads back. `submit` may be called from any thread."""

    def __init__(
        self,
        tower: Tower,
        graphs: Mapping[str, GraphSet],
        capacity: Capacity,
        device: Device,
        metrics: EncoderMetrics,
        packing: Packing = smallest_first,
        cost: Cost | None = None,
    ) -> None:
        """`cost`: as measured on this device. None: not measured."""
        self.tower = tower
        self.graphs = graphs
        self.capacity = capacity
        self.device = device
        self.metrics = metrics
        self.packing = packing
        self.cost = cost
        self.item_tokens = ItemTokens()
        self._waiting: deque[WaitingItem] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._launched: deque[LaunchedPack] = deque()
        self._most_launched = 1 if device.pace else MOST_LAUNCHED
        self._progress = monotonic()  # when a pack last completed or failed
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> Future[Item]:
        """Queues an item. The future completes with the same item, once its `rows` (see
        video_chunks.rows_of), `source`, `queue_seconds` and `encode_seconds` are filled in. With a
        pace, rows that stay on the device are complete for the next step of the language model, and
        so for work on its stream after that.

        Cancelling the future drops the item if it has not been launched yet. A video that is longer
        than a pack is queued chunk by chunk. Raises Unavailable once closed.
        """
        answers = self.submit_together(cut(item, self.capacity, sound=bool(self.tower.spec.audio)))
        if len(answers) == 1:
            return answers[0]
        self.metrics.video_runs.inc(len(answers))
        return joined(item, answers)

    def submit_together(self, items: Sequence[Item]) -> list[Future[Item]]:
        """Queues items at once, so that the next pack can have all of them. Each must fit a pack.
        Raises Unavailable."""
        waiting = [WaitingItem(item) for item in items]
        with self._changed:
            if self._closed:
                raise Unavailable("this encoder is stopping: try again")
            self._waiting.extend(waiting)
            self._changed.notify_all()
        return [one.answer for one in waiting]

    def stalled_seconds(self) -> float:
        """How long there has been work but no pack has completed, as when the device hangs."""
        with self._changed:
            since = [waiting.since for waiting in list(self._waiting)[:1]]
            since += [launched.started for launched in list(self._launched)]
            return monotonic() - max(self._progress, min(since)) if since else 0.0

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Encodes what is waiting, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # a bug: fail all items, so that nobody waits for ever
            log.critical("the engine's thread ended", exc_info=error)
            with self._changed:
                self._closed = True
                left = [*self._waiting, *(one for each in self._launched for one in each.waiting)]
                self._waiting.clear()
            for waiting in left:
                with suppress(InvalidStateError):  # completed or cancelled
                    waiting.answer.set_exception(
                        Unavailable(f"the encoder failed and cannot continue: {error}")
                    )

    def _step(self) -> bool:
        """Launches a pack if items wait, and completes one that is due. False: closed, and nothing
        is left to do."""
        taken = self._take(wait=not self._launched)
        if taken:
            self._launch(*taken)
        if self._launched and (len(self._launched) == self._most_launched or not taken):
            self._complete(self._launched[0])
            self._launched.popleft()
        return bool(taken or self._launched or self._waiting or not self._closed)

    def _take(self, *, wait: bool) -> tuple[list[WaitingItem], Pack] | None:
        """Forms the pack with the item that has waited longest. None: nothing waits."""
        with self._changed:
            while not self._waiting and wait and not self._closed:
                self._changed.wait()
            waiting = [one for one in self._waiting if not one.answer.cancelled()]
            if not waiting:
                self._waiting.clear()
                return None
            together = waiting[:1] if waiting[0].alone else waiting
            pack = oldest_first([one.item.plan for one in together], self.capacity, self.packing)
            chosen = set(pack.items)
            self._waiting = deque(one for i, one in enumerate(waiting) if i not in chosen)
        # From here on an item cannot be cancelled; one that just was is left out of the pack.
        taken = [waiting[i] for i in pack.items]
        taken = [one for one in taken if one.alone or one.answer.set_running_or_notify_cancel()]
        return (taken, pack) if taken else None

    def _launch(self, waiting: Sequence[WaitingItem], pack: Pack) -> None:
        started = monotonic()
        items = [one.item for one in waiting]
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
                    stays = [item.on_device for item in items]
                    in_fp8 = [item.in_fp8 for item in items]
                    readback = start_readback(self.device, packed, tokens, stays, in_fp8)
        except Exception as error:
            self._failed(waiting, error)
            return
        self._launched.append(LaunchedPack(waiting, pack, labels, readback, started))

    def _complete(self, launched: LaunchedPack) -> None:
        try:
            rows = launched.readback()
        except Exception as error:
            self._failed(launched.waiting, error)
            return
        before, self._progress = self._progress, monotonic()
        # Packs complete in launch order; time in which two of them overlap counts once.
        self.metrics.busy_seconds.inc(self._progress - max(before, launched.started))
        seconds = self._progress - launched.started
        self._count(launched)
        self.metrics.encode_seconds.observe(seconds)
        for waiting, item_rows in zip(launched.waiting, rows, strict=True):
            item = waiting.item
            item.rows = item_rows
            item.source = "eager" if None in launched.labels else "graph"
            item.queue_seconds = launched.started - waiting.since
            item.encode_seconds = seconds
            self.metrics.queue_seconds.observe(item.queue_seconds)
            waiting.answer.set_result(item)

    def _failed(self, waiting: Sequence[WaitingItem], error: Exception) -> None:
        """Retries each item by itself, so that one bad item does not fail the others."""
        self._progress = monotonic()
        if not self.device.alive():
            log.critical(
                "the device is lost (%s): exiting, so that this process is replaced", error
            )
            os._exit(70)
        log.error("a pack of %d items failed: %s", len(waiting), error, exc_info=error)
        for one in waiting:
            if one.alone:
                grid = one.item.plan.grid_thw
                one.answer.set_exception(
                    EncodeFailed(f"the encoder failed on an item of grid {grid}: {error}")
                )
        retried = [one for one in waiting if not one.alone]
        for one in retried:
            one.alone = True
        with self._changed:
            self._waiting.extendleft(reversed(retried))

    def _count(self, launched: LaunchedPack) -> None:
        metrics, plans = self.metrics, [one.item.plan for one in launched.waiting]
        metrics.pack_items.observe(len(plans))
        metrics.patches.inc(sum(plan.patches for plan in plans))
        vector = self.tower.spec.vector
        metrics.tokens.inc(sum(sum(plan.path_tokens) if vector else plan.tokens for plan in plans))
        metrics.pack_outcomes.labels(outcome(launched.labels)).inc()
        for plan in plans:
            self.item_tokens.add(plan.path_tokens)
            metrics.item_tokens.observe(sum(plan.path_tokens))
        for index, (path, budget, label) in enumerate(
            zip(self.tower.spec.paths, launched.pack.budgets, launched.labels, strict=True)
        ):
            tokens = [plan.path_tokens[index] for plan in plans]
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
    """How each path ran, in the model's order, such as graph/skip or eager/graph."""
    words = {None: "eager", SKIPPED: SKIPPED}
    return "/".join(words.get(label, "graph") for label in labels)
