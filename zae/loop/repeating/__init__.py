"""Gradients of a step that are computed more than once: in parts that fit in memory, or to compare them."""
