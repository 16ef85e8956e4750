"""The OpenAPI document's parts that FastAPI cannot see: bodies are read and written by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from encoder_service.api.schema import EncodeBody, EncodeDocument, ErrorDocument, RequestOptions

DESCRIPTION = """Vision encoders of vision-language models, apart from the language models.

Images and videos in, embeddings out: rows in the order that the model's own processor gives."""

PREFIX = "#/components/schemas/"

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorDocument, "description": meaning}
    for status, meaning in {
        400: "Malformed request or item.",
        401: "No bearer token, or none of this service's.",
        413: "Body, items, pixels or aspect ratio over a limit.",
        415: "A format or kind that is not taken, or that cannot be answered in.",
        422: "An option is unknown or has a wrong value.",
        429: "Overloaded: try again after Retry-After seconds.",
        500: "Our fault.",
        503: "No encoder can take it now.",
        504: "Not answered within the request's time.",
    }.items()
}


OPEN = {"/", "/healthz", "/readyz", "/metrics"}
"""Paths that nobody needs a token for."""


def schema(model: type[BaseModel]) -> dict[str, Any]:
    """A reference to a model of schema.py."""
    return {"schema": {"$ref": PREFIX + model.__name__}}


FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
BINARY = {"schema": {"type": "string", "format": "binary"}}

ANSWER: dict[str, Any] = {
    "content": {
        "application/msgpack": schema(EncodeDocument),
        "application/json": schema(EncodeDocument),
        "application/vnd.safetensors": BINARY,
    }
}

ENCODE: dict[str, Any] = {
    "parameters": [
        {
            "name": "X-Request-Id",
            "in": "header",
            "description": "Up to 128 letters, digits, ._:- or it is replaced.",
            "schema": {"type": "string"},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "image": FILES,
                        "video": FILES,
                        "options": {"$ref": PREFIX + RequestOptions.__name__},
                    },
                },
                "encoding": {"options": {"contentType": "application/json"}},
            },
            "application/json": schema(EncodeBody),
            "application/msgpack": schema(EncodeBody),
            "image/*": BINARY,
            "video/*": BINARY,
        },
    },
    "responses": {"200": {"description": "Embeddings, in the order of the request.", **ANSWER}},
}

FETCH: dict[str, Any] = {"responses": {"200": {"description": "One embedding.", **ANSWER}}}

MISSING: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorDocument, "description": "Not kept, or not any more."}
}


def describe(app: FastAPI, *, closed: bool) -> None:
    """Adds the schemas that the bodies refer to; `closed`: and the token, where it is asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            models: list[tuple[type[BaseModel], Any]] = [
                (EncodeBody, "validation"),
                (EncodeDocument, "validation"),
                (ErrorDocument, "validation"),
            ]
            _, shared = models_json_schema(models, ref_template=PREFIX + "{model}")
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(shared["$defs"])
            if closed:
                components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"bearer": []}]
            for path in OPEN & document["paths"].keys():
                for operation in document["paths"][path].values():
                    operation["security"] = []
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
