"""A trainer's state: whole, loaded wholly or not at all, and weights alone."""

from __future__ import annotations

import copy
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR

from kit.hand import digest, loader, network
from kit.table import Task, core_of, fingerprint
from zae import Trainer
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon, JSONLLoggerAddon, StateManagerAddon
from zae.errors import CheckpointMismatch, CheckpointNotFound
from zae.schedulers import CosineAnnealingScheduler, SchedulerChain, WarmUpScheduler


def build(*add_ons: Any, model: Any = None, kind: Any = AdamW, **options: Any) -> Any:
    model = model or network()
    options.setdefault("optimizer", kind(model.parameters(), lr=0.05))
    options.setdefault("scheduler", lambda optimizer: StepLR(optimizer, 1, 0.5))
    if isinstance(options["optimizer"], torch.optim.Optimizer):
        options["scheduler"] = options["scheduler"](options["optimizer"])
    return Task.add_on(*add_ons)(model, "cpu", **options)


def trained(*add_ons: Any, **options: Any) -> Any:
    trainer = build(*add_ons, **options)
    torch.manual_seed(2)
    trainer.run(2, loader())
    return trainer


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def spoil(name: str, state: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """One damage each, and what the error says."""
    model = state["model"]
    if name == "missing weight":
        return {**state, "model": {k: v for k, v in model.items() if k != "0.bias"}}, r"1 missing \(0.bias\)"
    if name == "unexpected weight":
        return {**state, "model": {**model, "x": torch.ones(1)}}, r"1 unexpected \(x\)"
    if name == "shape":
        return {**state, "model": {**model, "0.bias": torch.ones(3)}}, r"0.bias is \(3,\) and must be \(8,\)"
    if name == "leftover":
        return {
            **state,
            "EMAAddon": {},
        }, r"this trainer has no add-on for the state of EMAAddon; add it with .add_on\(EMAAddon\)"
    if name == "other optimizers":
        return {
            **state,
            "optimizer": {"g": state["optimizer"]["0"]},
        }, r"with the optimizers \['g'\], and this .* \['0'\]"
    if name == "groups":
        groups = {"0": {"state": {}, "param_groups": [{"params": [0]}]}}
        return {**state, "optimizer": groups}, r"parameter groups of \[6\] parameters, .* saved with \[1\]"
    if name == "no scheduler":
        return {**state, "scheduler": {}}, r"with the schedulers \[\], and this trainer has \['0'\]"
    if name == "outside":
        return {**state, "outside": {"0": [torch.ones(2)]}}, r"shapes \[\], and the state has \[\(2,\)\]"
    if name == "counter":
        return {**state, "progress": {**state["progress"], "step": "3"}}, "no valid 'step'"
    if name in ODD:
        part, value = ODD[name]
        return {
            **state,
            part: {**state[part], **value},
        }, "(not one that zae has saved|was not saved by zae) .*nothing was loaded|the entry 'module' of the state is"
    return {key: value for key, value in state.items() if key != name}, f"the state has no {name}"


ODD: dict[str, tuple[str, dict[str, Any]]] = {  # What fits at the first look, and is hashed right where it was forged.
    "a history of numbers": ("records", {"valid_history": [3]}),
    "metrics in a list": ("records", {"best": [1]}),
    "a log of other entries": ("records", {"log_train": {"series": {}}}),
    "a place in words": ("position", {"absent_before": "x"}),
    "a call of run that is a number": ("progress", {"run_starts": [3]}),
    "groups of numbers": ("optimizer", {"0": {"state": {}, "param_groups": [7]}}),
    "an order of numbers": ("order", {"0": [3]}),
    "names of modules in lists": ("module", {"evaluating": [["0"]]}),
    "a stride in words": ("module", {"strides": {"0.weight": [0, "1"]}}),
    "strides that are a number": ("module", {"strides": {"0.weight": 8}}),
    "strides over too much memory": ("module", {"strides": {"0.weight": [0, 5000]}}),
    "strides of one tensor that fit, and of another that do not": (
        "module",
        {"strides": {"0.weight": [1, 8], "4.weight": [1, 1]}},
    ),
    "a weight's state without its step": (
        "optimizer",
        {"0": {"state": {0: {"exp_avg": torch.ones(8, 4)}}, "param_groups": [{"params": [*range(6)]}]}},
    ),
}


@pytest.mark.parametrize(
    "name",
    ["missing weight", "unexpected weight", "shape", "leftover", "other optimizers", "groups", "no scheduler",
     "outside", "counter", "model", "optimizer", "position", "records", *ODD],
)  # fmt: skip
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    """One error, and model, optimizer, counters and history are as before."""
    state, text = spoil(name, trained().state_dict())
    trainer = build()
    trainer.run(1, loader(seed=8))
    before = fingerprint(core_of(trainer))
    with pytest.raises(CheckpointMismatch, match=text):
        trainer.load_state_dict(state)
    assert fingerprint(core_of(trainer)) == before


def test_an_empty_tensor_loads_in_any_order_of_memory() -> None:
    trainer, other = build(), build()
    for each in (trainer, other):
        each.unwrap().register_buffer("empty", torch.empty(3, 0).t())
    other.load_state_dict(trainer.state_dict())
    assert other.unwrap().empty.shape == (0, 3)


def test_a_weight_that_is_no_tensor_changes_nothing() -> None:
    """Torch would load the others before it says so."""
    trainer = build()
    before = digest(trainer.model)
    weights = {**{key: value + 1 for key, value in trainer.model.state_dict().items()}, "0.bias": [0.0] * 8}
    for load in (
        trainer.apply_weights,
        lambda given: trainer.load_state_dict({**trainer.state_dict(), "model": given}),
    ):
        with pytest.raises(CheckpointMismatch, match=r"0.bias is a list and must be \(8,\)\); nothing was loaded"):
            load(weights)
        assert digest(trainer.model) == before


SAVING: dict[Any, dict[str, Any]] = {
    AMPAddon: {"precision": "bf16"},
    EMAAddon: {"decay": 0.5},
    EarlyStoppingAddon: {"patience": 9},
    JSONLLoggerAddon: {"jsonl_path": "log.jsonl"},
    StateManagerAddon: {"save_path": "run"},
}


@pytest.mark.parametrize("add_on", SAVING, ids=lambda add_on: add_on.__name__)
def test_an_entry_of_an_add_on_that_does_not_fit_changes_nothing(add_on: Any) -> None:
    """Without one of its parts, or with another kind of value there: it is refused, or no error is raised."""
    state = trained(add_on, **SAVING[add_on]).state_dict()
    (name,) = (key for key in state if key.endswith("Addon"))
    own, other = state[name], build(add_on, **SAVING[add_on])
    forged = [{}, 3, [], *({key: own[key] for key in own if key != left} for left in own)]
    forged += [{**own, key: value} for key in own for value in (None, 3, [], {"a": 1})]
    refused = 0
    for entry in forged:
        before = fingerprint(core_of(other))
        try:
            other.load_state_dict({**state, name: entry})
        except CheckpointMismatch:
            refused += 1
            assert fingerprint(core_of(other)) == before
    assert refused


class Extra(nn.Linear):
    """Refuses its extra state, whatever it is, when its weights are loaded already."""

    def get_extra_state(self) -> Any:
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("of another version")


def all_but_weights(trainer: Any) -> dict[str, Any]:
    return {**core_of(trainer), "model": None, "position": trainer.loader_position.state_dict()}


def pair(second: Any, model: Any = None) -> Any:
    """Two optimizers, and a chain of schedulers for each."""
    model = model or nn.ModuleDict({name: nn.Linear(4, 2) for name in ("a", "b")})

    def part(optimizer: Any, length: int) -> Any:
        return SequentialLR(optimizer, [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 2, 0.5)], milestones=[length])

    class Losses(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": {name: self.model[name](batch[0]).square().mean() for name in self.model}}

    return Losses(
        model, "cpu", optimizer={name: AdamW(model[name].parameters(), lr=0.05) for name in ("a", "b")},
        scheduler={"a": partial(part, length=2), "b": second},
    )  # fmt: skip


@pytest.mark.parametrize("fails", ["optimizer", "scheduler", "chain", "weights"])
def test_what_was_loaded_before_the_part_that_fails_is_taken_back(fails: str) -> None:
    """The second optimizer, a chain of other parts, or a module that refuses: the first is as it was."""

    def chain(optimizer: Any) -> Any:
        return SchedulerChain(WarmUpScheduler(optimizer, 9), CosineAnnealingScheduler(optimizer, 81))

    def model() -> Any:
        return nn.ModuleDict({"a": Extra(4, 2), "b": nn.Linear(4, 2)}) if fails == "weights" else None

    first, trainer = pair(chain, model()), pair(chain, model())
    for each, epochs in ((first, 3), (trainer, 1)):
        each.run(epochs, loader(seed=epochs))
    state, before = copy.deepcopy(first.state_dict()), fingerprint(all_but_weights(trainer))
    weights = digest(trainer.model)
    held = trainer.optimizer["a"].state[trainer.model["a"].weight]["exp_avg"]
    if fails == "optimizer":
        del state["optimizer"]["b"]["state"][0]["step"]
    if fails == "scheduler":
        state["scheduler"]["a"]["_schedulers"][1] = 3
    if fails == "chain":
        del state["scheduler"]["b"]["schedulers"][1]
    with pytest.raises(RuntimeError if fails == "weights" else CheckpointMismatch):
        trainer.load_state_dict(state)
    assert fingerprint(all_but_weights(trainer)) == before
    assert digest(trainer.model) == weights
    assert trainer.optimizer["a"].state[trainer.model["a"].weight]["exp_avg"] is held


def test_weights_that_code_of_the_model_refuses_are_taken_back() -> None:
    """By a hook before, or after, the loading of a module that comes late; alone as in a whole state."""
    for register in ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"):
        first, second = (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2))
        trainer, before = build(model=second), digest(second)
        refused: list[Any] = []

        def refuse(*_: Any, refused: list[Any] = refused) -> None:
            refused.append(1)
            if len(refused) == 1:
                raise RuntimeError("of another version")

        getattr(second[2], register)(refuse)
        with pytest.raises(RuntimeError, match="of another version"):
            trainer.apply_weights(first.state_dict())
        assert (digest(second), len(refused)) == (before, 2)
        trainer.apply_weights(first.state_dict())
        assert digest(second) == digest(first)


