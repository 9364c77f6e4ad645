"""Loggers: where metrics, images and files of a run go."""
