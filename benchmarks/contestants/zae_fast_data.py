"""zae without add-ons as it comes: over the exact data path."""

from contestants import zae_core
from harness import Job

NAME = "zae, exact data path"


def train(job: Job) -> None:
    zae_core.train(job, fast_data=True)


def evaluate(job: Job) -> None:
    zae_core.evaluate(job, fast_data=True)
