"""`encoder-service` whose ids vLLM 0.26 takes, because rows of width 1 come with them.

    python -m tests.engines.bench_026 bench answers --url node=http://127.0.0.1:8001 \
        --encoder node=http://127.0.0.1:8000

vLLM then needs the connector of connector_026.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from encoder_service import Embedding, cli
from encoder_service.engines import vllm

content_part = vllm.content_part


def with_rows(embedding: Embedding) -> dict[str, Any]:
    part = content_part(embedding)
    if embedding.reference:
        rows = torch.zeros(embedding.tokens, 1, dtype=torch.bfloat16)
        part["image_embeds"]["image_embeds"] = vllm.saved(rows)
    return part


if __name__ == "__main__":
    vllm.content_part = with_rows
    sys.exit(cli.main())
