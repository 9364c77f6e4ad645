"""MultiGPUAddon over gloo, runs that start their own ranks: what travels there and back, devices, and scripts."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from kit.loggers import lines
from kit.rank_tasks import F64, Seen, Task, build, dataset, distance, forks, loader, network, same, weights
from zae import ConfigError, Trainer
from zae.addons import EarlyStoppingAddon, EMAAddon, JSONLLoggerAddon, MultiGPUAddon, StateManagerAddon
from zae.distributed import transfer
from zae.errors import CheckpointMismatch


def spawned(devices, **options):
    return build(
        Seen, (MultiGPUAddon, EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon), devices, patience=50, timeout=120.0,
        jsonl_path="log.jsonl", log_every=1,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), **options,
    )  # fmt: skip


def test_the_caller_s_objects_hold_what_rank_0_ended_with(recwarn):
    """Two runs of two ranks are those of one process, in the same objects; one log."""
    options = {"model": network(dtype=F64)}
    trainer = spawned(["cpu", "cpu"], **options)
    model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.scheduler
    single = build(
        Seen, (EMAAddon, EarlyStoppingAddon), model=network(dtype=F64), patience=50,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )  # fmt: skip
    for n_epoch in (1, 2):
        with forks():  # What travels is pickled all the same; test_distributed.py starts interpreters.
            here = trainer.run(n_epoch, loader(13, 2, 3, F64), loader(7, 2, dtype=F64))
        there = single.run(n_epoch, loader(13, 4, 3, F64), loader(7, 2, dtype=F64))
    assert dist.is_initialized() is False
    assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == len(trainer.state_dict()["MultiGPUAddon"]["ranks"])
    assert len(trainer.devices) == trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
    assert (trainer.model, trainer.optimizer, trainer.scheduler) == (model, optimizer, scheduler)
    assert distance(trainer, single) < 1e-12
    assert here["step"] == there["step"] == 12
    assert here["valid_metrics_history"][-1] == pytest.approx(there["valid_metrics_history"][-1])
    assert trainer.metrics == here
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert optimizer.state[model[0].weight]["step"] == single.optimizer.state[single.model[0].weight]["step"]
    assert scheduler.last_epoch == single.scheduler.last_epoch == 3
    for key, average in single.average.items():
        assert torch.allclose(trainer.average[key], average, rtol=0, atol=1e-12)
    assert len(trainer.log_test["loss"]) == 4
    records = lines(Path("log.jsonl"))
    assert [record["step"] for record in records if "train/loss" in record] == list(range(1, 13))
    assert len(records) == len(trainer.log_history)
    assert [str(each.message) for each in recwarn] == []


def test_a_sampler_that_draws_by_itself_goes_on_in_the_next_run():
    """``run(1); run(1)`` is ``run(2)``, though the sampler that drew was in other processes."""

    def run(*calls):
        data, drawn = dataset(12), Drawn(12)
        trainer = build(Task, (MultiGPUAddon,), ["cpu", "cpu"], timeout=120.0)
        with forks():
            for n_epoch in calls:
                trainer.run(n_epoch, DataLoader(data, 2, sampler=drawn))
        assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
        return weights(trainer), drawn.source.random()

    (first, after), (second, there) = run(1, 1), run(2)
    assert same(first, second)
    assert after == there


def test_what_the_caller_does_between_two_runs_stays(tmp_path):
    """Resume="auto" is for the first run of a script: the ranks of a second one begin from the caller's."""
    trainer = build(Task, (MultiGPUAddon, StateManagerAddon), ["cpu", "cpu"], timeout=120.0, save_path=tmp_path / "run",
                    resume="auto")  # fmt: skip
    with forks():
        trainer.run(1, loader(8, 2))
        trainer.apply_weights({name: torch.zeros_like(value) for name, value in trainer.model_state().items()})
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        trainer.run(1, loader(8, 2))
    assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
    assert trainer.progress_checker.epoch == 2
    assert not any(weight.any() for weight in trainer.unwrap().parameters())


class Drawn(Sampler):
    """A sampler with a generator of NumPy's, which nobody else seeds."""

    def __init__(self, size):
        self.size, self.source = size, np.random.default_rng(5)

    def __iter__(self):
        return iter(self.source.permutation(self.size).tolist())

    def __len__(self):
        return self.size


