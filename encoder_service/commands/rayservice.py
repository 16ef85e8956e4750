"""`encoder-service rayservice CONFIG`: a configuration as a Kustomize patch of a RayService.

The file in configs/ stays the only source: `serveConfigV2` is generated from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from encoder_service.commands import add_command
from encoder_service.config import is_ours, load_all, read_document

HEAD = """\
# Written by `encoder-service rayservice {name}`. Edit that file and regenerate this one.
apiVersion: ray.io/v1
kind: RayService
metadata: {{name: encoder}}
spec:
  serveConfigV2: |
"""


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands, "rayservice", run, "print a configuration as a Kustomize patch of a RayService"
    )
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        help="configuration, such as configs/qwen3vl-fleet.yaml",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    console.file.write(patch(options.config))
    return 0


def patch(path: Path) -> str:
    """The YAML of the patch. Raises ConfigError."""
    load_all(path)
    document = read_document(path)
    # Clients connect from other pods, to every pod that has a replica.
    document["http_options"] = (document.get("http_options") or {}) | {"host": "0.0.0.0"}
    for application in filter(is_ours, document["applications"]):
        application["args"].setdefault("ingress", {})["grpc_host"] = "0.0.0.0"
    document["proxy_location"] = "EveryNode"
    text = yaml.safe_dump(document, sort_keys=False, width=100)
    body = "".join(f"    {line}\n" for line in text.splitlines())
    return HEAD.format(name=f"{path.parent.name}/{path.name}") + body
