"""A service without Ray, and SGLang's protocol before it, for tests in SGLang's environment.

    python -m tests.engines.encoder CHECKPOINT PORT

Encodes on the CPU. Writes the service's own URL to CHECKPOINT/url.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from actors.families import registry
from actors.options import ModelOptions
from encoder_service.api.http import build
from encoder_service.client import AsyncClient
from encoder_service.config import LimitOptions, ServiceOptions
from encoder_service.engines.sglang_encoder import SglangEncoder
from encoder_service.service import Service
from tests.unit.api.test_plan import Encoding
from tests.unit.proxied import listening


async def serve(checkpoint: Path, port: int) -> None:
    model = ModelOptions(id=str(checkpoint))
    service = Service(ServiceOptions(model=model), registry.read(model), Encoding(model))
    async with listening(build(service)) as url:
        (checkpoint / "url").write_text(url)
        app = SglangEncoder(AsyncClient(url), LimitOptions()).app()
        await uvicorn.Server(uvicorn.Config(app, port=port)).serve()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
