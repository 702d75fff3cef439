"""Talking to a model: turns, the conversations they belong to, and the one interface to both."""
