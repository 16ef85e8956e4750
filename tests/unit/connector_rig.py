"""For tests of the EC connector: encoders that keep rows, and the steps of a stand-in for vLLM."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from actors.rows.memory import BlockMemory
from actors.rows.protocol import RowsPlace
from actors.rows.server import RowsServer
from actors.store.kept import Kept
from actors.types import Answer, Dtype, Media
from actors.types import Embedding as Encoded
from encoder_service.api.http import build
from encoder_service.client import Client, Embedding
from router.replicas.serve_fleet import unknown
from tests.images import jpeg
from tests.unit.front_door import service
from tests.unit.proxied import Distinct, in_a_thread
from tests.unit.rows.kept import Dictionary, serving
from tests.unit.vllm_half import Request


class Keeping(Distinct):
    """Keeps what it is asked to, as a replica does."""

    def __init__(self, memory: BlockMemory | None = None) -> None:
        super().__init__()
        self.store = Dictionary(memory, deepstack=2)
        self.kept: dict[str, Kept] = {}
        self.at = RowsPlace("", "")

    async def place(self, reference: str) -> RowsPlace:
        return self.at

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **options: Any
    ) -> list[Answer]:
        answers = await super().encode(media, dtype, timeout_seconds)
        for position, (one, answer) in enumerate(zip(media, answers, strict=True)):
            if options["reference"] and isinstance(answer, Encoded):
                assert isinstance(answer.data, np.ndarray)
                rows = torch.from_numpy(answer.data.copy()).view(torch.bfloat16)
                name = f"replica.{self.store.keep(rows.view(answer.shape))}"
                self.kept[name] = Kept(one, answer)
                answers[position] = replace(answer, reference=name)
        return answers

    async def fetch(self, reference: str) -> Kept:
        if reference not in self.kept:
            raise unknown(reference)
        return self.kept[reference]

    async def release(self, reference: str) -> None:
        del self.kept[reference]
        del self.store.tensors[reference.partition(".")[2]]


class Encoders:
    """The service, with a replica whose rows server can be reached."""

    def __init__(self, folder: Path) -> None:
        self.memory = BlockMemory.shared(2**20)
        self.fleet = Keeping(self.memory)
        self.store = self.fleet.store
        self.folder = folder
        self.stack = ExitStack()
        self.server: RowsServer | None = None
        self.begin("rows")
        app = service(self.fleet)
        self.url = self.stack.enter_context(in_a_thread(build(app)))

    def begin(self, name: str) -> None:
        """Starts the replica's rows server, again if it has died."""
        (self.folder / name).mkdir()
        served = serving(self.store, self.folder / name)
        self.server, self.fleet.at = self.stack.enter_context(served)


Halves = Callable[..., tuple[Any, Any]]


def ended(scheduler: Any, request: Request, computed: int = 0) -> bool:
    """Whether all is there, once it is decided: False, and the request has failed."""
    end = time.monotonic() + 60
    while not scheduler.ensure_cache_available(request, computed):
        if scheduler.failed:
            return False
        assert time.monotonic() < end
        time.sleep(0.001)
    return True


def step(
    scheduler: Any,
    *workers: Any,
    cache: dict[str, torch.Tensor] | None = None,
    evicted: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """What the workers have in their encoder caches, which are all the same."""
    output = SimpleNamespace(free_encoder_mm_hashes=evicted)
    metadata = pickle.loads(pickle.dumps(scheduler.build_connector_meta(output)))
    caches = [{} if cache is None else cache for _ in workers]
    for worker, each in zip(workers, caches, strict=True):
        worker.bind_connector_metadata(metadata)
        worker.start_load_caches(each)
        assert each.keys() == caches[0].keys()
        assert all(torch.equal(bits(each[name]), bits(caches[0][name])) for name in each)
    return caches[0]


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)


def keep(url: str, count: int = 1) -> tuple[list[Embedding], list[torch.Tensor]]:
    """References, and the rows that they stand for."""
    files = [jpeg(64, 64), jpeg(64, 64, "chelsea.png")][:count]
    with Client(url) as client:
        return client.encode(files, reference=True), [one.torch() for one in client.encode(files)]
