"""Steps per second on a GPU against the loop by hand, and no step that waits for it: python benchmarks/gpu.py.

It says so, and ends with status 2, where there is no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zae
from zae.addons import AMPAddon, CompileAddon, GradientAccumulationAddon, PrefetchAddon
from zae.addons.jsonl_logger import JSONLLoggerAddon

STEPS, REPEATS = 200, 5


class Task(zae.Trainer):
    """A regression."""

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    test_step = train_step


def network(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def batches(width: int, device: str, count: int = STEPS) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(256, width, generator=generator), torch.randn(256, 1, generator=generator)
    return [tuple(tensor.to(device) for tensor in one)] * count


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """With bf16, as the trainer is given it; the mean is kept on the device."""
    total = torch.zeros((), device="cuda")
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()


def seconds(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(width: int, depth: int) -> dict[str, float]:
    """Steps a second: the median of interleaved repetitions."""
    loader, found = batches(width, "cuda"), {"by hand": [], "zae": [], "zae, compiled": []}
    model = network(width, depth).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = make(Task.add_on(AMPAddon), network(width, depth))
    compiled = make(Task.add_on(AMPAddon, CompileAddon), network(width, depth), compile_target="step")
    contestants: dict[str, Callable[[], Any]] = {
        "by hand": lambda: by_hand(model, optimizer, loader),
        "zae": lambda: plain.run(1, loader),
        "zae, compiled": lambda: compiled.run(1, loader),
    }
    for name in contestants:
        contestants[name]()
    for _ in range(REPEATS):
        for name, run in contestants.items():
            found[name].append(STEPS / seconds(run))
    return {name: median(values) for name, values in found.items()}


def make(cls: Any, model: nn.Module, **options: Any) -> Any:
    return cls(model, "cuda", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), precision="bf16", **options)


def pinned() -> DataLoader[Any]:
    """Pictures from workers, in pinned memory: a batch is 38 MB, so that its copy is worth hiding."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(2048, 3, 224, 224, generator=generator), torch.randn(2048, 1, generator=generator))
    return DataLoader(data, batch_size=64, num_workers=4, pin_memory=True, persistent_workers=True)


def pictures() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 7, 4), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 1))


def copied(loader: Any, is_waited_for: bool) -> Iterator[Any]:
    """Batches on the GPU, copied as they are asked for."""
    for batch in loader:
        yield [tensor.to("cuda", non_blocking=not is_waited_for) for tensor in batch]


def compare_copies() -> dict[str, float]:
    """Steps a second over a loader with workers and pinned memory; zae copies without waiting."""
    loader, found, contestants = pinned(), dict[str, list[float]](), dict[str, Callable[[], Any]]()
    for name, is_waited_for in (("waited for", True), ("not waited for", False)):
        model = pictures().cuda()
        parts = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        contestants[f"by hand, {name}"] = lambda parts=parts, how=is_waited_for: by_hand(*parts, copied(loader, how))
    for name, cls in (("zae", Task.add_on(AMPAddon)), ("zae, PrefetchAddon", Task.add_on(AMPAddon, PrefetchAddon))):
        trainer = make(cls, pictures(), fast_data=False)
        contestants[name] = lambda trainer=trainer: trainer.run(1, loader)
    for _ in range(REPEATS + 1):
        for name, run in contestants.items():
            found.setdefault(name, []).append(len(loader) / seconds(run))
    return {name: median(values[1:]) for name, values in found.items()}


def check_no_step_waits() -> None:
    """100 steps with AMP, accumulation, clip, a log at each tenth step's end and the bar, where a wait is an error.

    What is logged has to be read: the steps between two records are what must not wait.
    """

    class Watched(Task.add_on(AMPAddon, GradientAccumulationAddon, JSONLLoggerAddon)):  # type: ignore[misc]
        def run_batch(self, batch: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().run_batch(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    with tempfile.TemporaryDirectory() as folder:
        trainer = make(
            Watched, network(64, 2), gradient_clip=0.1, gradient_accumulation_steps=4, log_every=10,
            jsonl_path=Path(folder) / "log.jsonl", on_nonfinite="warn",
        )  # fmt: skip
        trainer.run(1, batches(64, "cuda", 400))


def main() -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU is at hand, so nothing was measured\n")
        return 2
    check_no_step_waits()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}: no step waits for the device", ""]
    lines += ["| steps per second | by hand | zae | zae, compiled |", "|---|---|---|---|"]
    for title, width, depth in (("small, 2 layers of 64", 64, 2), ("large, 24 layers of 4096", 4096, 24)):
        row = compare(width, depth)
        lines.append(f"| {title} | " + " | ".join(f"{value:.0f}" for value in row.values()) + " |")
    lines += ["", "| batches from workers, pinned | steps per second |", "|---|---|"]
    lines += [f"| {name} | {value:.0f} |" for name, value in compare_copies().items()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
