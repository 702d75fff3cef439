"""What crosses HTTP: each of our values as a pydantic model of the same name, with `of` (from ours) and `value` (back).

Both sides use these models, and the page's types are generated from them, so that no two of them drift apart.
"""
