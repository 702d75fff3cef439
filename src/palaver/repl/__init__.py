"""The terminal: a front-end that knows events, never tokens or markers."""
