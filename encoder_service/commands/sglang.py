"""`encoder-service sglang`: an encoder for SGLang servers, in their own protocol."""

from __future__ import annotations

import argparse
import asyncio
from importlib.util import find_spec
from ipaddress import ip_network
from typing import Any

from rich.console import Console

from actors.errors import ConfigError, how_to_install
from encoder_service.commands import add_command
from encoder_service.commands.proxy import add_server, serve
from encoder_service.config import LimitOptions


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands,
        "sglang",
        run,
        "serve as the encoder of SGLang servers started with --language-only --encoder-urls",
    )
    add_server(parser, port=8200)
    parser.add_argument(
        "--network",
        action="append",
        default=[],
        metavar="CIDR",
        help="network of SGLang servers: embeddings are sent to no other addresses. May be "
        "repeated. The default is this machine and private networks",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Serves until it is stopped. Reads the encoder's token from ENCODER_SERVICE_TOKEN."""
    if find_spec("zmq") is None:
        raise ConfigError(f"pyzmq is missing: {how_to_install('sglang')}")
    from encoder_service.engines.sglang_encoder import PRIVATE, SglangEncoder

    try:
        networks = [ip_network(one) for one in options.network] or PRIVATE
    except ValueError as wrong:
        raise ConfigError(f"--network: {wrong}") from None
    limits = LimitOptions(timeout_seconds=options.timeout)
    asyncio.run(serve(options, lambda encoder: SglangEncoder(encoder, limits, networks).app()))
    return 0
