"""Parses the responses of POST /v1/encode in every format, as a client in any language would."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.torch import load

from encoder_service.wire.formats import JSON, MSGPACK, NPZ


def parse_response(body: bytes, content_type: str) -> dict[str, Any]:
    """The document of a response, with every item's "data" and "scales" as bytes."""
    document: dict[str, Any]
    if content_type == MSGPACK:
        document = msgpack.unpackb(body)
        return document
    if content_type == JSON:
        document = json.loads(body)
        for item in document["items"]:
            if "data" in item:
                item["data"] = memory(item)
            if "scales" in item:
                item["scales"] = base64.b64decode(item["scales"], validate=True)
        return document
    if content_type == NPZ:
        with np.load(BytesIO(body)) as file:
            document = json.loads(file["answer.json"])
            for item in document["items"]:
                if str(item["index"]) in file:
                    item["data"] = file[str(item["index"])].tobytes()
        return document
    tensors = load(body)
    document = json.loads(metadata(body)["answer"])
    for item in document["items"]:
        for name, key in (("data", str(item["index"])), ("scales", f"{item['index']}.scales")):
            if key in tensors:
                item[name] = octets(tensors[key])
    return document


def memory(item: dict[str, Any]) -> bytes:
    if isinstance(item["data"], str):
        return base64.b64decode(item["data"], validate=True)
    return octets(torch.tensor(item["data"], dtype=getattr(torch, item["dtype"])))


def octets(rows: torch.Tensor) -> bytes:
    return rows.view(torch.uint8).numpy().tobytes()


def metadata(body: bytes) -> dict[str, str]:
    length = int.from_bytes(body[:8], "little")
    found: dict[str, str] = json.loads(body[8 : 8 + length])["__metadata__"]
    return found
