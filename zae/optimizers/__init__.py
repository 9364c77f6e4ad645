"""Optimizers of today for a trainer: Muon beside AdamW, and float32 weights for a model in bfloat16."""

from zae.optimizers.master_weights import MasterWeights, float32_weights
from zae.optimizers.splitting import hidden_matrices, muon

__all__ = ["MasterWeights", "float32_weights", "hidden_matrices", "muon"]