class Named(nn.Sequential):
    """Parameters of one shape, which an optimizer's state could go to any of."""

    def groups(self, order: list[int]) -> list[dict[str, Any]]:
        made = [self[index].bias for index in order]
        return [{"params": made[:2]}, {"params": made[2:], "lr": 0.2, "weight_decay": 0.1}]


def chain(order: list[int], kind: Any = AdamW) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Named(nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    return build(model=model, optimizer=kind(model.groups(order), lr=0.1))


@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)])
def test_an_optimizer_that_is_given_its_parameters_in_another_order(kind: Any) -> None:
    """Those of a set have another order in each process; each of them continues with its own state."""
    whole, first, second = (chain(order, kind) for order in ([0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 3, 2]))
    whole.run(4, list(loader(shuffle=False)))
    first.run(2, list(loader(shuffle=False)))
    second.load_state_dict(first.state_dict())
    second.run(2, list(loader(shuffle=False)))
    assert digest(second.model) == digest(whole.model)
    states = [{id(p): n for n, p in each.model.named_parameters()} for each in (whole, second)]
    assert [names[id(each.optimizer.param_groups[0]["params"][0])] for names, each in zip(states, (whole, second))] == [
        "0.bias", "1.bias",
    ]  # fmt: skip


def test_an_optimizer_of_a_model_that_was_compiled_when_it_was_saved() -> None:
    """Every name began otherwise then; the weights are taken without that, and the optimizer's state by place."""
    first, second = (chain([0, 1, 2, 3]) for _ in range(2))
    first.run(2, list(loader(shuffle=False)))
    state = first.state_dict()
    state["model"] = {f"_orig_mod.{key}": value for key, value in state["model"].items()}
    state["order"] = {"0": [[f"_orig_mod.{key}" for key in keys] for keys in state["order"]["0"]]}
    second.load_state_dict(state)
    assert fingerprint(core_of(second)["optimizer"]) == fingerprint(core_of(first)["optimizer"])


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """As many as were saved, of the same shapes, but not the same; and a state that is of all at once."""
    state = chain([0, 1, 2]).state_dict()
    with pytest.raises(
        CheckpointMismatch, match=r"optimizer 0 \(AdamW\) was saved with other parameters \(2.*, 3.bias"
    ):
        chain([0, 1, 3]).load_state_dict(state)

    class Flat(SGD):
        """Keeps one state for all, as LBFGS does."""

        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["all"] = torch.ones(1)
            return super().step(closure)

    flat = chain([0, 1, 2, 3], Flat)
    flat.run(1, list(loader()))
    chain([0, 1, 2, 3], Flat).load_state_dict(flat.state_dict())
    with pytest.raises(CheckpointMismatch, match="with its parameters in another order; build it as it was"):
        chain([1, 0, 2, 3], Flat).load_state_dict(flat.state_dict())


