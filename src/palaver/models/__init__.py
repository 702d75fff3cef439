"""Models by name: those shipped with Palaver, folders on disk, and ids on the hub."""
