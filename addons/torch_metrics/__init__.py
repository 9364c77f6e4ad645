"""Metrics of torchmetrics."""
