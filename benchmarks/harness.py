"""What every contestant is given, the loop by hand that it is measured against, and how one measurement is made."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLIP, ACCUMULATE, PATIENCE = 0.01, 4, 1000
"""The clip is far below every gradient's norm; nothing stops early, but everybody has to look."""
ROUNDS = 9
"""Measurements in one process at most."""


@dataclass
class Job:
    """What is to be trained, and how; everybody gets the same."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    epochs: int
    valid: Any = None
    features: bool = False
    """Validation, clip, accumulation, checkpoint and log each epoch, early stopping, bar."""
    folder: Path = field(default_factory=Path)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def cnn() -> nn.Module:
    """Its step takes about 10 ms on one core."""
    convolution = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def vectors(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 20, generator=generator), torch.randint(0, 5, (count,), generator=generator)
    )


def shuffled(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))


class Batches:
    """A nearly free loader: batches that are there already."""

    def __init__(self, dataset: Any) -> None:
        self.batches = list(DataLoader(dataset, batch_size=32))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(1600, 3, 32, 32, generator=generator), torch.randint(0, 5, (1600,), generator=generator)
    )


# Each gives the model, the training loader, the epochs and the validation loader; epochs are even.
WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Any, int, Any]]] = {
    "mlp": lambda: (mlp(), shuffled(vectors(16000)), 8, None),
    "free": lambda: (mlp(), Batches(vectors(16000)), 8, None),
    "short": lambda: (mlp(), shuffled(vectors(640)), 50, None),
    "cnn": lambda: (cnn(), Batches(images()), 4, None),
    "all": lambda: (mlp(), shuffled(vectors(16000)), 4, Batches(vectors(3200))),
    "eval": lambda: (mlp(), None, 4, DataLoader(vectors(16000), batch_size=32)),
    "free_eval": lambda: (mlp(), None, 4, Batches(vectors(64000))),
}


def make(workload: str, folder: Path) -> Job:
    """A fresh job; two of the same workload are equal to the last bit."""
    torch.manual_seed(0)
    model, loader, epochs, valid = WORKLOADS[workload]()
    # Its step is short, so that what is measured is not lost in it, and takes the gradient as the clip left it.
    optimizer = sgd(model)
    return Job(model, optimizer, loader, epochs, valid, workload == "all", folder)


# ------------------------------------------------------------------------------------------------ the loop by hand


def by_hand(job: Job, epochs: int) -> None:
    """Train as one writes it without a library."""
    if job.features:
        everything_by_hand(job, epochs)
        return
    for _ in range(epochs):
        job.model.train()
        total, seen = 0.0, 0
        for batch in job.loader:
            loss = loss_of(job.model, batch)
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            total, seen = total + loss.item() * len(batch[0]), seen + len(batch[0])


def everything_by_hand(job: Job, epochs: int) -> None:
    """The same with all that `Job.features` names."""
    from tqdm.auto import tqdm

    best, waited, model = float("inf"), 0, job.model
    for epoch in range(epochs):
        model.train()
        total, seen, count = 0.0, 0, len(job.loader)
        bar = tqdm(total=count, leave=False, mininterval=0.2)
        for index, batch in enumerate(job.loader):
            window = min(ACCUMULATE, count - index // ACCUMULATE * ACCUMULATE)
            loss = loss_of(model, batch)
            (loss / window).backward()
            total, seen = total + loss.item() * len(batch[0]), seen + len(batch[0])
            bar.update()
            if (index + 1) % ACCUMULATE and index + 1 < count:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            job.optimizer.step()
            job.optimizer.zero_grad()
        bar.close()
        score = evaluate_by_hand(job, 1)
        with (job.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({"epoch": epoch, "train/loss": total / seen, "valid/loss": score}) + "\n")
        save({"model": model.state_dict(), "optimizer": job.optimizer.state_dict(), "epoch": epoch}, job.folder)
        waited = 0 if score < best else waited + 1
        best = min(best, score)
        if waited > PATIENCE:
            break


def save(state: dict[str, Any], folder: Path) -> None:
    """A checkpoint that a power cut leaves whole, with its checksum, as zae writes it."""
    new = folder / "checkpoint.new"
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "checkpoint.sha256").write_text(hashlib.sha256(new.read_bytes()).hexdigest())
    new.replace(folder / "checkpoint.pt")


def evaluate_by_hand(job: Job, epochs: int) -> float:
    total, seen = 0.0, 0
    training = job.model.training
    for _ in range(epochs):
        job.model.eval()
        total, seen = 0.0, 0
        with torch.no_grad():
            for batch in job.valid:
                total += loss_of(job.model, batch).item() * len(batch[0])
                seen += len(batch[0])
    job.model.train(training)
    return total / seen


# ------------------------------------------------------------------------------------------------ one measurement


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def cpu_time(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def steps_of(job: Job) -> int:
    return job.epochs * len(job.loader or job.valid)


def measure(contestant: Any, workload: str, seconds: float) -> dict[str, Any]:
    """Medians of as many measurements, one after another in this process, as fit into so many seconds of CPU time."""
    with tempfile.TemporaryDirectory() as name:
        # What is imported, compiled or cached at first is the start's, which is measured apart.
        warm = make(workload, Path(name))
        warm.epochs = 1
        other = Job(**{**vars(warm), "model": copy.deepcopy(warm.model)})
        other.optimizer = sgd(other.model)
        run, hand = (contestant.train, by_hand) if warm.loader else (contestant.evaluate, evaluate_by_hand)
        hand(other, 1)
        run(warm)
    start = time.process_time()
    rounds = [sandwich(run, hand, workload)]
    taken = time.process_time() - start
    while len(rounds) < ROUNDS and taken * (len(rounds) + 1) <= seconds:
        rounds.append(sandwich(run, hand, workload))
    return {
        **{key: median(each[key] for each in rounds) for key in ("ratio", "extra_us", "hand_us")},
        "same": all(each["same"] for each in rounds),
        "difference": max(each["difference"] for each in rounds),
    }


def sandwich(run: Callable[[Job], Any], hand: Callable[[Job, int], Any], workload: str) -> dict[str, Any]:
    """The loop by hand (half), the contestant, the loop by hand (the other half)."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / each for each in ("by hand", "theirs")]
        for folder in folders:
            folder.mkdir()
        reference, job = make(workload, folders[0]), make(workload, folders[1])
        first = cpu_time(lambda: hand(reference, reference.epochs // 2))
        theirs = cpu_time(lambda: run(job))
        second = cpu_time(lambda: hand(reference, reference.epochs - reference.epochs // 2))
    steps = steps_of(job)
    return {
        "ratio": theirs / (first + second),
        "extra_us": (theirs - first - second) / steps * 1e6,
        "hand_us": (first + second) / steps * 1e6,
        "same": digest(reference.model) == digest(job.model),
        "difference": difference(reference.model, job.model),
    }


def start_time(contestant: Any) -> dict[str, Any]:
    """Import and first step, beyond torch: CPU seconds."""

    def begin() -> None:
        with tempfile.TemporaryDirectory() as name:
            job = make("free", Path(name))
            job.loader, job.epochs = Batches(vectors(32)), 1
            contestant().train(job)

    return {"seconds": cpu_time(begin)}


def once(contestant: Any, repeats: int = 7) -> dict[str, Any]:
    """What a run of one step costs, when all is imported and has run before: CPU milliseconds, the median."""
    taken = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            job = make("free", Path(name))
            job.loader, job.epochs = Batches(vectors(32)), 1
            taken.append(cpu_time(lambda job=job: contestant.train(job)) * 1e3)  # type: ignore[misc]
    return {"milliseconds": sorted(taken[1:])[repeats // 2]}


def growth(contestant: Any, steps: Iterable[int] = (4000, 20000)) -> dict[str, Any]:
    """Resident memory between two step counts of one epoch: bytes a step."""
    import psutil

    batches, seen = list(DataLoader(vectors(320), batch_size=32)), {}
    process = psutil.Process()

    class Loader:
        def __len__(self) -> int:
            return last

        def __iter__(self) -> Any:
            for step in range(last):
                if step in wanted:
                    gc.collect()
                    seen[step] = process.memory_info().rss
                yield batches[step % len(batches)]

    first, last = steps
    wanted = (first, last - 1)
    with tempfile.TemporaryDirectory() as name:
        job = make("free", Path(name))
        job.loader, job.epochs = Loader(), 1
        contestant.train(job)
    return {"bytes_a_step": (seen[last - 1] - seen[first]) / (last - first)}


def main(arguments: list[str]) -> None:
    """Make one measurement in this process and write it as JSON to the file descriptor that is named."""
    from importlib import import_module

    name, workload, seconds, descriptor = arguments
    torch.set_num_threads(1)
    load = lambda: import_module(f"contestants.{name}")  # noqa: E731
    if workload == "start":
        result = start_time(load)
    elif workload == "once":
        result = once(load())
    elif workload == "growth":
        result = growth(load())
    else:
        result = measure(load(), workload, float(seconds))
    with os.fdopen(int(descriptor), "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1:])
