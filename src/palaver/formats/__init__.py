"""Formats: chat messages to prompt token ids, and reply tokens back to events, for one chat template."""
