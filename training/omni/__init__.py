"""Trains Sprout Omni, the tiny model that sees and hears."""
