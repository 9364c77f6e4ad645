"""Units, readers, gangs and the training flow of fairseq2 as its documentation has them, in plain PyTorch."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torcheval.metrics import Mean


class Unit:
    """The sum of squared errors, and its number of targets; it may kill its process at a call."""

    def __init__(self, model: nn.Module, kill_at: int = 0) -> None:
        self._model, self.steps, self.kill_at, self.calls = model, [], kill_at, 0
        self.metric_bag = {"error": Mean()}

    @property
    def model(self) -> nn.Module:
        return self._model

    def set_step_nr(self, step_nr: int) -> None:
        self.steps.append(step_nr)

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch
        loss = nn.functional.mse_loss(self._model(inputs), targets, reduction="sum")
        self.metric_bag["error"].update(loss.detach() / len(inputs), weight=len(inputs))
        return loss, len(inputs)


class ScoreUnit:
    """A unit that evaluates: it only updates its metrics."""

    def __init__(self, model: nn.Module, display_name: str, factor: float = 1.0) -> None:
        self.model, self.display_name, self.factor = model, display_name, factor
        self.metric_bag = {"score": Mean()}

    def set_step_nr(self, step_nr: int) -> None:
        pass

    def __call__(self, batch: Any) -> None:
        assert not self.model.training
        inputs, targets = batch
        score = self.factor * (self.model(inputs) - targets).abs().mean()
        self.metric_bag["score"].update(score.detach(), weight=len(inputs))


class Reader:
    """Lists of ``num_accumulate`` batches, the last list of an epoch shorter."""

    def __init__(self, batches: list[Any], num_accumulate: int = 1) -> None:
        self.batches, self.num_accumulate, self.place = batches, num_accumulate, 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> list[Any]:
        if self.place >= len(self.batches):
            raise StopIteration
        self.place += self.num_accumulate
        return self.batches[self.place - self.num_accumulate : self.place]

    def reset(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


class FakeGang:
    """A gang of one process."""

    def __init__(self, device: str = "cpu") -> None:
        self.rank, self.size, self.device = 0, 1, torch.device(device)

    def as_process_group(self) -> Any:
        raise RuntimeError("`FakeGang` does not support conversion to a process group.")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass


class ProcessGroupGang:
    """A gang that wraps a process group."""

    def __init__(self, group: Any, device: str = "cpu") -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.device = group, torch.device(device)

    def as_process_group(self) -> Any:
        return self.group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


@dataclass
class Gangs:
    """The gangs of a rank."""

    root: Any
    dp: Any
    tp: Any


def root_gang() -> Any:
    return ProcessGroupGang(dist.group.WORLD) if dist.is_initialized() else FakeGang()


def parallel_gangs(root: Any, tp_size: int = 1) -> Gangs:
    """Divide the ranks as setup_parallel_gangs does: those of one tp gang are neighbours."""
    mesh = torch.arange(root.size).view(-1, tp_size)
    found: dict[str, Any] = {}
    for name, lines in (("tp", mesh), ("dp", mesh.t())):
        for line in lines.tolist():
            group = dist.new_group(line) if len(line) > 1 else None
            if root.rank in line:
                found[name] = FakeGang() if group is None else ProcessGroupGang(group)
    return Gangs(root, found["dp"], found["tp"])


def batches(sizes: tuple[int, ...] = (4, 1, 3, 4, 2), seed: int = 0) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=made), torch.randn(n, 1, generator=made)) for n in sizes]


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


class HandTrainer:
    """The training flow of the documentation: ``_do_run`` with ``_run_step`` and ``_validate``."""

    def __init__(
        self, unit: Any, reader: Any, optimizer: Any, scheduler: Any = None, *, steps: int, epochs: int | None = None,
        norm: float | None = None, valid: tuple[Any, ...] = (), validate_every: int = 1, seed: int = 2, dp: Any = None,
    ) -> None:  # fmt: skip
        self.unit, self.reader, self.optimizer, self.scheduler = unit, reader, optimizer, scheduler
        self.steps, self.epochs, self.norm, self.valid, self.validate_every = steps, epochs, norm, valid, validate_every
        self.seed, self.dp, self.scores = seed, dp or FakeGang(), {}
        self.step_nr, self.epoch_nr, self.ended = 0, 1, False
        self.model = unit._model
        if self.dp.size > 1:
            self.model = unit._model = DistributedDataParallel(self.model, process_group=self.dp.group)

    def run(self) -> dict[int, float]:
        torch.manual_seed(self.seed + self.dp.rank)
        self.model.train()
        while self._should_run_step():
            self.step_nr += 1
            self._run_step()
            if self._should_validate():
                self._validate()
        return self.scores

    def _should_run_step(self) -> bool:
        return not self.ended and self.step_nr < self.steps

    def _next_batches(self) -> list[Any] | None:
        try:
            return next(self.reader)
        except StopIteration:
            self.reader.reset()
        self.step_nr -= 1
        if self.epochs is not None and self.epoch_nr >= self.epochs:
            self.ended = True
        self.epoch_nr += 1
        return None

    def _run_step(self) -> None:
        if (several := self._next_batches()) is None:
            return
        self.unit.set_step_nr(self.step_nr)
        targets = 0
        for index, batch in enumerate(several):
            waits = index < len(several) - 1 and self.dp.size > 1
            with self.model.no_sync() if waits else nullcontext():
                loss, count = self.unit(batch)
                loss.backward()
            targets += count
        total = torch.tensor(targets)
        self.dp.all_reduce(total)
        for each in self.model.parameters():
            each.grad *= self.dp.size / total
        nn.utils.clip_grad_norm_(self.model.parameters(), torch.inf if self.norm is None else self.norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def _should_validate(self) -> bool:
        is_due = self.step_nr % self.validate_every == 0 or self.step_nr >= self.steps or self.ended
        return bool(self.valid) and is_due and self.step_nr not in self.scores

    @torch.no_grad()
    def _validate(self) -> None:
        self.model.eval()
        found = []
        for unit, reader in self.valid:
            for several in reader:
                for batch in several:
                    unit(batch)
            reader.reset()
            found.append(float(unit.metric_bag["score"].compute()))
            unit.metric_bag["score"].reset()
        self.scores[self.step_nr] = sum(found) / len(found)
        self.model.train()
