"""Engines: token ids in, token ids out. None of them knows what a message is."""
