"""What FSDPAddon alone promises: which modules are blocks, and which models it refuses."""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from kit.engines import F64, Block, Net, Task, data, distance, net, sgd
from kit.faults import wait_for
from kit.ranks import each_rank, on_ranks
from zae import AddOnConflict, ConfigError, DistributedError, Trainer
from zae.addons import CompileAddon, EMAAddon, FSDPAddon, GradientAccumulationAddon, GradientCheckpointingAddon
from zae.distributed.collectives import BUCKET, broadcast
from zae.distributed.ranks import RanksEngine
from zae.loop.rank_states import RankStates


def trainer_of(model: nn.Module, task: type[Task] = Task, add_ons: tuple[type, ...] = (), **options: object) -> Task:
    return task.add_on(FSDPAddon, *add_ons)(model, "cpu", **{"optimizer": sgd, "log_bar": False, **options})


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
def test_out_of_memory_while_gathering_is_said_so(world):
    """The other ranks are not blamed."""
    trainer = trainer_of(net())
    trainer.run(1, data(16))
    row = torch.ones(1, dtype=F64).expand(2**46)  # 512 TiB, of one number.
    mesh = trainer.engine.find(RanksEngine).device_mesh(trainer.device)
    huge = DTensor.from_local(row, mesh, [Shard(0)], run_check=False)
    with pytest.raises(RuntimeError, match="memory") as caught:
        trainer.engine.full_tensors(huge)
    assert type(caught.value) is not DistributedError
    assert "was gathering a tensor of shape" in caught.value.__notes__[0]
    assert trainer.world_size == world


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
    model.embed.sparse = True
    refused(r"embed \(Embedding\).*sparse=False", model)
    model = net()
    model.embed.max_norm = 1.0
    refused("embed has max_norm.*Write max_norm=None", model)


@on_ranks(2)
def test_what_torch_refuses_to_shard_gets_a_remedy(world):
    """Beside the error of torch is what to write."""
    strided, mixed = net(), net()
    strided.head.weight = nn.Parameter(torch.randn(8, 11, dtype=F64).t())
    mixed.head.float()
    for model, remedy in ((strided, "memory_format=torch.contiguous_format"), (mixed, "modules of one dtype each")):
        trainer = trainer_of(model)
        with pytest.raises((NotImplementedError, AssertionError)) as raised:
            trainer.run(1, data(16))
        assert remedy in str(raised.value.__notes__)
        assert trainer.world_size == world


class Renormalizing(Block):
    """Limit the norm of a weight in the forward, as EEGNet does."""

    def forward(self, inputs):
        self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.5)
        return super().forward(inputs)


class Replacing(Task):
    """Put another parameter in place of one after the first epoch."""

    def on_epoch_begin(self):
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1:
            head = self.unwrap().head
            head.weight = nn.Parameter(head.weight.detach() / 2)


@on_ranks(2)
def test_weights_that_are_changed_where_no_forward_would_see_it(world):
    """A gathered block is dropped after its forward, and a replaced parameter is not gathered at all."""
    model = net()
    model.blocks[1] = Renormalizing().to(F64)
    trainer = trainer_of(model)
    with pytest.raises(ConfigError, match=r"forward of Linear changes its parameter blocks\.1\.up\.weight"):
        trainer.run(1, data(16))
    trainer = trainer_of(net(), Replacing)
    with pytest.raises(ConfigError, match=r"head\.weight was replaced.*Change weights in place"):
        trainer.run(2, data(16))
    assert trainer.progress_checker.step == 2
    assert trainer.world_size == world


def by_attribute(parameters):
    """Return an optimizer with a group of the parameters that are marked."""
    groups = {True: [], False: []}
    for each in parameters:
        groups[hasattr(each, "decays")].append(each)
    return torch.optim.SGD([{"params": groups[True], "weight_decay": 0.5}, {"params": groups[False]}], lr=0.1)


@on_ranks(2)
def test_attributes_of_parameters_stay(world):
    """A factory may choose its groups by them."""
    model = net()
    model.head.weight.decays = True
    trainer = trainer_of(model, optimizer=by_attribute)
    trainer.run(1, data(16))
    (decayed,) = trainer.optimizer.param_groups[0]["params"]
    assert decayed is trainer.unwrap().head.weight
    assert isinstance(decayed, DTensor)
    assert trainer.world_size == world


