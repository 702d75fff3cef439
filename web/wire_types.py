"""Writes the page's types of what crosses HTTP, from the server's own OpenAPI document.

    python web/wire_types.py            writes web/src/transport/types.ts
    python web/wire_types.py --check    says whether it is up to date

The file is checked in, so that the page builds without Python; a test keeps it up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from palaver.sampling import NUMBERS
from palaver.server.conversations import routes
from palaver.server.openapi import publish_names

TARGET = Path(__file__).parent / "src" / "transport" / "types.ts"
HEAD = "// Written by web/wire_types.py from the server's OpenAPI document. Do not edit.\n\n"
_PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def document() -> dict[str, Any]:
    app = FastAPI()
    for router in routes.routers():
        app.include_router(router)
    return publish_names(app.openapi())


def source(document: Mapping[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    stream = document["paths"]["/api/events"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    wanted = {name: schema for name, schema in sorted(schemas.items()) if "Validation" not in name}
    unions = {
        "Event": schemas["TurnEvent"]["properties"]["event"],
        "ReadEvent": schemas["Finished"]["properties"]["tail"]["items"],
        "Part": schemas["Message"]["properties"]["parts"]["items"],
        "StoredPart": schemas["Stored"]["properties"]["parts"]["items"],
        "StreamItem": {"oneOf": stream["oneOf"]},
    }
    told = [_declared(name, schema) for name, schema in {**wanted, **unions}.items()]
    return HEAD + "\n".join([*told, _numbers()])


def _declared(name: str, schema: Mapping[str, Any]) -> str:
    about = f"/** {schema['description'].splitlines()[0]} */\n" if schema.get("description") else ""
    if "properties" not in schema:
        return f"{about}export type {name} = {_type(schema)}\n"
    fields = "".join(_field(field, schema, one) for field, one in schema["properties"].items())
    return f"{about}export interface {name} {{\n{fields}}}\n"


def _field(name: str, schema: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    optional = "" if name in schema.get("required", ()) else "?"
    return f"  {name}{optional}: {_type(field)}\n"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    for union in ("oneOf", "anyOf"):
        if union in schema:
            return " | ".join(dict.fromkeys(map(_type, schema[union])))
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(map(_type, schema['prefixItems']))}]"
        case "array":
            return f"({_type(schema.get('items', {}))})[]"
        case "object" if isinstance(held := schema.get("additionalProperties"), dict):
            return f"Record<string, {_type(held)}>"
        case "object":
            return "Record<string, unknown>"
        case str(kind):
            return _PLAIN[kind]
        case _:
            return "unknown"


def _numbers() -> str:
    """The settings that are numbers, with their bounds, so that a form can say them."""
    rows = {
        number.name: {
            "whole": number.read is int,
            "low": number.bounds[0],
            "high": number.bounds[1],
            "meaning": number.meaning,
        }
        for number in NUMBERS.values()
    }
    kind = "Record<string, { whole: boolean; low: number; high: number; meaning: string }>"
    return f"export const NUMBERS: {kind} = {json.dumps(rows, indent=2)}\n"


def main() -> int:
    written = source(document())
    if "--check" in sys.argv:
        return int(TARGET.read_text() != written)
    TARGET.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
