"""The OpenAI API: what its clients send, and what they get."""