class Heads(nn.Module):
    """A head for each task."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4, dtype=F64)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 1, dtype=F64) for name in "ab"})


class OneHead(Heads):
    def forward(self, inputs, name):
        return self.heads[name](self.body(inputs).tanh())


class BothHeads(Heads):
    def forward(self, inputs, name):
        found = {each: head(self.body(inputs).tanh()) for each, head in self.heads.items()}
        return found[name] + 0 * sum(found.values())


class Tasks(Trainer):
    def train_step(self, batch):
        name, inputs = batch
        return {"loss": self.model(inputs, name).square().mean(), "num_targets": len(inputs)}

    test_step = train_step


@on_ranks(2)
def test_ranks_that_use_other_parameters_are_refused(world):
    """The gradients of one head came into the other one, which has the same shape, and no exchange failed."""
    inputs = torch.randn(6, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    batches = [*zip("aaabaa", inputs)]
    refused = trainer_of(OneHead(), Tasks)
    with pytest.raises(DistributedError, match=r"share 0 of the data has heads.a.weight, heads.a.bias, and share 1"):
        refused.run(1, batches)
    assert refused.progress_checker.step == 1, "the second step was not made"
    dist.barrier()
    plain = functools.partial(torch.optim.SGD, lr=0.1)  # Of a momentum, a gradient of 0 is not the same as none.
    single = Tasks.add_on(GradientAccumulationAddon)(
        OneHead(), "cpu", optimizer=plain, log_bar=False, gradient_accumulation_steps=2
    )
    single.run(1, batches)
    both = trainer_of(BothHeads(), Tasks, optimizer=plain)
    both.run(1, batches)
    assert both.world_size == world
    assert distance(both, single) < 1e-12


def test_a_container_of_containers_is_no_block():
    """Only what has a forward can be gathered."""
    cells = [
        nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential(nn.Linear(2, 2))}) for _ in range(2)
    ]
    model = nn.Sequential(nn.ModuleList(cells))
    assert list(trainer_of(model).blocks()) == ["0.0.a", "0.0.b", "0.1.a", "0.1.b"]


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


class Encoder(Net):
    """A model with another method that uses its parameters, and its blocks."""

    def encode(self, tokens):
        return self.scale(self.head(self.norm(self.blocks[0](self.embed(tokens)))))


class Encodes(Task):
    def train_step(self, batch):
        return {"loss": self.model.encode(batch[0]).square().mean()}


@on_ranks(2)
def test_other_methods_than_forward_are_named(world):
    """Named, a method trains and evaluates as in one process; else the error says what to write."""
    with pytest.raises((ValueError, AttributeError), match=r"does not have a method decode"):
        trainer_of(Encoder(), fsdp_methods=["decode"]).run(1, data(16))

    def made(cls, **options):
        torch.manual_seed(0)
        return cls(Encoder().to(F64), "cpu", optimizer=sgd, log_bar=False, **options)

    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        made(Encodes.add_on(FSDPAddon)).run(1, data(16))
    assert "fsdp_methods=['encode']" in str(raised.value.__notes__)
    trainer, single = made(Encodes.add_on(FSDPAddon), fsdp_methods=["encode"]), made(Encodes)
    for _ in range(2):
        trainer.run(1, data(16, 4, False))
        single.run(1, data(16, 8, False))
        assert distance(trainer, single) < 1e-12
        assert trainer.evaluate(data(6)) == pytest.approx(single.evaluate(data(6)), rel=1e-9)
    assert trainer.world_size == world


MMAP_THRESHOLD = -3  # Of mallopt: larger tensors get memory of their own, which is given back when they are freed.


def resident(field):
    """Return the bytes of this process that are in memory, by the name of the entry."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


@pytest.mark.exhaustive
@on_ranks(2)
def test_weights_are_sent_in_buckets(world):
    """The values are those of rank 0, whatever the layout; beside the weights there are no two buckets."""
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 15) == 1  # What is freed is given back, as in a new process.
    shapes, size = [(1 << 20,)] * 16 + [(1 << 23,), (3, 5), (0,)], BUCKET // 4
    torch.manual_seed(dist.get_rank())
    tensors = [torch.randn(shape) for shape in shapes] + [torch.randn(5, 7).t(), torch.randn(3, dtype=F64)]
    broadcast([torch.randn(3)])  # The code of an exchange is in memory from here on.
    Path("/proc/self/clear_refs").write_text("5")  # The highest value is the present one again.
    before = resident("VmRSS")
    broadcast(tensors)
    assert resident("VmHWM") - before < 1.9 * BUCKET  # The transport has buffers and threads of its own, too.
    torch.manual_seed(0)
    expected = [torch.randn(shape) for shape in shapes] + [torch.randn(5, 7).t(), torch.randn(3, dtype=F64)]
    assert all(map(torch.equal, tensors, expected))
    assert sum(each.numel() for each in tensors) > 3 * size
    assert dist.get_world_size() == world


