"""`make screenshot`: docs/status.png, the status page of the tiny service under load."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.client import Client
from encoder_service.client.items import ServiceError
from encoder_service.config import ServiceOptions, load
from tests.chromium import chromium
from tests.images import jpeg

ROOT = Path(__file__).parents[1]
CLIENTS = 8
SIDES = (64, 96, 128, 192, 256, 384, 512, 768)
LOOKS = 40
"""Points in the plots, two seconds apart, before the screenshot is taken."""


def main() -> int:
    options = load(ROOT / "configs" / "tiny.yaml")
    cached = options.model_dump() | {"cache": {"max_bytes": 2**20}}
    options = ServiceOptions.model_validate(cached)
    over = threading.Event()
    with (
        cluster(logical_cpus(options), object_store_bytes=400_000_000) as where,
        service(options, where),
    ):
        load_it = [
            threading.Thread(target=client, args=(where.http, seed, over))
            for seed in range(CLIENTS)
        ]
        for thread in load_it:
            thread.start()
        try:
            take(where.http, sys.argv[1:] or ["light"])
        finally:
            over.set()
            for thread in load_it:
                thread.join()
    return 0


def client(url: str, seed: int, over: threading.Event) -> None:
    """Sends one to four photographs at a time until `over` is set."""
    chance = random.Random(seed)
    pictures = [jpeg(chance.choice(SIDES), chance.choice(SIDES)) for _ in range(300)]
    with Client(url) as encoder:
        while not over.is_set():
            images = chance.choices(pictures, k=chance.randint(1, 4))
            if chance.random() < 0.002:
                images = [images[0][: len(images[0]) // 2]]
            try:
                encoder.encode(images)
            except ServiceError:
                over.wait(1)
            over.wait(chance.expovariate(4))


def take(url: str, schemes: list[str]) -> None:
    """One screenshot per color scheme; the first is docs/status.png."""
    with chromium(1200, 1180) as window:
        window.open(url)
        window.until(f"typeof looks !== 'undefined' && looks.length >= {LOOKS}", 600)
        for index, scheme in enumerate(schemes):
            window.scheme(scheme)
            name = f"status-{scheme}.png" if index else "status.png"
            (ROOT / "docs" / name).write_bytes(window.screenshot())


if __name__ == "__main__":
    sys.exit(main())
