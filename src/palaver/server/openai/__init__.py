"""OpenAI's API: chat completions, text completions, and token routes."""
