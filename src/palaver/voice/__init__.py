"""Text to speech: an answer's words become sound, clause by clause."""
