"""`encoder-service proxy`: serves OpenAI's API, and passes embeddings instead of images to vLLM."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from pydantic import ValidationError
from rich.console import Console
from starlette.applications import Starlette

from actors.errors import ConfigError
from encoder_service.client import AsyncClient
from encoder_service.commands import above_zero, add_command
from encoder_service.config import AuthOptions, LimitOptions
from encoder_service.engines.openai_proxy import UPSTREAM_TIMEOUT_SECONDS, Proxy

BACKLOG = 2048


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands,
        "proxy",
        run,
        "proxy chat requests to vLLM and replace their images with embeddings",
    )
    parser.add_argument(
        "--upstream", required=True, metavar="URL", help="base URL of vLLM, without /v1"
    )
    add_server(parser, port=8100)
    parser.add_argument(
        "--by-id",
        action="store_true",
        help="send vLLM ids instead of rows. vLLM needs the connector of "
        "encoder_service.engines.vllm_connector, with the URL of the same encoder service, whose "
        f"references.ttl_seconds must be at least {UPSTREAM_TIMEOUT_SECONDS}",
    )
    parser.add_argument(
        "--token-sha256",
        action="append",
        default=[],
        metavar="SHA256",
        help="hexadecimal SHA-256 of a bearer token that clients must send; the token is passed on "
        "to vLLM. May be repeated. Without it, anyone who can reach the proxy can use the encoders",
    )


def add_server(parser: argparse.ArgumentParser, port: int) -> None:
    """The options of `serve`."""
    parser.add_argument(
        "--encoder",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the encoder service, http[s]:// or grpc[s]://",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help="port to listen on")
    parser.add_argument(
        "--timeout",
        type=above_zero,
        default=60,
        metavar="SECONDS",
        help="timeout of a request to the encoder service",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Serves until it is stopped. Reads the encoder's token from ENCODER_SERVICE_TOKEN."""
    try:
        upstream = urlsplit(options.upstream)
        complete = bool(upstream.hostname) and upstream.port != 0  # ValueError: no such port
    except ValueError as wrong:
        raise ConfigError(f"--upstream: {wrong}") from None
    if upstream.scheme not in ("http", "https") or not complete:
        raise ConfigError(f"--upstream: {options.upstream!r} must be http[s]://HOST:PORT")
    try:
        auth = AuthOptions(token_sha256=tuple(options.token_sha256))
    except ValidationError:  # pydantic's message would repeat what may be the token itself
        raise ConfigError(
            "--token-sha256 is not the hexadecimal SHA-256 of a token: printf %s TOKEN | sha256sum"
        ) from None
    limits = LimitOptions(timeout_seconds=options.timeout)

    def application(encoder: AsyncClient) -> Starlette:
        return Proxy(options.upstream, limits, auth, encoder, by_id=options.by_id).app()

    asyncio.run(serve(options, application))
    return 0


async def serve(
    options: argparse.Namespace, application: Callable[[AsyncClient], Starlette]
) -> None:
    """Serves an application with a client of the encoder service. Raises ConfigError for URLs."""
    token = os.environ.get("ENCODER_SERVICE_TOKEN")
    try:
        encoder = AsyncClient(options.encoder, token, options.timeout)
    except ValueError as wrong:
        raise ConfigError(f"--encoder: {wrong}") from None
    try:
        app = application(encoder)
    except httpx.InvalidURL as wrong:
        raise ConfigError(f"--upstream: {wrong}") from None
    with listen(options.host, options.port) as listener:
        await server(app).serve(sockets=[listener])


def server(app: Starlette, **options: Any) -> uvicorn.Server:
    # h11 refuses headers over 16 KB. uvicorn's other parser has no limit: one stalls the server.
    return uvicorn.Server(uvicorn.Config(app, http="h11", **options))


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError if it cannot listen there, for example because the port is taken."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port}: ports are 0 to {2**16 - 1}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
