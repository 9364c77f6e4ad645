"""What a sharded checkpoint costs, against the whole one: python benchmarks/sharded_checkpoint.py.

Two processes over gloo hold a model with AdamW's state through FSDPAddon, and save in turns: whole, in shards, and in
shards in the background. Shown are the bytes on the disk, and the seconds for which training stands still, on the
slower rank.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zae import Trainer
from zae.addons import FSDPAddon, StateManagerAddon
from zae.distributed.spawn import spawn


class Task(Trainer):
    """Any regression."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def measure(width: int, layers: int, folder: str, turns: int) -> dict[str, dict[str, Any]]:
    """Save in turns, and return what each format has taken."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    trainers = {}
    for kind in ("safetensors", "sharded", "sharded, save_async"):
        save_format, _, is_async = kind.partition(", ")
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        trainer = Task.add_on(FSDPAddon, StateManagerAddon)(
            model, "cpu", optimizer=torch.optim.AdamW, log_bar=False, save_path=Path(folder, kind),
            save_format=save_format, save_async=bool(is_async),
        )  # fmt: skip
        trainer.run(1, [torch.ones(2, width)] * 4)
        trainers[kind] = trainer
    for _ in range(turns):
        for kind, trainer in trainers.items():
            with trainer.ready():
                target = Path(folder, f"{kind}-{len(found)}")
                trainer.barrier()
                began = time.perf_counter()
                trainer.save_state(target)
                seconds = time.perf_counter() - began
                entry = found.setdefault(kind, {"seconds": []})
                entry["seconds"].append(max(trainer.gather(seconds)))
                trainer.checkpoints.settle()
                trainer.barrier()
                entry["bytes"] = sum(each.stat().st_size for each in target.iterdir())
                trainer.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(target)
    return found


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"width": given.width, "layers": given.layers, "folder": folder, "turns": given.turns}
        found = spawn(measure, arguments, [torch.device("cpu")] * 2, timeout=300)
    for kind, each in found.items():
        seconds = statistics.median(each["seconds"])
        sys.stdout.write(f"{kind:20} {each['bytes'] / 1e6:8.1f} MB {seconds:6.2f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
