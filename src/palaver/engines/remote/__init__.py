"""Engines on other machines: servers of vLLM and of llama.cpp that take token ids."""
