"""The networks of models.py, and its measurements, each in a process of its own that writes JSON to a descriptor."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import Job, by_hand, digest, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH, DEPTH, HEADS = 384, 6, 6
VOCABULARY, LENGTH, ROWS = 4096, 128, 2
IMAGES, CLASSES = 4, 100
UNITS = {"vit": IMAGES, "gpt": ROWS * LENGTH}
"""Images, or tokens, of a step."""
COPY = "manual: a copy in memory"
"""The row of the least that an asynchronous save takes."""
WARM = 2
"""Steps that are not counted: the first ones allocate the states of the optimizer, and the workspace of the kernels."""


class Block(nn.Module):
    """Attention and a network of two layers, with the norms before them."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.inputs(self.norms[0](x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.is_causal)
        x = x + self.output(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        out: Tensor = x + self.network(self.norms[1](x))
        return out


class Network(nn.Module):
    """Blocks; each forward notes the time at which it begins, so that steps are timed alike under every library."""

    def __init__(self, places: int, is_causal: bool, outputs: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(places, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block(is_causal) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs, bias=False)
        self.stamps: list[tuple[float, float]] = []

    def stamp(self) -> None:
        self.stamps.append((time.monotonic(), time.process_time()))

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.blocks(x + self.places))
        return out


class ViT(Network):
    """10.8 million parameters: images of 32 x 32 in patches of 4 x 4."""

    def __init__(self) -> None:
        super().__init__(64, False, CLASSES)
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        self.stamp()
        out: Tensor = self.head(self.encode(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
        return out


class GPT(Network):
    """13.9 million parameters; one row of logits for each token."""

    def __init__(self) -> None:
        super().__init__(LENGTH, True, VOCABULARY)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        self.stamp()
        out: Tensor = self.head(self.encode(self.tokens(tokens))).flatten(0, 1)
        return out


class Images(Dataset[Any]):
    """Images of bytes, which are flipped at random and made floats where they are loaded."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index].float() / 255 - 0.5
        return image.flip(2) if index % 2 else image, self.labels[index]


class Texts(Dataset[Any]):
    """Rows of tokens without padding: documents one after another, cut where a row ends."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


def collate_rows(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack the inputs, and put the targets one after another, as the logits are."""
    return torch.stack([row for row, _ in rows]), torch.cat([target for _, target in rows])


class Batches:
    """Batches that are there already. Lightning takes a list for several loaders."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batches = list(loader)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_of(kind: str, steps: int, workers: int = 0) -> DataLoader[Any]:
    if kind == "gpt":
        return DataLoader(Texts(steps * ROWS), batch_size=ROWS, collate_fn=collate_rows, num_workers=workers)
    return DataLoader(Images(steps * IMAGES), batch_size=IMAGES, num_workers=workers)


def job_of(kind: str, steps: int, folder: Path, workers: int = 0, is_evaluation: bool = False) -> Job:
    """Return a fresh job; two of the same kind are equal to the last bit."""
    torch.manual_seed(0)
    model = ViT() if kind == "vit" else GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader: Any = loader_of(kind, steps, workers)
    batches = loader if workers else Batches(loader)
    return Job(
        model, optimizer, None if is_evaluation else batches, 1, batches if is_evaluation else None, False, folder
    )


# ------------------------------------------------------------------------------------------------------- contestants


def titan(job: Job) -> None:
    """Train as torchtitan's Trainer.train_step does, without its parallel parts; torch must be a nightly build for it.

    Counts the tokens that are not ignored, differentiates the sum of the losses over their number, clips always, and
    steps a schedule.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1.0)
    parameters = list(job.model.parameters())
    data = iter(job.loader)
    for step in range(len(job.loader)):
        job.optimizer.zero_grad(set_to_none=True)
        inputs, labels = next(data)
        tokens = (labels != -100).sum()
        loss = nn.functional.cross_entropy(job.model(inputs), labels, reduction="sum", ignore_index=-100) / tokens
        loss.backward()
        norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None], foreach=True)
        nn.utils.clip_grads_with_norm_(parameters, 1e9, norm, foreach=True)
        job.optimizer.step()
        schedule.step()
        if step % 10 == 0:  # Its log_freq.
            loss.item(), norm.item()


def contestant(name: str) -> Any:
    """Import a contestant, whose ``train`` and ``evaluate`` take a job."""
    return SimpleNamespace(train=titan) if name == "titan" else importlib.import_module(f"contestants.{name}")


# ------------------------------------------------------------------------------------------------------ measurements


def timed(call: Callable[[Job], Any], kind: str, steps: int, workers: int, is_evaluation: bool) -> dict[str, Any]:
    """Return wall and CPU seconds of a step, and the digest of the weights at the end."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(kind, steps, Path(folder), workers, is_evaluation)
        gc.collect()
        call(job)
        first, last = job.model.stamps[WARM], job.model.stamps[-1]
    wall, cpu = ((b - a) / (steps - 1 - WARM) for a, b in zip(first, last, strict=True))
    return {"wall": wall, "cpu": cpu, "digest": digest(job.model)}


def rounds_of(kind: str, names: list[str], count: int, steps: int) -> Iterator[dict[str, Any]]:
    """Take turns: the bare loop, two contestants, the bare loop, and so on; each round begins with another one."""
    network, _, what = kind.partition("_")
    workers, is_evaluation = int(what == "workers"), what == "eval"
    verb = "evaluate" if is_evaluation else "train"
    calls = {name: getattr(contestant(name), verb, None) for name in names}
    present = [name for name in names if calls[name]]
    for number in range(-1, count):
        turn = present[number % len(present) :] + present[: number % len(present)]
        found, waiting = {}, []
        length = steps if number >= 0 else WARM + 2  # The round before the first one imports, and fills caches.
        before = timed(calls["bare"], network, length, workers, is_evaluation)
        for index, name in enumerate(turn):
            found[name] = timed(calls[name], network, length, workers, is_evaluation)
            waiting.append(name)
            if len(waiting) == 2 or index == len(turn) - 1:
                after = timed(calls["bare"], network, length, workers, is_evaluation)
                for each in waiting:
                    found[each] = compare(found[each], before, after)
                before, waiting = after, []
        if number >= 0:
            yield found


def compare(theirs: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step, and their ratio to the mean of the bare loops before and after."""
    ratios = {f"{key}_ratio": 2 * theirs[key] / (before[key] + after[key]) for key in ("wall", "cpu")}
    return {"wall": theirs["wall"], "cpu": theirs["cpu"], **ratios, "same": theirs["digest"] == before["digest"]}


def first_step(name: str, kind: str, began: float) -> dict[str, Any]:
    """Return the seconds from the start of the process to the end of its first step, and its peak memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(kind, 6, Path(folder))
        contestant(name).train(job)
    wall, cpu = job.model.stamps[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"wall": wall - began, "cpu": cpu, "peak": peak}


def saves(count: int) -> Iterator[dict[str, float]]:
    """Return, for each turn, the seconds that training waits for a save of the GPT and the state of its optimizer."""
    from lightning.fabric import Fabric

    from zae.addons import StateManagerAddon
    from zae.loop.cadence import Every

    with tempfile.TemporaryDirectory(prefix=".models-", dir=Path.cwd()) as name:
        folder = Path(name)
        job = job_of("gpt", 1, folder)
        by_hand(job, 1)
        state = {"model": job.model, "optimizer": job.optimizer}
        kept = StateManagerAddon
        task = importlib.import_module("contestants.zae_core").Task.add_on(kept)
        made = {
            key: task(job.model, "cpu", optimizer=job.optimizer, save_path=folder / key, log_bar=False,
                      save_every=Every(epochs=99), save_format=key.partition(", ")[0], save_async=key.endswith("async"))
            for key in ("safetensors", "ckpt", "safetensors, async")
        }  # fmt: skip
        for each in made.values():
            each.setup()
        slots = [each for state in job.optimizer.state.values() for each in state.values()]
        twins = [(torch.empty_like(each), each) for each in (*job.model.state_dict().values(), *slots)]
        calls: dict[str, Callable[[], Any]] = {
            COPY: lambda: [twin.copy_(each) for twin, each in twins],
            "torch.save": lambda: torch.save({k: v.state_dict() for k, v in state.items()}, folder / "plain.pt"),
            "manual: torch.save, fsync, SHA-256, rename": lambda: save(
                {k: v.state_dict() for k, v in state.items()}, folder
            ),
            "Lightning Fabric": lambda: Fabric(accelerator="cpu").save(folder / "fabric.ckpt", state),
        }
        calls |= {f"zae, {key}": lambda key=key: made[key].save_state(folder / key / "one") for key in made}  # type: ignore[misc]
        for turn in range(-1, count):
            found = {}
            for key, call in calls.items():
                os.sync()  # What the one before has left to the disk is not this one's to wait for.
                start = time.perf_counter()
                call()
                found[key] = time.perf_counter() - start
                if key.endswith("async"):
                    assert made["safetensors, async"].last_path is None  # It waits for the thread.
                    found[f"{key}, until it is on the disk"] = time.perf_counter() - start
            for path in (*folder.glob("*/one"),):
                shutil.rmtree(path)
            if turn >= 0:
                yield found


def main(arguments: list[str]) -> None:
    """Make one measurement, and write each of its rounds as a line of JSON to the descriptor that is named first."""
    descriptor, what, *rest = arguments
    torch.set_num_threads(1)
    with os.fdopen(int(descriptor), "w") as file:
        if what == "first":
            rows = iter([first_step(rest[0], rest[1], float(rest[2]))])
        elif what == "save":
            rows = saves(int(rest[0]))
        else:
            rows = rounds_of(what, rest[2].split(","), int(rest[0]), int(rest[1]))
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
