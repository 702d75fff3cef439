"""Models by name: embedded models, folders, hub ids and training configurations."""
