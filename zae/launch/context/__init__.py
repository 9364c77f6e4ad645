"""Divide a sequence over several ranks for the forward of a model, with attention over all of it.

`division` says which positions a rank has, and gathers tensors along the sequence. `attention` is what stands in for
``scaled_dot_product_attention``, `model` for the call of the model. `check` compares both with the whole sequence.
"""
