"""The OpenAPI document: what FastAPI finds out by itself, with errors as they really come."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "name": {"type": "string"},
                "details": {"type": "object"},
            },
        }
    },
}
_ANSWER = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_KEY = {"key": {"type": "http", "scheme": "bearer"}}


def describe(app: FastAPI) -> None:
    """Makes the application tell the document of `described`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = described(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def described(document: dict[str, Any]) -> dict[str, Any]:
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": _ANSWER, "5XX": _ANSWER}
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    components["securitySchemes"] = _KEY
    document["security"] = [{}, {"key": []}]
    return document
