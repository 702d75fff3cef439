"""Formats: how one family of models talks. Messages to token ids, tokens back to events."""
