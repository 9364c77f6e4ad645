"""The record of every step, to compare two runs."""
