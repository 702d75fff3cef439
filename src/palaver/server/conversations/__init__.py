"""The conversations over HTTP: all of `Chat` under `/api`, with the events of turns as streams."""
