"""Learns the facts of a format: renders probe conversations with the chat template and compares the results."""
