"""What FSDPAddon alone promises: which modules are blocks, and which models it refuses."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from kit.engines import F64, Block, Net, Task, data, net, sgd
from kit.ranks import each_rank, on_ranks
from zae import AddOnConflict, ConfigError
from zae.addons import CompileAddon, FSDPAddon


def trainer_of(model: nn.Module, task: type[Task] = Task, **options: object) -> Task:
    return task.add_on(FSDPAddon)(model, "cpu", **{"optimizer": sgd, "log_bar": False, **options})


def test_a_star_is_one_part_of_a_name():
    """ "blocks.*" chooses the blocks and not what they contain; a list of modules is refused."""
    assert list(trainer_of(Net(), fsdp_blocks=["blocks.*"]).blocks()) == ["blocks.0", "blocks.1"]
    assert list(trainer_of(Net(), fsdp_blocks="blocks.*.up").blocks()) == ["blocks.0.up", "blocks.1.up"]
    for chosen in ("blocks", "block?", nn.ModuleList, lambda name, module: name.startswith("blocks")):
        with pytest.raises(ConfigError, match=r"blocks is a ModuleList, .* write fsdp_blocks=\['blocks\.\*'\]"):
            trainer_of(Net(), fsdp_blocks=chosen).blocks()


class Scaled(Task):
    """Scale the loss by a parameter that only the optimizer holds."""

    def train_step(self, batch):
        (outside,) = self.optimizer.param_groups[1]["params"]
        return super().train_step(batch)["loss"] * outside.exp()


@on_ranks(2)
def test_a_parameter_outside_of_the_model_is_that_of_rank_0(world):
    """Without a seed, each process of a launcher makes other numbers."""
    begun, ends = torch.tensor(0.5 * (1 + dist.get_rank()), dtype=F64), []
    for rank in (dist.get_rank(), 0):
        model, outside = net(), nn.Parameter(torch.tensor(0.5 * (1 + rank), dtype=F64))
        optimizer = sgd([{"params": list(model.parameters())}, {"params": [outside]}])
        trainer = trainer_of(model, Scaled, optimizer=optimizer)
        trainer.run(1, data(16))
        assert trainer.world_size == world
        ends.append(outside.detach())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], begun)


@on_ranks(2)
def test_a_compiled_model_is_refused(world):
    """Its blocks would lie within one graph; CompileAddon is refused when the class is made."""
    with pytest.raises(AddOnConflict, match=r"FSDPAddon and CompileAddon do not go together.*compile_blocks=True"):
        Task.add_on(CompileAddon).add_on(FSDPAddon)
    trainer = trainer_of(torch.compile(net(), backend="eager"))
    with pytest.raises(ConfigError, match="write compile_blocks=True"):
        trainer.run(1, data(16))
    assert trainer.world_size == world


@on_ranks(2)
def test_what_fsdp_would_train_wrongly_is_refused_by_name(world):
    """With torch alone, hooks of a parameter that is replaced are dropped without an error."""

    def refused(message, model, **options):
        trainer = trainer_of(model, **options)
        with pytest.raises(ConfigError, match=message):
            trainer.run(1, data(16))
        assert trainer.world_size == world

    model = net()
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient.clamp(max=0.1))
    refused(r"blocks\.0\.up\.weight has a hook.*override clip\(\)", model)
    model = net()
    model.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    refused(r"head\.bias has a hook", model)
    model = net()
    model.temperature = nn.Parameter(torch.ones((), dtype=F64))
    refused(r"temperature has no dimension.*torch\.ones\(1\)", model)
    model = net()
    model.embed.sparse = True
    refused(r"embed \(Embedding\).*sparse=False", model)


@on_ranks(2)
def test_a_sharded_trainer_is_not_copied_and_rank_0_writes_its_weights(world, tmp_path):
    """The errors name the methods that do copy it; all ranks gather, and one file is written."""
    trainer, rank = trainer_of(net()), dist.get_rank()
    pickle.loads(pickle.dumps(trainer))
    trainer.run(1, data(16))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"lie in parts on 2 ranks.*save_state.*save_model"):
            copied(trainer)
    path = trainer.save_model(tmp_path / f"{rank}.safetensors")
    assert path == tmp_path / f"{rank}.safetensors"
    trainer.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["0.safetensors"]
    assert trainer.world_size == world


class Counting(Block):
    """Count the calls of forward."""

    calls = 0

    def forward(self, inputs):
        Counting.calls += 1
        return super().forward(inputs)


def test_one_process_prepares_the_blocks_too(caplog):
    """It recomputes activations and compiles blocks, in a second run as in the first; of a policy it warns once."""
    ends, compiled = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    torch._dynamo.register_backend(backend, name="counting")
    for options in ({}, {"activation_checkpointing": True}, {"compile_blocks": "counting"}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), Counting(), Counting(), nn.Linear(8, 11)).to(F64)
        trainer = trainer_of(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **options)
        counts = []
        for _ in range(2):
            Counting.calls = 0
            trainer.run(1, data(8))
            counts.append(Counting.calls)
            copy.deepcopy(trainer).run(1, data(8))
        ends.append((counts, trainer.model_state()))
    assert [counts for counts, _ in ends[:2]] == [[4, 4], [8, 8]]
    assert compiled
    for _, state in ends[1:]:
        assert all(torch.allclose(value, ends[0][1][name], rtol=0, atol=1e-15) for name, value in state.items())
    told = [each.message for each in caplog.records if "mp_policy" in each.message]
    assert len(told) == len(ends) * 3
    assert "AMPAddon" in told[0]


def test_meta_init_needs_what_other_processes_find():
    """A lambda is refused when the trainer is made, and the remedies of both errors work."""
    for devices, model, message in (
        (["cpu", "cpu"], lambda: Net(), r"Task\(Net, \.\.\.\), or Task\(functools\.partial\(Net"),
        ("cpu", Net(), r"needs what makes the model.*Task\(Net, \.\.\.\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            Task.add_on(FSDPAddon)(model, devices, optimizer=sgd, meta_init=True)
    for model in (Net, functools.partial(Net, blocks=1)):
        trainer = Task.add_on(FSDPAddon)(model, ["cpu", "cpu"], optimizer=sgd, meta_init=True)
        assert all(each.is_meta for each in trainer.unwrap().parameters())
    trainer_of(lambda: Net(blocks=1), meta_init=True, seed=0).run(1, data(8))


def test_a_rank_that_evaluates_alone_is_told_that_all_ranks_do(tmp_path):
    """It waits for the timeout, and not longer."""

    def ranks():
        trainer = trainer_of(net(), timeout=3)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed out") as raised:
                trainer.evaluate(data(4))
            (tmp_path / "notes").write_text("\n".join(raised.value.__notes__))
        else:
            with trainer.ready():
                while not (tmp_path / "notes").exists():
                    time.sleep(0.01)
        os._exit(0)  # The group is of no use anymore.

    each_rank(2, ranks, timeout=3)
    assert "evaluate on every rank, not under `if self.is_main`" in (tmp_path / "notes").read_text()
