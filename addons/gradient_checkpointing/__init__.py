"""Activation checkpointing: compute activations again in the backward."""
