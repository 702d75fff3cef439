"""The web page: its built files, and its session cookie."""
