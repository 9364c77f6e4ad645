"""Training as Transformers does it: its arguments, datasets, loss, optimizers, metrics and folders."""
