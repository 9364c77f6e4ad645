"""Learning-rate schedules that are functions of the step, and what a trainer needs to know about any scheduler.

`cosine`, `linear`, `inverse_sqrt` and `wsd` begin with a warm-up and are as long as the run:
``scheduler=zae.schedulers.cosine(warmup=0.05)`` is all that a trainer needs. The classes are to be stepped in any loop.

Each of them computes the rate from the number of steps alone, never from the previous rate. So a resumed schedule is
bitwise the same as an uninterrupted one, and a chain is only its parts, each with its own steps.
"""

from zae.schedulers.lengths import is_plateau, own_length, planned_length, steps_taken
from zae.schedulers.ramps import CosineAnnealingScheduler, SchedulerBase, SchedulerChain, WarmUpScheduler
from zae.schedulers.warmup import cosine, inverse_sqrt, linear, wsd

__all__ = [
    "CosineAnnealingScheduler",
    "SchedulerBase",
    "SchedulerChain",
    "WarmUpScheduler",
    "cosine",
    "inverse_sqrt",
    "is_plateau",
    "linear",
    "own_length",
    "planned_length",
    "steps_taken",
    "wsd",
]
