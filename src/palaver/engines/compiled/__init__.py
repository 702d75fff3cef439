"""The next tokens of replies by code that is compiled on the user's machine, where the user asks for it."""
