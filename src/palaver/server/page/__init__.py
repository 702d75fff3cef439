"""The page in the browser: the files of its build, and the session that spares it a key in every request."""
