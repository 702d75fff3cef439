"""The JSON of the HTTP API: requests, errors and streams. Values are encoded by their types (`palaver.encoding`).

The page's TypeScript types are generated from the OpenAPI document, which publishes them under the names in
`palaver.server.openapi`.
"""
