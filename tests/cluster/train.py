"""Train the task of the tests of engines, slowly, and write its weights: train.py FOLDER [--engine NAME] ..."""

from __future__ import annotations

import argparse
import json
import socket
import time
from typing import Any

import torch

from cluster.training import EPOCHS
from kit.engines import ENGINES, Task, build, data, net, weights
from zae.addons import StateManagerAddon

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--engine", default="ddp")
parser.add_argument("--devices", default="cpu", help="a device, or a list of them, which starts ranks")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes")
parser.add_argument("--fails", action="store_true", help="raise an error in step 3")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--options", type=json.loads, default={}, help="options of the trainer")
arguments = parser.parse_args()


class SlowTask(Task):
    """The task of the tests of engines."""

    def train_step(self, batch: Any) -> Any:
        time.sleep(arguments.pause)
        if arguments.fails and self.progress_checker.step == 3:
            raise RuntimeError("an error in the training")
        return super().train_step(batch)


if __name__ == "__main__":
    devices = arguments.devices.split(",")
    options = {"save_every": 2, "resume": "auto", **arguments.options}
    trainer = build(
        ENGINES.get(arguments.engine),
        StateManagerAddon,
        task=SlowTask,
        model=net(dropout=0.1),
        device=devices if len(devices) > 1 else devices[0],
        save_path=arguments.folder,
        seed=arguments.seed,
        **options,
    )
    trainer.run(EPOCHS, data())
    end = weights(trainer)
    if trainer.is_main:
        torch.save(end, f"{arguments.folder}.pt")
    print(f"rank {trainer.rank} of {trainer.world_size} on {socket.gethostname()} ended", flush=True)
