"""Checkpoints: write, verify and read them, whole or not at all."""
