"""What a step on several ranks costs, against the wrapper of torch by hand: python benchmarks/distributed.py.

Two processes over gloo train the same model on the same batches, by hand and with zae, in turns within one run. The
batches lie in a list, both sides read the loss of each step, and the weights of both must be bitwise the same in the
end. A step lasts from one call of the loss function to the next, on the slower rank. Shown are the ratios of the median
steps, of the fastest tenth, which other processes on the machine disturb less, and of the CPU time of both ranks. Each
is the median over several pairs of processes: where a process finds its memory moves the ratio of one pair by some
percent, also with the same loop on both sides, which ``--engines same`` shows.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from zae import Trainer
from zae.addons import FSDPAddon, MultiGPUAddon
from zae.distributed.spawn import spawn

WIDTHS = {64: 1.05, 512: 1.01}
"""Widths of the MLP, and the most that the median may be."""
BATCH = 32


class Task(Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch)}

    test_step = train_step


clock: list[tuple[float, float]] = []
"""Elapsed and CPU time at each call of the loss function."""


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    clock.append((time.perf_counter(), time.process_time()))
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(width, width), nn.ReLU()] if width > 64 else []
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), *hidden, nn.Linear(width, 5))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 20, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
        for _ in range(count)
    ]


class ByHand:
    """The loop as one writes it without a library."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.module = self.wrap(model), model
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def epoch(self, own: list[Any]) -> float:
        total = 0.0
        for batch in own:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.item()
        return total


class ShardedByHand(ByHand):
    """The same with ``fully_shard``."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for each in model.modules():
            if isinstance(each, nn.Linear):
                fully_shard(each, mesh=trained_on())
        return fully_shard(model, mesh=trained_on())


@functools.cache
def trained_on() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


ENGINES: dict[str, tuple[type[ByHand], type[Any] | None, dict[str, Any]]] = {
    "DDP": (ByHand, MultiGPUAddon, {}),
    "FSDP2": (ShardedByHand, FSDPAddon, {"fsdp_blocks": [nn.Linear]}),
    "same": (ByHand, None, {}),
}
"""What one writes by hand for an engine, its add-on, and the options of the add-on; "same" has no add-on."""


def turns(engine: str, width: int, steps: int, count: int) -> Tensor:
    """Return the durations of steps, by side (by hand, zae), step, and kind of time (elapsed, CPU)."""
    torch.set_num_threads(1)
    kind, add_on, options = ENGINES[engine]
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 2
    model = mlp(width)
    every = batches(steps * world)
    own = every[rank::world]
    hand = kind(copy.deepcopy(model))
    with ExitStack() as stack:
        if add_on is None:
            again = kind(model)
            module, epoch = again.module, lambda: again.epoch(own)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            trainer = Task.add_on(add_on)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
            stack.enter_context(trainer.ready())
            assert trainer.world_size == world
            module, epoch = trainer.unwrap(), lambda: trainer.run_epoch(every)
        sides = lambda: hand.epoch(own), epoch
        found = [[durations(side) for side in sides] for _ in range(count + 1)][1:]  # The first turn warms up.
        pairs = zip(hand.module.parameters(), module.parameters(), strict=True)
        assert all(torch.equal(local(a), local(b)) for a, b in pairs), "the weights differ"
    ranks = [torch.empty(0)] * world
    dist.all_gather_object(ranks, torch.cat([torch.stack(pair) for pair in found], dim=1))
    together = torch.stack(ranks)
    return torch.stack([together[..., 0].amax(0), together[..., 1].sum(0)], dim=-1)


def local(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter."""
    held: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return held


def durations(epoch: Callable[[], Any]) -> Tensor:
    """Return the duration of each step of an epoch on this rank."""
    dist.barrier()
    clock.clear()
    epoch()
    return torch.tensor(clock, dtype=torch.float64).diff(dim=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of an epoch")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of processes")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["DDP", "FSDP2"])
    parser.add_argument("--widths", nargs="*", type=int, default=[*WIDTHS])
    arguments = parser.parse_args()
    sys.stdout.write("| engine | width | by hand, us a step | median | fastest tenth | CPU | at most |\n")
    sys.stdout.write("|---" * 7 + "|\n")
    for engine in arguments.engines:
        for width in arguments.widths:
            sent = {"engine": engine, "width": width, "steps": arguments.steps, "count": arguments.turns}
            found = torch.stack([pair_of_processes(sent) for _ in range(arguments.repeats)])
            by_hand, ratios = found[:, 0, 0].median(), (found[:, 1] / found[:, 0]).median(0).values
            row = [engine, str(width), f"{by_hand:.0f}", *(f"{ratio:.3f}" for ratio in ratios)]
            sys.stdout.write(f"| {' | '.join([*row, str(WIDTHS.get(width, '-'))])} |\n")
            sys.stdout.flush()


def pair_of_processes(sent: dict[str, Any]) -> Tensor:
    """Return the median, the fastest tenth and the CPU time of a step in microseconds, of each side."""
    elapsed, busy = (spawn(turns, sent, [torch.device("cpu")] * 2, timeout=120) * 1e6).unbind(-1)
    return torch.stack([elapsed.quantile(0.5, dim=1), elapsed.quantile(0.1, dim=1), busy.mean(1)], dim=1)


if __name__ == "__main__":
    main()
