"""vLLM as an engine: its library in the user's own Python environment, with Palaver's sampling inside of it."""