class Unfreezes(Task):
    """Trains its first layer from the second epoch on."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1 and len(self.optimizer.param_groups) == 1:
            self.unwrap()[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.unwrap()[0].parameters()), "lr": 0.03})


def test_a_group_that_training_has_added_is_added_again() -> None:
    """By the names of its parameters; a new trainer need not do it."""

    def make() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        return Unfreezes(model, "cpu", optimizer=AdamW(model[1].parameters(), lr=0.1), log_bar=False)

    whole, first, second = make(), make(), make()
    whole.run(4, list(loader(shuffle=False)))
    first.run(2, list(loader(shuffle=False)))
    second.load_state_dict(first.state_dict())
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.1, 0.03]
    second.run(2, list(loader(shuffle=False)))
    assert digest(second.model) == digest(whole.model)


def test_a_group_of_parameters_that_the_model_lacks_is_refused_and_nothing_is_loaded() -> None:
    def make(*layers: nn.Module) -> Any:
        model = nn.Sequential(*layers)
        return Task(model, "cpu", optimizer=AdamW(model[0].parameters(), lr=0.1), log_bar=False)

    grown = make(nn.Linear(4, 2))
    grown.model.append(nn.PReLU())
    grown.optimizer.add_param_group({"params": [*grown.model[1].parameters()], "lr": 0.03})
    other = make(nn.Linear(4, 2))
    with pytest.raises(CheckpointMismatch, match=r"1 unexpected \(1.weight\)"):
        other.load_state_dict(grown.state_dict())
    state = grown.state_dict()
    state["model"].pop("1.weight")
    with pytest.raises(CheckpointMismatch, match=r"has parameter groups of \[2\] .* saved with \[2, 1\]"):
        other.load_state_dict(state)
    assert len(other.optimizer.param_groups) == 1


def test_many_differences_are_listed_by_tens() -> None:
    """Counts and shapes; strict=False loads what fits."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
    with pytest.raises(CheckpointMismatch, match=r"16 missing \(0.weight, .*, \.\.\.\).*1 unexpected \(x\); nothing"):
        build(model=model).apply_weights({"x": torch.ones(1)})
    trainer = build()
    trainer.apply_weights({"0.bias": torch.full((8,), 2.0), "x": torch.ones(1)}, strict=False)
    assert trainer.model[0].bias.tolist() == [2.0] * 8
    with pytest.raises(CheckpointMismatch, match="of another shape"):
        trainer.apply_weights({"0.bias": torch.ones(3)}, strict=False)


