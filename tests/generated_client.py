"""`python -m tests.generated_client URL`: generates a client from the OpenAPI document at the URL,
sends an image in JSON and reads its rows.

Runs in an environment of openapi-python-client, without this project: `make openapi-client`.
"""

from __future__ import annotations

import base64
import importlib
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any


def png(side: int) -> bytes:
    """A black square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(side * (side + 1))))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def generated(url: str, folder: Path) -> None:
    tool = [str(Path(sys.executable).with_name("openapi-python-client")), "generate"]
    where = ["--url", url, "--output-path", str(folder / "generated"), "--meta", "none"]
    subprocess.run([*tool, *where], check=True)
    sys.path.insert(0, str(folder))


def main(url: str, token: str = "open") -> None:
    with tempfile.TemporaryDirectory() as folder:
        generated(url, Path(folder))
        package: Any = importlib.import_module("generated")
        models: Any = importlib.import_module("generated.models")
        encode: Any = importlib.import_module("generated.api.default.encode_v1_encode_post")
        plan: Any = importlib.import_module("generated.api.default.plan_v1_plan_post")
        item = models.BodyItem(data=base64.b64encode(png(64)).decode())
        torn = models.BodyItem(data=base64.b64encode(b"no image").decode())
        dtype = models.RequestOptionsDtype.FLOAT32
        options = models.RequestOptions(dtype=dtype, on_error=models.RequestOptionsOnError.RETURN)
        with package.AuthenticatedClient(url.removesuffix("/openapi.json"), token) as client:
            plain = encode.sync(client=client, body=models.EncodeBody([item]))
            (found,) = plain.items
            answer = encode.sync(client=client, body=models.EncodeBody([item, torn], options))
            first, second = answer.items
            (planned,) = plan.sync(client=client, body=models.EncodeBody([item])).items
            wrong = encode.sync(client=client, body=models.EncodeBody([]))
        width = {"bfloat16": 2, "float16": 2, "float32": 4}[found.dtype.value]
        tokens, columns = found.shape
        assert len(base64.b64decode(found.data)) == tokens * columns * width
        assert tokens == found.tokens == first.tokens == planned.tokens == 4
        assert second.error.type_ == "invalid_request"
        assert wrong.error.type_ == "invalid_request"
        print(f"the generated client has read {tokens} rows of {columns} values")


if __name__ == "__main__":
    main(*sys.argv[1:])
