"""The OpenAPI document: what FastAPI finds out by itself, with errors as they really come."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from palaver.server.anthropic.errors import is_anthropic

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
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
        "request_id": {"type": "string"},
    },
}
_ANTHROPIC_ANSWER = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AnthropicError"}}},
}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def install_openapi(app: FastAPI) -> None:
    """Makes the application tell the document of `described`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def openapi_document(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        answer = _ANTHROPIC_ANSWER if is_anthropic(path, {}) else _ANSWER
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": answer, "5XX": answer}
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]
    return document
