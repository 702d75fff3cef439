"""Text to speech: answers are synthesized clause by clause while they stream."""
