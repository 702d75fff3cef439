"""Clients of a Palaver server: `Chat` over HTTP, single questions, and the discovery of the user's own server.

Import the modules: single questions must start quickly, and `http_chat` imports the values of the store."""
