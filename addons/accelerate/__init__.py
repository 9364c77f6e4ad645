"""Accelerate as the engine of a trainer."""
