"""The server: the OpenAI API and the conversations over HTTP, behind a hard shell."""
