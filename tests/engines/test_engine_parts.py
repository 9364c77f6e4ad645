"""Engines without a trainer: plain objects that a test makes in a process group of its own."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from kit.ranks import on_ranks
from zae import Trainer
from zae.addons import MultiGPUAddon, StateManagerAddon, TensorParallelAddon
from zae.addons.ddp import DDPEngine
from zae.addons.fsdp.addon import FSDPEngine
from zae.addons.pipeline.addon import PipelineEngine
from zae.addons.pipeline.schedules import Arrangement, Schedule
from zae.addons.tensor_parallel import TensorParallelEngine
from zae.distributed.mesh import Mesh
from zae.distributed.ranks import NotJoined, RanksEngine
from zae.errors import AddOnConflict, ConfigError, DistributedError
from zae.model.weights import load_fitted, plain_state
from zae.parts import Engine, SingleProcess, gather_dp
from zae.values.walk import is_sharded, redistribute_like

CPU = torch.device("cpu")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending" / "engines.md"


def ranks_engine(timeout: float = 30.0) -> RanksEngine:
    return RanksEngine(Mesh({}, ["replicate"], dist.get_world_size()), timeout)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def samples(rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def expected_gradients(world: int) -> list[Tensor]:
    """The mean of the gradients of all ranks, in one process."""
    model = network()
    for rank in range(world):
        (model(samples(rank)).square().mean() / world).backward()
    return [each.grad for each in model.parameters()]


def gradients_of(engine: Engine, model: nn.Module) -> list[Tensor]:
    return [engine.full_tensors(each.grad) for each in model.parameters()]


# ------------------------------------------------------------------------------------------------------- one process


def test_one_process_has_all_of_it() -> None:
    engine, model = SingleProcess(), network()
    assert (engine.rank, engine.world_size, engine.dp_rank, engine.dp_world_size) == (0, 1, 0, 1)
    assert engine.can_save_alone
    assert not engine.needs_lockstep_forward
    assert engine.gather("a") == gather_dp(engine, "a") == engine.gather("a", in_background=True) == ["a"]
    assert engine.reduce(torch.tensor(2.0)) == 2
    model(samples(0)).square().mean().backward()
    before = [each.grad.clone() for each in model.parameters()]
    engine.average_gradients([*model.parameters()])
    assert all(map(torch.equal, before, gradients_of(engine, model)))
    norm = torch.nn.utils.get_total_norm(before)
    assert torch.equal(engine.gradient_norm([*model.parameters()]), norm)


def test_an_engine_passes_on_what_it_does_not_override() -> None:
    class Counting(Engine):
        sums = 0

        def reduce(self, value: Tensor) -> Tensor:
            self.sums += 1
            return self.inner.reduce(value)

    engine = Counting(Counting(SingleProcess()))
    engine.reduce(torch.ones(1))
    assert (engine.sums, engine.inner.sums) == (1, 1)
    assert engine.find(SingleProcess) is engine.inner.inner
    assert engine.find(DDPEngine) is None
    assert not hasattr(engine, "chain"), "what no engine has is not there"
    for twin in (copy.copy(engine), copy.deepcopy(engine)):
        assert (twin.sums, twin.world_size, twin.can_save_alone) == (1, 1, True)


def test_a_process_of_a_launcher_knows_its_number_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NotJoined({"tensor": 2}, ["shard", "tensor"])
    assert (engine.rank, engine.world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert engine.rank == 0, "it has looked, and no launcher starts a process that runs already"
    twin = copy.copy(engine)
    assert (twin.rank, twin.world_size, twin.dp_rank, twin.dp_world_size) == (3, 4, 1, 2)
    assert twin.gather("a") == ["a"]


# ---------------------------------------------------------------------------------------------------------- two ranks


@on_ranks(2, 4)
def test_what_ranks_exchange(world: int) -> None:
    engine = ranks_engine()
    rank, numbers = engine.rank, list(range(world))
    own = torch.tensor(float(rank))
    assert engine.reduce(own) == sum(numbers)
    assert own == rank, "it is not changed"
    assert engine.gather(rank) == gather_dp(engine, rank) == engine.gather(rank, in_background=True) == numbers
    engine.rendezvous("evaluate")
    with pytest.raises(DistributedError, match="and another rank called"):
        engine.rendezvous("evaluate" if rank else "predict")
    engine.rendezvous("evaluate")
    for twin in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert (twin.rank, twin.gather(rank, in_background=True)) == (rank, numbers)


@on_ranks(2)
def test_ranks_of_one_layer_have_the_same_batches(world: int) -> None:
    engine = RanksEngine(Mesh({"tensor": 2}, ["shard", "tensor"], world), 30.0)
    assert (engine.dp_rank, engine.dp_world_size, engine.world_size) == (0, 1, 2)
    assert gather_dp(engine, engine.rank) == [0], "the first rank speaks for both"


@on_ranks(2, 3)
def test_gradients_are_averaged_after_the_backward(world: int) -> None:
    engine, model = ranks_engine(), network()
    with torch.no_grad():
        model[0].weight.add_(engine.rank)
    parameters = [*model.parameters()]
    engine.begin(model, parameters)
    assert torch.equal(model[0].weight, network()[0].weight), "rank 0 has sent its own"
    model(samples(engine.rank)).square().mean().backward()
    engine.average_gradients(parameters)
    for found, expected in zip(gradients_of(engine, model), expected_gradients(world), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(set(engine.gather(float(engine.gradient_norm(parameters))))) == 1


@on_ranks(2)
def test_a_rank_without_samples_counts_as_zeros(world: int) -> None:
    engine, model = ranks_engine(), network()
    if engine.rank == 0:
        model(samples(0)).square().mean().backward()
    engine.average_gradients([*model.parameters()])
    alone = network()
    alone(samples(0)).square().mean().backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad / world)


@on_ranks(2, 3)
def test_ddp_averages_in_the_backward(world: int) -> None:
    engine, model = DDPEngine(ranks_engine(), CPU), network()
    parameters = [*model.parameters()]
    engine.wrap(model, trains=True)
    engine.begin(model, parameters)
    for _ in range(2):
        model.zero_grad()
        wrapper = engine.begin_step(model, parameters)
        wrapper(samples(engine.rank)).square().mean().backward()
        engine.average_gradients(parameters)
        for found, expected in zip(gradients_of(engine, model), expected_gradients(world), strict=True):
            torch.testing.assert_close(found, expected)
    twin = copy.deepcopy(engine)
    assert twin.replica is None, "a copy has wrapped no model"


@on_ranks(2)
def test_ddp_averages_afterwards_what_the_wrapper_did_not_see(world: int) -> None:
    """A step calls a part of the model, and an optimizer trains a parameter outside of it."""
    engine, model = DDPEngine(ranks_engine(), CPU), network()
    outside = nn.Parameter(torch.ones(2))
    parameters = [*model.parameters(), outside]
    engine.wrap(model, trains=True)
    engine.begin(model, parameters)
    engine.begin_step(model, parameters)
    (model[2](model[1](model[0](samples(engine.rank)))).square().mean() + (outside * engine.rank).sum()).backward()
    engine.average_gradients(parameters)
    for found, expected in zip(model.parameters(), expected_gradients(world), strict=True):
        torch.testing.assert_close(found.grad, expected)
    assert outside.grad.tolist() == [0.5, 0.5]


@on_ranks(2)
def test_shards_are_whole_when_they_are_asked_for(world: int) -> None:
    engine, model = FSDPEngine(ranks_engine(), lambda: init_device_mesh("cpu", (world,))), network()
    whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        model[0].weight.add_(engine.rank)  # The weights are those of rank 0.
    assert engine.wrap(model, trains=True) is model
    held = dict(model.named_parameters())
    assert engine.wrap(model, trains=True) is model
    assert all(each is held[name] for name, each in model.named_parameters()), "it is divided once"
    assert engine.needs_lockstep_forward
    assert not engine.can_save_alone
    assert all(map(is_sharded, model.parameters()))
    state = plain_state(model)
    full = engine.full_tensors(state)
    assert all(torch.equal(full[name], value) for name, value in whole.items())
    assert all(each.is_meta for each in engine.full_tensors(state, keeps=False).values())
    part = redistribute_like(whole["0.weight"], model[0].weight)
    assert torch.equal(part.to_local(), model[0].weight.to_local())
    load_fitted(model, {name: value + 1 for name, value in whole.items()}, strict=True)
    assert torch.equal(engine.full_tensors(model[2].bias), whole["2.bias"] + 1)
    load_fitted(model, whole, strict=True)
    with engine.sync_context(last=False):  # A first micro-batch, whose gradients stay on their rank, is taken back.
        (model(samples(engine.rank)).square().mean() * 0).backward()
    with engine.sync_context(last=True):
        model(samples(engine.rank)).square().mean().backward()
    engine.average_gradients([*model.parameters()])
    expected = expected_gradients(world)
    for found, value in zip(gradients_of(engine, model), expected, strict=True):
        torch.testing.assert_close(found, value)
    norm = engine.gradient_norm([*model.parameters()])
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(expected))


@on_ranks(2)
def test_ddp_leaves_gradients_on_their_rank_until_the_last_micro_batch(world: int) -> None:
    engine, model = DDPEngine(ranks_engine(), CPU), network()
    parameters = [*model.parameters()]
    wrapper = engine.wrap(model, trains=True)
    engine.begin(model, parameters)
    assert engine.begin_step(model, parameters) is wrapper
    batch = samples(engine.rank)
    with engine.sync_context(last=False):
        (wrapper(batch).square().mean() / 2).backward()
    assert len({float(each) for each in engine.gather(model[0].weight.grad.sum())}) == world, "not averaged yet"
    with engine.without_wrapper(), torch.no_grad():
        for _ in range(engine.rank):  # Ranks have different numbers of batches.
            wrapper(batch)
    with engine.sync_context(last=True):
        (wrapper(batch).square().mean() / 2).backward()
    engine.average_gradients(parameters)
    for found, expected in zip(gradients_of(engine, model), expected_gradients(world), strict=True):
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_layers_are_divided_and_whole_when_they_are_asked_for(world: int) -> None:
    ranks = RanksEngine(Mesh({"tensor": 2}, ["tensor"], world), 30.0)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    engine, model = TensorParallelEngine(ranks, lambda: ranks.device_mesh(CPU), plan), network()
    whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    batch = samples(0)
    expected = network()(batch)
    with torch.no_grad():
        model[2].bias.add_(engine.rank)
    assert engine.wrap(model, trains=True) is model
    assert is_sharded(model[0].weight)
    torch.testing.assert_close(model(batch), expected)
    full = engine.full_tensors(plain_state(model))
    assert all(torch.equal(full[name], value) for name, value in whole.items())
    assert engine.is_same_on_ranks(batch)
    assert not engine.is_same_on_ranks(samples(engine.rank))
    tied = network()
    tied[2] = nn.Linear(6, 4)
    tied.add_module("3", nn.Linear(4, 6))
    tied[3].weight = tied[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight and 3\.weight are one parameter"):
        TensorParallelEngine(ranks, lambda: ranks.device_mesh(CPU), {"0": ColwiseParallel()}).wrap(tied, True)


@on_ranks(2)
def test_a_rank_keeps_the_stages_of_its_own(world: int) -> None:
    arrangement = Arrangement(["2"], Schedule("1F1B"), None, None, world)
    engine = PipelineEngine(RanksEngine(Mesh({"pipeline": 2}, ["pipeline"], world), 30.0), CPU, arrangement)
    model = network()
    whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        model[0].weight.add_(engine.rank)
    for _ in range(2):  # It is divided once.
        assert engine.wrap(model, trains=True).module is model
        held = {name for name, each in model.named_parameters() if not each.is_meta}
        assert held == ({"0.weight", "0.bias"} if engine.rank == 0 else {"2.weight", "2.bias"})
    full = engine.full_tensors(plain_state(model))
    assert all(torch.equal(full[name], value) for name, value in whole.items())
    for name, each in model.named_parameters():
        each.grad = None if each.is_meta else torch.full_like(each, float(len(name)))
    every = [torch.full_like(each, float(len(name))) for name, each in whole.items()]
    torch.testing.assert_close(engine.gradient_norm([*model.parameters()]), torch.nn.utils.get_total_norm(every))
    twin = copy.copy(engine)
    assert twin.chain is None, "a copy has divided no model"


@on_ranks(2)
def test_engines_of_two_dimensions_stack(world: int) -> None:
    """Shards outside, divided layers inside: each answers what it changes, and the ranks the rest."""
    ranks = RanksEngine(Mesh({"shard": 2}, ["shard", "tensor"], world), 30.0)
    engine = FSDPEngine(TensorParallelEngine(ranks, lambda: None, {}), lambda: None)
    assert (engine.needs_lockstep_forward, engine.can_save_alone, engine.dp_world_size) == (True, False, 2)
    assert engine.gather(engine.rank) == [0, 1]
    optimizer = torch.optim.AdamW(network().parameters())
    assert engine.optimizer_state(optimizer)["param_groups"][0]["params"] == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------------- the page's engine


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def trained(add_on: Any, folder: Path, n_epoch: int, **options: Any) -> Any:
    model, data = network(), torch.randn(21, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options |= {"save_path": folder, "log_bar": False, "seed": 5, "gradient_clip": 0.1}
    trainer: Any = Task.add_on(add_on, StateManagerAddon)(model, "cpu", optimizer=optimizer, **options)
    trainer.run(n_epoch, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return trainer


def names_of_the_page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(block, names)
    return names


@on_ranks(2)
def test_the_engine_of_the_page_trains_as_ddp(world: int, tmp_path: Path) -> None:
    """21 samples in batches of 4 on 2 ranks: in the last step of an epoch one rank has no samples."""
    names = names_of_the_page()
    names["check_the_mean_of_two_ranks"]()
    expected = trained(MultiGPUAddon, tmp_path / "ddp", 3).model_state()
    straight = trained(names["GatheringAddon"], tmp_path / "straight", 3)
    assert type(straight.engine) is names["GatheringEngine"]
    for name, value in straight.model_state().items():
        torch.testing.assert_close(value, expected[name])


def test_the_engine_of_the_page_is_refused_beside_divided_weights() -> None:
    with pytest.raises(AddOnConflict, match="TensorParallelAddon and GatheringAddon do not go together"):
        Task.add_on(names_of_the_page()["GatheringAddon"], TensorParallelAddon)