@pytest.mark.parametrize("name", ["AutoBatchAddon", "LightningAddon", "SilentFaultGuardAddon"])
def test_the_state_of_an_add_on_that_was_removed_is_left_out_with_one_line(name: str, caplog: Any) -> None:
    saved = trained()
    trainer = build()
    trainer.load_state_dict({**saved.state_dict(), name: {"value": 3}})
    assert trainer.progress_checker.step == 12
    assert caplog.messages == [f"the state of {name} is not loaded: zae no longer has this add-on"]


def test_strict_false_leaves_out_what_nobody_takes(caplog: Any) -> None:
    trainer = build()
    trainer.load_state_dict(trained(EMAAddon).state_dict(), strict=False)
    assert trainer.progress_checker.step == 12
    assert "this trainer has no add-on for the state of EMAAddon" in caplog.text
    with pytest.raises(CheckpointMismatch, match=r"the state has no entry of EMAAddon: .* strict=False"):
        build(EMAAddon).load_state_dict(trained().state_dict())
    build(EMAAddon).load_state_dict(trained().state_dict(), strict=False)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_taken_off(prefix: str) -> None:
    source, trainer = network(5), build()
    trainer.apply_weights({prefix + key: value for key, value in source.state_dict().items()})
    assert digest(trainer.model) == digest(source)


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ".pt", ".pth"])
def test_resume_saved_keys_are_the_model_s(suffix: str, tmp_path: Any) -> None:
    """A file that plain torch reads strictly, without pickle."""
    trainer = trained(AMPAddon, EMAAddon, precision="bf16")
    path = trainer.save_model(tmp_path / "new" / f"model{suffix}")
    weights = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert list(weights) == list(network().state_dict()) or set(weights) == set(network().state_dict())
    plain = network(9)
    plain.load_state_dict(weights, strict=True)
    assert digest(plain) == digest(trainer.model)
    other = build()
    other.apply_weights(path)
    assert digest(other.model) == digest(plain)
    with pytest.raises(CheckpointNotFound):
        other.apply_weights(tmp_path / "nothing.ckpt")


