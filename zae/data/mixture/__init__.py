"""Mixtures of datasets and of streams by weights; their order is a function of seed, epoch and position."""

from zae.data.mixture.datasets import Mixture, MixtureBatchSampler, MixtureSampler
from zae.data.mixture.streams import MixtureStream

__all__ = ["Mixture", "MixtureBatchSampler", "MixtureSampler", "MixtureStream"]
