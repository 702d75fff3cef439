"""Decoding in C code that is compiled on the user's machine."""