@on_ranks(2)
def test_rank_0_alone_has_what_it_writes(world, tmp_path):
    """The average too, which is a declared state: in a whole save the others leave it on the meta device."""
    trainer = Task.add_on(FSDPAddon, EMAAddon)(net(), "cpu", optimizer=sgd, log_bar=False, decay=0.5)
    trainer.run(1, data(16))
    state, whole = RankStates.read_state(trainer, in_parts=False), trainer.state_dict()
    for kind, each in (("model", state["model"]), ("average", state["EMAAddon"]["average"])):
        expected = whole["model"] if kind == "model" else whole["EMAAddon"]["average"]
        sharded = [name for name in each if not name.endswith("scale.factor")]
        assert [each[name].is_meta for name in sharded] == [dist.get_rank() > 0] * len(sharded)
        assert dist.get_rank() or all(torch.equal(each[name], expected[name]) for name in each)
    assert trainer.world_size == world


class Counting(Block):
    """Count the calls of forward."""

    calls = 0

    def forward(self, inputs):
        Counting.calls += 1
        return super().forward(inputs)


@pytest.mark.exhaustive
def test_one_process_prepares_the_blocks_too(caplog):
    """It compiles blocks, and computes them again, in a second run as in the first; of a policy it warns once."""
    ends, compiled = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    torch._dynamo.register_backend(backend, name="counting")
    for add_ons, options in (((), {}), ((GradientCheckpointingAddon,), {}), ((), {"compile_blocks": "counting"})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), Counting(), Counting(), nn.Linear(8, 11)).to(F64)
        trainer = trainer_of(
            model, add_ons=add_ons, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **options
        )
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
    """A lambda is refused before a process is started, and the remedies of both errors work."""
    with pytest.raises(ConfigError, match=r"needs what makes the model.*Task\(Net, \.\.\.\)"):
        Task.add_on(FSDPAddon)(Net(), "cpu", optimizer=sgd, meta_init=True)
    sent = Task.add_on(FSDPAddon)(lambda: Net(), ["cpu", "cpu"], optimizer=sgd, meta_init=True)
    with pytest.raises(ConfigError, match=r"cannot be sent to another process: .*lambda.*functions at the top level"):
        sent.run(1, data(8))
    for model in (Net, functools.partial(Net, blocks=1)):
        trainer = Task.add_on(FSDPAddon)(model, ["cpu", "cpu"], optimizer=sgd, meta_init=True)
        assert all(each.is_meta for each in trainer.unwrap().parameters())
    trainer_of(lambda: Net(blocks=1), meta_init=True, seed=0).run(1, data(8))


class Tied(nn.Module):
    """One weight of 40 rows embeds tokens and predicts them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@on_ranks(2)
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_tied_weights_are_gathered_and_saved_once(world, tmp_path, name):
    """As one process saves them; a model that is tied loads the file."""
    trainer = trainer_of(Tied(), seed=0)
    trainer.run(1, data(8 * world))
    path = trainer.save_model(tmp_path / name)
    alone = Task(Tied(), "cpu", optimizer=sgd, log_bar=False)
    if trainer.is_main:
        alone.apply_weights(path)
        size = alone.save_model(tmp_path / f"alone-{name}").stat().st_size
        assert path.stat().st_size == pytest.approx(size, abs=256)
    state = trainer.state_dict()["model"]
    assert state["head.weight"] is state["embed.weight"]


def test_a_rank_that_evaluates_alone_is_told_that_all_ranks_do(tmp_path):
    """It waits for the timeout, and not longer."""

    def ranks():
        trainer = trainer_of(net(), timeout=8)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed out") as raised:
                trainer.evaluate(data(4))
            (tmp_path / "notes").write_text("\n".join(raised.value.__notes__))
        else:
            with trainer.ready():
                wait_for((tmp_path / "notes").exists)
                os._exit(0)  # The end of the block is for all ranks too.
        os._exit(0)  # The group is of no use anymore.

    each_rank(2, ranks, timeout=8)
    assert "evaluate on every rank, not under `if self.is_main`" in (tmp_path / "notes").read_text()
