"""Accelerate: make or check an Accelerator, let it prepare a trainer's objects, and write and read its folders."""