def test_two_trainers_share_nothing_after_a_load() -> None:
    """Neither weights, nor the optimizer's buffers, nor what an add-on keeps."""
    first = trained(EMAAddon, EarlyStoppingAddon)
    state = first.state_dict()
    second = build(EMAAddon, EarlyStoppingAddon)
    second.load_state_dict(state)
    frozen = copy.deepcopy(second.state_dict())
    first.run(1, loader())
    assert fingerprint(second.state_dict()["model"]) == fingerprint(frozen["model"])
    assert fingerprint(second.state_dict()["optimizer"]) == fingerprint(frozen["optimizer"])
    assert fingerprint(second.state_dict()["EMAAddon"]) == fingerprint(frozen["EMAAddon"])


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
@pytest.mark.parametrize("factories", [False, True])
def test_a_fresh_trainer_goes_on_to_the_same_end(kind: Any, factories: bool) -> None:
    """With objects and with functions that make them, before and after the first set-up."""
    options: dict[str, Any] = {}
    if factories:
        options = {"optimizer": lambda p: kind(p, lr=0.05), "scheduler": lambda o: LambdaLR(o, lambda n: 1 / (n + 1))}
    whole, first, second = (build(kind=kind, **options) for _ in range(3))
    torch.manual_seed(2)
    whole.run(1, loader())
    whole.run(2, loader())
    torch.manual_seed(2)
    first.run(1, loader())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.manual_seed(5)
    second.run(2, loader())
    assert fingerprint(core_of(second)) == fingerprint(core_of(whole))


def test_a_seed_is_set_once_and_a_resume_goes_on_from_the_saved_streams() -> None:
    """Independent of the ambient seed."""
    ends = []
    for ambient in (1, 2):
        torch.manual_seed(ambient)
        trainer = build(seed=7)
        trainer.run(1, loader())
        trainer.run(1, loader())
        ends.append(digest(trainer.model))
    resumed, first = build(seed=7), build(seed=7)
    first.run(1, loader())
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.manual_seed(99)
    resumed.run(1, loader())
    assert {*ends, digest(resumed.model)} == {ends[0]}


@pytest.mark.parametrize("place", ["before the run", "after a run", "saved", "resumed"])
def test_the_state_of_a_trainer_that_never_ran_does_not_override_a_seed(place: str, tmp_path: Path) -> None:
    """Its random streams are of no run: ``seed=`` decides, whatever was drawn where the state was made or loaded."""
    fresh = build(seed=7)
    fresh.run(2, loader())
    torch.manual_seed(1234)
    unused = build(StateManagerAddon, seed=5, save_path=tmp_path)
    state = copy.deepcopy(unused.state_dict())
    del state["StateManagerAddon"]
    made = build(seed=7)
    if place == "after a run":
        made.run(1, loader())
    elif place in ("saved", "resumed"):
        path = unused.save_state()
        made = build(StateManagerAddon, seed=7, save_path=tmp_path, resume="auto" if place == "resumed" else False)
    if place == "saved":
        made.load_state(path)
    elif place != "resumed":
        made.load_state_dict(state)
    torch.manual_seed(4321)
    torch.rand(1)
    made.run(2, loader())
    assert digest(made.model) == digest(fresh.model)
    without = build()
    without.load_state_dict({key: value for key, value in unused.state_dict().items() if key != "StateManagerAddon"})
    assert without.loader_position.is_restored, "without a seed, the streams of the state are all there is"


