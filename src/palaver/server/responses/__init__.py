"""OpenAI's Responses API. Responses are stored in conversations, retrieved by id and streamed from any event on."""
