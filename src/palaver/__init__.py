"""Palaver: one conversation with a model on your own machine, through every door."""

__version__ = "0.1.0"