class Images(Trainer):
    """A classifier of images."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

    test_step = train_step


@pytest.mark.parametrize("kind", [partial(SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.05, amsgrad=True)])
@pytest.mark.parametrize("in_rows", [False, True])
def test_a_fused_kernel_resumes_where_weights_are_not_in_rows(kind: Any, in_rows: bool) -> None:
    """The kernel goes through weight and state number by number, wherever they lie; shards are gathered in rows."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 2, 3, 3, generator=generator), torch.arange(4) % 3) for _ in range(2)]

    def made() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).to(memory_format=torch.channels_last)
        return Images(model, "cpu", optimizer=kind(model.parameters(), fused=True))

    straight, stopped, resumed = made(), made(), made()
    straight.run(4, batches)
    stopped.run(2, batches)
    state = copy.deepcopy(stopped.state_dict())
    if in_rows:
        state["module"]["strides"] = None
        for each in state["optimizer"]["0"]["state"].values():
            each.update({name: value.contiguous() for name, value in each.items() if value is not None})
    resumed.load_state_dict(state)
    resumed.run(2, batches)
    assert digest(resumed.unwrap()) == digest(straight.unwrap())


@pytest.mark.parametrize("monitor", ["accuracy", "loss"])
def test_a_scheduler_that_waits_for_a_metric_waits_anew_for_another(monitor: str) -> None:
    """Its best and its direction are of the monitor that the state was saved with, and do not compare."""

    def make(monitor: str) -> Any:
        class Told(Task):
            def test_step(self, batch: Any) -> Any:
                epoch = self.progress_checker.epoch
                return {"loss": 6.0 - epoch, "accuracy": 0.5 - epoch / 10}

        model = network()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, "max" if monitor == "accuracy" else "min", patience=1)
        return Told(model, "cpu", optimizer=optimizer, scheduler=scheduler, monitor=monitor)

    first, second = make("accuracy"), make(monitor)
    first.run(2, loader(), loader())
    assert (first.scheduler.best, first.scheduler.num_bad_epochs) == (0.4, 1)
    second.load_state_dict(first.state_dict())
    second.run(2, loader(), loader())  # The accuracy keeps falling, the loss too.
    bad, best, rate = (1, 0.4, 0.01) if monitor == "accuracy" else (0, 2.0, 0.1)
    found = second.scheduler.num_bad_epochs, second.scheduler.best, second.optimizer.param_groups[0]["lr"]
    assert found == (bad, best, pytest.approx(rate))


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("how", ["resume", "load_state", "load_state_dict"])
def test_a_load_holds_a_state_once(how: str, tmp_path: Path) -> None:
    """It grows by no more than 1.1 times the size of the state, what stays in the optimizer and average included."""

    def made(**options: Any) -> Any:
        model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(6)))
        options = {"save_path": tmp_path / "second", "optimizer": AdamW(model.parameters()), **options}
        return Scale.add_on(StateManagerAddon, EMAAddon)(model, "cpu", **options)

    first = made(save_path=tmp_path / "first")
    first.run(1, [torch.ones(2, 1000)])
    state, size = copy.deepcopy(first.state_dict()), 4 * 6 * 4_000_000
    trainer = made(resume=first.last_path if how == "resume" else False)
    peak, before, is_over = [0], _resident(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.0002):
            peak.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    if how == "load_state":
        trainer.load_state(first.last_path)
    elif how == "resume":
        trainer.current_run.set_up()
    else:
        trainer.load_state_dict(state)
    is_over.set()
    watcher.join()
    assert (max(peak) - before) / size < 1.1
    trainer.run(2 if how == "resume" else 1, [torch.ones(2, 1000)])
    first.run(1, [torch.ones(2, 1000)])
    assert digest(trainer.unwrap(), *trainer.average.values()) == digest(first.unwrap(), *first.average.values())


class Scale(Trainer):
    """The mean square of what the model returns."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step
