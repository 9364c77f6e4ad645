"""The loop by hand against itself: what the measurement's own noise is."""

from harness import Job, by_hand, evaluate_by_hand

NAME = "bare loop"


def train(job: Job) -> None:
    by_hand(job, job.epochs)


def evaluate(job: Job) -> None:
    evaluate_by_hand(job, job.epochs)
