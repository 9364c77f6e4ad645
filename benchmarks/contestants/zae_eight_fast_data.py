"""zae with eight idle add-ons and the bar, as it comes: over the exact data path."""

from contestants import zae_eight
from harness import Job

NAME = "zae, eight add-ons, the bar, exact data path"
TERMINAL = True


def train(job: Job) -> None:
    zae_eight.train(job, fast_data=True)


def evaluate(job: Job) -> None:
    zae_eight.evaluate(job, fast_data=True)
