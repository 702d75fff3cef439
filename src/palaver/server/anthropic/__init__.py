"""Anthropic's Messages API, over the same replies that the OpenAI API has."""
