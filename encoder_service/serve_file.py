"""Serve's own part of a configuration file, held against Serve's schemas and our timeouts.

Serve ignores keys that it does not know. What is in `args` is config.py's to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import (
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from actors.errors import ConfigError


def check_serve(document: dict[str, Any], path: str) -> None:
    """The part that Serve reads itself: keys, types, names of ours that can be imported."""
    check_keys(document, ServeDeploySchema, path)
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(problems)}") from None
    http, grpc = document.get("http_options", {}), document.get("grpc_options", {})
    check_keys(http, HTTPOptionsSchema, f"{path}: http_options")
    check_keys(grpc, gRPCOptionsSchema, f"{path}: grpc_options")
    port = HTTPOptionsSchema.model_validate(http).port
    if port == gRPCOptionsSchema.model_validate(grpc).port:
        raise ConfigError(
            f"{path}: http_options.port and grpc_options.port are both {port}: they must differ"
        )
    for name in grpc.get("grpc_servicer_functions", []):
        check_import(name, ".", f"{path}: grpc_options.grpc_servicer_functions")
    for index, application in enumerate(document["applications"]):
        where = f"{path}: applications[{index}]"
        check_keys(application, ServeApplicationSchema, where)
        # What is not ours may do anything when it is imported.
        if application["import_path"].startswith("encoder_service."):
            check_import(application["import_path"].replace(":", "."), ".", f"{where}.import_path")


def check_keys(given: Iterable[str], schema: type[BaseModel], where: str) -> None:
    """Raises ConfigError for a key that Serve would ignore without a word."""
    unknown = sorted(str(key) for key in set(given) - schema.model_fields.keys())
    if unknown:
        raise ConfigError(f"{where}: {', '.join(unknown)}: Serve knows no such key")


def check_timeouts(
    document: dict[str, Any], seconds: float, path: str, own: str = "limits"
) -> None:
    """Raises ConfigError if Serve would break a request off before its own time is over."""
    for section in ("http_options", "grpc_options"):
        limit = document.get(section, {}).get("request_timeout_s")
        if limit and float(limit) < seconds:
            raise ConfigError(
                f"{path}: {own}.timeout_seconds is {seconds:g}, but Serve gives up after "
                f"{section}.request_timeout_s, {limit}: raise that, or lower the limit"
            )


def check_import(name: str, separator: str, where: str) -> None:
    """Raises ConfigError for a name that leads nowhere."""
    module, _, attribute = name.rpartition(separator)
    try:
        getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}") from None
