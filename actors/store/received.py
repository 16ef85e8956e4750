"""Rows that go from device to device, by Ray Direct Transport over NIXL: the consumer's side.

A consumer is an actor of Ray with torch. NIXL's agent is not safe in several threads, so that one
thread of the process reads, one item after the other.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayDirectTransportError
from ray.experimental import set_target_for_ref
from torch import Tensor

from actors.errors import EmbeddingLost
from actors.store.nixl import check_transport, total
from actors.types import Bytes, Embedding, ReceivedBytes, RemoteBytes, SharedBytes

READ_SECONDS = 5
"""For one item. What takes longer is lost."""
THREAD = ThreadPoolExecutor(1, "nixl")
"""Of the process."""


class Receiver:
    """Has rows on a device of this process, wherever they were."""

    def __init__(self, device: str) -> None:
        """Raises ConfigError where there is no NIXL."""
        check_transport("nixl")
        self.device = torch.device(device)

    async def here(self, embedding: Embedding) -> Embedding:
        """The same with its data in this process: on the device if it was on one, else as an array.

        Raises EmbeddingLost.
        """
        data = embedding.data
        if not isinstance(data, SharedBytes):
            return embedding
        read = asyncio.get_running_loop().run_in_executor(THREAD, self._read, data)
        return replace(embedding, data=await read)

    def _read(self, data: SharedBytes) -> Bytes | ReceivedBytes:
        reference: Any = data.object_ref
        try:
            found: list[Bytes | RemoteBytes] = ray.get(reference, timeout=READ_SECONDS)
            one = found[data.place]
            return one if not isinstance(one, RemoteBytes) else ReceivedBytes(self._fetch(one))
        except (ObjectLostError, RayDirectTransportError, GetTimeoutError) as error:
            raise EmbeddingLost(
                "the replica that encoded the item ended, or cannot be reached, before its "
                "embedding was read; try again"
            ) from error

    def _fetch(self, remote: RemoteBytes) -> Tensor:
        rows = torch.empty(remote.size_bytes, dtype=torch.uint8, device=self.device)
        if rows.is_cuda:
            # NIXL waits for no stream: whatever used this memory before must be through with it.
            torch.cuda.current_stream(rows.device).synchronize()
        reference: Any = remote.object_ref
        try:
            set_target_for_ref(reference, [rows])
            ray.get(reference, timeout=READ_SECONDS)
        finally:
            forget(reference)
        if total(rows) != remote.total:
            raise EmbeddingLost("the embedding's memory was given to others before it was read")
        return rows


def forget(reference: Any) -> None:
    """What Ray keeps of a direct transport object in a process that borrowed it, and never lets go
    (ray-project/ray#57962): about a kilobyte each. Not in the process that owns it."""
    manager = ray._private.worker.global_worker.rdt_manager
    with manager._lock:
        manager._managed_rdt_metadata.pop(reference.hex(), None)
