"""The weights of a model by their names, its forwards, and copies of it."""
