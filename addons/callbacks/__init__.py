"""Callbacks, of zae and of Transformers."""
