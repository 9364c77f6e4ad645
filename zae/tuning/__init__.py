"""Tools that try a trainer on copies: the learning-rate finder, the batch-size finder, the summary of a model."""
