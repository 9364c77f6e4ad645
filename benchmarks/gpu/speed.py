"""How long a step takes beside the loop by hand, and beside Lightning and Transformers where they are installed.

The loops take turns in one process: by hand, a library, by hand, the next library. A ratio is that of a library's step
to the mean of the steps by hand before and after it; the figure is the median of the rounds. The loop by hand takes a
turn as well: its ratio to itself is what the machine cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from gpu.contestants import BY_HAND, Train, by_hand, contestants, missing_peers, seconds_of_a_step
from gpu.networks import GPT, Job, gpt_batch, gpt_flops, peak_flops, small, small_batch
from gpu.report import Report
from gpu.settings import IS_EMULATED, SMALL, free_memory

SMALL_NETWORK = Job(
    "small network, float32", small, small_batch, 8 if SMALL else 400, is_bf16=False, rounds=1 if SMALL else 9
)
LARGE_NETWORK = Job(
    "GPT, bfloat16",
    GPT,
    gpt_batch,
    6 if SMALL else 24,
    is_bf16=True,
    rounds=1 if SMALL else 5,
    flops=gpt_flops(),
)
LIMITS = {SMALL_NETWORK.title: 1.03, LARGE_NETWORK.title: 1.005}
"""What a step of zae may take, as a ratio to the loop by hand; the second is 1.00 when it is rounded."""


def run(report: Report) -> None:
    """Measure both networks."""
    for name in missing_peers():
        report.leave_out(name, "it is not installed")
    for job in (SMALL_NETWORK, LARGE_NETWORK):
        with report.guard(job.title):
            measure(report, job)


def measure(report: Report, job: Job) -> None:
    """Compare all loops on one network."""
    seconds: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    others = working(report, job, {BY_HAND: by_hand, **contestants()})
    for number in range(job.rounds):
        turn = rotated(list(others), number)
        before = seconds_of_a_step(job, by_hand)
        for name in turn:
            found = seconds_of_a_step(job, others[name])
            after = seconds_of_a_step(job, by_hand)
            seconds.setdefault(name, []).append(found)
            ratios.setdefault(name, []).append(2 * found / (before + after))
            before = after
        free_memory()
    for name in others:
        line(report, job, name, median(seconds[name]), median(ratios[name]), spread(ratios[name]))
    judge(report, job, {name: median(found) for name, found in ratios.items()})


def working(report: Report, job: Job, loops: dict[str, Train]) -> dict[str, Train]:
    """Let each loop train once, which imports and fills caches; one that raises is left out, with its error."""
    found = {}
    for name, train in loops.items():
        with report.guard(f"{job.title}, {name}"):
            seconds_of_a_step(job, train)
            found[name] = train
    return found


def rotated(names: list[str], turn: int) -> list[str]:
    """Let each round begin with another one."""
    turn %= len(names)
    return names[turn:] + names[:turn]


def spread(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def line(
    report: Report, job: Job, name: str, seconds: float, ratio: float, least_and_greatest: tuple[float, float]
) -> None:
    """Note the figures of a loop; they fail nothing by themselves."""
    figures = {"steps_per_second": 1 / seconds, "ratio": ratio}
    figures["ratio_min"], figures["ratio_max"] = least_and_greatest
    text = f"{1 / seconds:.1f} steps/s, {ratio:.3f} of by hand ({figures['ratio_min']:.3f}-{figures['ratio_max']:.3f})"
    peak = peak_flops()
    if job.flops and peak:
        figures["mfu"] = job.flops / seconds / peak
        text += f", MFU {figures['mfu']:.1%}"
    report.measured(f"{job.title}, {name}", text, **figures)


def judge(report: Report, job: Job, ratios: dict[str, float]) -> None:
    """Compare zae with its limit and with each library; times on an emulation mean nothing."""
    if "zae" not in ratios:
        return
    limit = LIMITS[job.title]
    claims: dict[str, Callable[[], bool]] = {f"at most {limit} of by hand": lambda: ratios["zae"] <= limit}
    for name in ratios.keys() - {"zae", BY_HAND}:
        claims[f"not behind {name}"] = lambda name=name: ratios["zae"] <= ratios[name]
    for claim, holds in sorted(claims.items()):
        title = f"{job.title}, {claim}"
        if IS_EMULATED:
            report.leave_out(title, "times on an emulation mean nothing")
        else:
            report.check(title, holds(), f"{ratios['zae']:.3f}")
