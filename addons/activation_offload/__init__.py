"""Activation offloading: keep activations in the memory of the host until the backward."""