def test_what_cannot_travel_is_named_before_anything_starts():
    """The object that is sent, its class, the reason of pickle, and the remedy."""
    trainer = spawned(["cpu", "cpu"])
    trainer.hooks = {"end": [lambda: None]}
    with pytest.raises(ConfigError, match=r"^trainer, a Seen.*, cannot be sent .*lambda"):
        trainer.run(1, loader(4, 2))
    del trainer.hooks
    with open(__file__) as trainer.source, pytest.raises(ConfigError, match=r"^trainer, .*TextIOWrapper.*open files"):
        trainer.run(1, loader(4, 2))
    del trainer.source
    # What torch refuses to pickle nobody can define elsewhere.
    trainer.spare = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"^trainer, .*parametrized(.|\n)*start the script with torchrun"):
        trainer.run(1, loader(4, 2))
    del trainer.spare
    with pytest.raises(ConfigError, match=r"^loader, a generator, cannot be sent .*generators in setup"):
        trainer.run(1, (batch for batch in loader(4, 2)))

    class Local(Task):
        pass

    with pytest.raises(ConfigError, match=r"^trainer, a Local.*Local.*classes and functions at the top level"):
        build(Local, (MultiGPUAddon,), ["cpu", "cpu"]).run(1, loader(4, 2))
    assert trainer.world_size == 1


def test_what_the_main_script_defines_too_late_is_named(monkeypatch, tmp_path):
    """Below the guard of a script a class is there in the script's own process only."""
    late = type("Late", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Late", late, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    transfer.pack({"sample": late()}, tmp_path / "begin")
    assert type(transfer.unpack(tmp_path / "begin")["sample"]) is late
    monkeypatch.delattr(sys.modules["__main__"], "Late")
    with pytest.raises(ConfigError, match=r"Late does not exist when another process .* not under if __name__"):
        transfer.unpack(tmp_path / "begin")


def test_devices_are_those_asked_for():
    """A list without the add-on is refused, and so is one rank where two were meant."""
    with pytest.raises(ConfigError, match="MultiGPUAddon"):
        build(Task, (), ["cpu", "cpu"])
    trainer = build(Task, (MultiGPUAddon,), ["cpu", "cpu"])
    with pytest.raises(ConfigError, match=r"call run\(\)"):
        trainer.run_epoch(loader(4, 2))
    alone = build(Task, (MultiGPUAddon,), ["cpu"])
    assert alone.run(1, loader(4, 2))["step"] == 2
    assert alone.world_size == 1
    for option, value in (
        ("backend", 3),
        ("backend", "glo"),
        ("backend", "cpu:glo"),
        ("timeout", 0),
        ("init_method", 5),
        *(("init_method", each) for each in ("tcp://", "udp://localhost:1", "tcp://localhost:99999", "file://")),
    ):
        with pytest.raises(ConfigError, match=f"^{option}="):
            build(Task, (MultiGPUAddon,), **{option: value})
    build(Task, (MultiGPUAddon,), backend="cpu:gloo,cuda:nccl")


def test_the_state_of_two_ranks_is_named_where_one_loads_it(tmp_path):
    """Distributed to one process: refused by name; with the add-on and reshard=True it continues."""
    trainer = build(Task, (MultiGPUAddon, StateManagerAddon), ["cpu", "cpu"], save_path=tmp_path / "two", timeout=120.0)
    with forks():
        trainer.run(1, loader(8, 2))
    assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
    options = {"save_path": tmp_path / "one", "resume": str(tmp_path / "two")}
    with pytest.raises(CheckpointMismatch, match=r"was saved by 2 ranks .* and this run has 1"):
        build(Task, (StateManagerAddon,), **options).run(1, loader(8, 4))
    with pytest.raises(CheckpointMismatch, match=r"was saved by 2 ranks .* and this run has 1.*reshard=True"):
        build(Task, (MultiGPUAddon, StateManagerAddon), **options).run(1, loader(8, 4))
    again = build(Task, (MultiGPUAddon, StateManagerAddon), **options, reshard=True)
    assert again.run(2, loader(8, 4))["step"] == 4


def test_trainer_without_the_add_on_is_untouched():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trainer.add_on(MultiGPUAddon) is Trainer.add_on(MultiGPUAddon)
