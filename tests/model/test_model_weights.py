"""What is saved has the names of the plain module, whatever torch has put around it or around a part of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kit.hand import digest, loader, network
from kit.matrix import first_difference
from kit.table import Task
from zae.addons import CompileAddon, EMAAddon, StateManagerAddon
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.weights import load_weights
from zae.model.weights import plain_state, without_wrappers


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """One process that is a group, as DistributedDataParallel asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def in_parts(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def wrap_parts(model: nn.Module) -> nn.Module:
        assert isinstance(model, nn.Sequential)
        model[0], model[1] = wrap(model[0]), wrap(model[1])
        return model

    return wrap_parts


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": compiled,
    "data-parallel": DataParallel,
    "compiled-in-ddp": lambda model: DistributedDataParallel(compiled(model)),
    "parts-compiled": in_parts(compiled),
    "parts-data-parallel": in_parts(DataParallel),
    "parts-and-whole": lambda model: compiled(in_parts(lambda part: DataParallel(compiled(part)))(model)),
}


def make(wrap: Callable[[nn.Module], Any], folder: Any = None, **options: Any) -> Any:
    model = wrap(network())
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    cls = Task.add_on(EMAAddon, *([StateManagerAddon] if folder else []))
    if folder:
        options = {"save_path": folder, "resume": "auto", "save_every": 4, **options}
    return cls(model, "cpu", optimizer=optimizer, decay=0.5, seed=1, log_bar=False, **options)


def core_of(trainer: Any) -> Any:
    """A state with the parts whose names are those of weights."""
    state = trainer.state_dict()
    return {key: dict(state[key]) for key in ("model", "training_weights", "optimizer", "order", "EMAAddon")}


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("name", WRAPPERS)
def test_saved_names_are_those_of_the_plain_module(name: str) -> None:
    """In files, states and averages; a run begun with a wrapper is resumed without it, and the other way round."""
    wrap, keys = WRAPPERS[name], list(network().state_dict())
    plain, wrapped = make(lambda model: model, "plain"), make(wrap, "wrapped")
    for trainer in (plain, wrapped):
        trainer.run(1, loader())
    assert type(wrapped.unwrap()) is nn.Sequential
    state = wrapped.state_dict()
    assert list(state["model"]) == list(state["EMAAddon"]["average"]) == keys
    assert state["order"] == plain.state_dict()["order"]
    for path in (wrapped.save_model("model.safetensors"), wrapped.save_average("average.pt")):
        network().load_state_dict(load_weights(path), strict=True)
    assert set(load_checkpoint(wrapped.last_path)[1]) == set(keys)
    assert first_difference(core_of(plain), core_of(wrapped)) is None

    for folder, other in (("plain", "there"), ("wrapped", "here")):
        shutil.copytree(folder, other)
    there, here = make(wrap, "there"), make(lambda model: model, "here")
    for trainer in (there, here):
        trainer.run(2, loader())
    whole = make(lambda model: model)
    whole.run(2, loader())
    for trainer in (there, here):
        assert first_difference(core_of(whole), core_of(trainer)) is None


@pytest.mark.parametrize("name", WRAPPERS)
def test_states_of_older_versions_have_the_names_of_wrappers_and_load(name: str) -> None:
    source = make(WRAPPERS[name])
    source.run(1, loader())
    state, keys = source.state_dict(), list(source._module.state_dict())
    older = dict(zip(state["model"], keys, strict=True))
    assert older.keys() != set(older.values())
    average = {older[key]: value for key, value in state["EMAAddon"]["average"].items()}
    state |= {
        "model": {older[key]: value for key, value in (state["model"] | state.pop("training_weights")).items()},
        "order": {"0": [[older[key] for key in group] for group in state["order"]["0"]]},
        "EMAAddon": {"average": average},
    }
    for wrap in (lambda model: model, WRAPPERS[name]):
        trainer = make(wrap)
        trainer.load_state_dict(state)
        assert digest(trainer.unwrap()) == digest(source.unwrap())
        assert first_difference(trainer.average, source.average) is None
        trainer.load_evaluation_state(state)
        assert trainer.apply_weights(state["model"]) == ([], [])
        assert first_difference(trainer.average, source.average) is None


class Named(nn.Module):
    """A model whose own parts have the names of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self._orig_mod = nn.Sequential()
        self._orig_mod.module = nn.Linear(4, 2)


def test_a_part_that_is_called_like_one_of_a_wrapper_keeps_its_name() -> None:
    """Wrappers are known by what they are, not by their names."""
    model = Named()
    keys = list(model.state_dict())
    assert list(plain_state(model)) == keys
    assert without_wrappers(model) is model
    assert list(plain_state(DataParallel(compiled(model)))) == keys
    weights = {f"module.{key}": torch.full_like(value, 2.0) for key, value in model.state_dict().items()}
    trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer.apply_weights(weights) == ([], [])
    assert {value.mean().item() for value in model.state_dict().values()} == {2.0}


def test_two_keys_of_one_weight_are_refused() -> None:
    trainer = make(lambda model: model)
    weights = dict(network().state_dict())
    with pytest.raises(ValueError, match=r"1 unexpected \(module.0.weight\)"):
        trainer.apply_weights({**weights, "module.0.weight": weights["0.weight"]})


def test_a_compiled_model_beside_the_add_on_that_compiles() -> None:
    """The names stay plain."""
    model = compiled(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"compile_target": "step", "compile_backend": "eager"}
    trainer = Task.add_on(CompileAddon)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
    trainer.run(1, loader())
    assert list(trainer.model_state()) == list(network().state_dict())
