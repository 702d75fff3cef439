"""Anthropic's Messages API, over the same reply streams as the OpenAI API."""
