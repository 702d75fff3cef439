"""The JSON of the HTTP API: pydantic schemas of Palaver's values, requests, events and errors.

Server and client use the same schemas, and the page's TypeScript types are generated from them. The OpenAPI document
publishes them under the names in `palaver.server.openapi.PUBLISHED_NAMES`.
"""
