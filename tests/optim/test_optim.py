"""One or several optimizers and schedulers, in any form; what cannot train the model is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from kit.hand import Gan, digest, loader, network
from kit.table import Task
from zae import ConfigError, Trainer, optim
from zae.addons import EMAAddon, GradientAccumulationAddon
from zae.optim import factories


def test_every_form_is_named() -> None:
    assert factories.as_dict((1, 2)) == {"0": 1, "1": 2}
    assert factories.as_dict({1: "x"}) == {"1": "x"}
    assert factories.map_entries({"a": 1}, lambda name, each: (name, each)) == {"a": ("a", 1)}
    assert factories.map_entries(None, lambda name, each: each) is None


def test_optimizers_that_cannot_train_the_model() -> None:
    """With the counts of parameters."""
    model, other = network(), network()
    held = len(list(model.parameters()))
    with pytest.raises(ConfigError, match=rf"has {held} parameters, none of which is among the {held} of the model"):
        Task(model, "cpu", optimizer=SGD(other.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"optimizer is None.*AdamW\(model\.parameters\(\)\)"):
        Task(model, "cpu")
    with pytest.raises(ConfigError, match="optimizer is a str"):
        Task(model, "cpu", optimizer="adam")
    with pytest.raises(ConfigError, match=r"optimizer\['c'\] is an int"):
        Task(model, "cpu", optimizer={"g": SGD(model.parameters()), "c": 3})
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="was made for another optimizer than the one given"):
        Task(model, "cpu", optimizer=optimizer, scheduler=StepLR(SGD(model.parameters()), 1))
    with pytest.raises(ConfigError, match="scheduler is a str"):
        Task(model, "cpu", optimizer=optimizer, scheduler="cosine")


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    """By the name of the parameter: instances at construction, factories before the first step."""
    model = network()
    name = next(iter(dict(model.named_parameters())))
    with pytest.raises(ConfigError, match=rf"optimizers '0' and '1' share the parameter {name}, which both"):
        Task(model, "cpu", optimizer=[SGD(model.parameters(), lr=0.1), Adam([model.get_parameter(name)])])
    before = digest(model)
    both = {"a": lambda parameters: SGD(parameters, lr=0.1), "b": lambda parameters: Adam(parameters)}
    with pytest.raises(ConfigError, match=rf"optimizers 'a' and 'b' share the parameter {name}, which both"):
        Task(model, "cpu", optimizer=both).run(1, loader())
    assert digest(model) == before


def test_factories_that_return_something_else() -> None:
    model = network()
    with pytest.raises(ConfigError, match="the function given as optimizer returned a dict"):
        Task(model, "cpu", optimizer=lambda parameters: {}).run(1, loader())
    with pytest.raises(ConfigError, match="scheduler 'x' has no optimizer of that name"):
        Task(model, "cpu", optimizer=SGD, scheduler={"x": lambda o: StepLR(o, 1)})


def test_classes_are_factories_wherever_a_state_is_read_or_loaded() -> None:
    """As for ``run``: a plan, a state of before the first run, and one that is loaded then."""
    model, other = network(), network()
    first, second = (Task(m, "cpu", optimizer=Adam, scheduler=ReduceLROnPlateau) for m in (model, other))
    assert first.plan(2, loader(), loader()).last_step == 12
    assert first.state_dict()["optimizer"] == {}
    torch.manual_seed(3)
    first.run(2, loader(), loader())
    torch.manual_seed(3)
    third = Task(network(), "cpu", optimizer=Adam, scheduler=ReduceLROnPlateau)
    third.run(1, loader(), loader())
    second.load_state_dict(third.state_dict())
    second.run(1, loader(), loader())
    assert digest(model) == digest(other)
    assert second.scheduler.state_dict() == first.scheduler.state_dict()


class Relative(SGD):
    """Finds its rate itself, as Adafactor does with relative steps: there is None, or none at all."""

    def __init__(self, parameters: Any, **entry: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.pop("lr")
            group.update(entry)

    def step(self, closure: Any = None) -> None:
        for parameter in optim.parameters_of(self):
            parameter.data.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("entry", [{"lr": None}, {}])
def test_an_optimizer_that_has_no_rate_to_show_is_trained_with(entry: dict[str, Any]) -> None:
    """Planned, logged and recorded as any other, without a rate."""
    model, twin = network(), network()
    trainer = Task(model, "cpu", optimizer=Relative(model.parameters(), **entry), log_every=1)
    assert trainer.plan(1, loader()).learning_rates == {}
    torch.manual_seed(3)
    trainer.run(1, loader())
    torch.manual_seed(3)
    Task(twin, "cpu", optimizer=SGD(twin.parameters(), lr=0.1)).run(1, loader())
    assert digest(model) == digest(twin)
    assert set(trainer.train_history[-1]) == {"epoch", "step", "train_loss"}
    assert len(trainer.log_history) == 6


def test_a_list_of_factories_makes_several_schedulers_of_one_optimizer() -> None:
    """As a list of schedulers that are there already; ``plan`` knows their rates."""
    makers = [lambda o: StepLR(o, 1, 0.5), lambda o: StepLR(o, 2, 0.1)]
    rates = []
    for built in (False, True):
        model = network()
        optimizer = SGD(model.parameters(), lr=0.8)
        schedulers = [make(optimizer) for make in makers] if built else makers
        trainer = Task(model, "cpu", optimizer=optimizer, scheduler=schedulers)
        plan = trainer.plan(3, loader())
        trainer.run(3, loader())
        rates.append([row["lr"] for row in trainer.train_history])
        assert [plan.learning_rates["lr"][step - 1] for _, step in plan.epoch_ends] == rates[-1]
    assert rates[0] == rates[1] == pytest.approx([0.8, 0.4, 0.02])


def test_factories_get_the_model_s_parameters() -> None:
    model = network()
    trainer = Task(model, "cpu", optimizer=lambda parameters: SGD(parameters, lr=0.1))
    trainer.run(1, loader())
    assert [id(p) for p in optim.parameters_of(trainer.optimizer)] == [id(p) for p in model.parameters()]
    first = trainer.optimizer
    trainer.run(1, loader())
    assert trainer.optimizer is first, "made once"


def test_rates_of_groups_and_of_several_optimizers() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    groups = SGD([{"params": model[0].parameters(), "lr": 1.0}, {"params": model[1].parameters(), "lr": 2.0}])
    assert optim.learning_rates({"0": groups}) == {"lr": 1.0, "lr/1": 2.0}
    assert optim.learning_rates({"a": groups, "b": groups}) == {"lr/a": 1.0, "lr/a/1": 2.0, "lr/b": 1.0, "lr/b/1": 2.0}
    rate = Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    assert optim.learning_rates({"0": rate}) == {"lr": 0.5}


def test_what_is_clipped_together() -> None:
    """One optimizer: everything, in the model's order, frozen parts too, for they may thaw; several: each its own."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
    model[1].requires_grad_(False)
    outside = nn.Parameter(torch.zeros(1))
    one = SGD([*reversed(list(model[2].parameters())), *model[0].parameters(), outside])
    names = {id(p): name for name, p in [*model.named_parameters(), ("outside", outside)]}
    found = optim.parameters_to_clip({"0": one}, model)
    assert [[names[id(p)] for p in each] for each in found] == [
        [*(f"{n}.{kind}" for n in range(3) for kind in ("weight", "bias")), "outside"]
    ]
    several = {"a": SGD(model[0].parameters()), "b": SGD([*model[2].parameters(), outside])}
    found = optim.parameters_to_clip(several, model)
    assert [[names[id(p)] for p in each] for each in found] == [
        ["0.weight", "0.bias"], ["2.weight", "2.bias", "outside"],
    ]  # fmt: skip


def test_the_state_follows_the_parameters_to_their_device() -> None:
    """A state that was loaded before the model was moved."""
    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = Adam([weight])
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    factories.call_factories(optimizer, lambda name: None, torch.optim.Optimizer, "optimizer")
    devices = {key: value.device.type for key, value in optimizer.state[weight].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_a_resumed_schedule_counts_what_it_has_taken() -> None:
    """6 of 12 steps are taken."""
    trainers = []
    for _ in range(2):
        model = network()
        trainers.append(
            Task(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), scheduler_step_on_batch=True,
                 scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=12))
        )  # fmt: skip
    trainers[0].run(1, loader())
    trainers[1].load_state_dict(trainers[0].state_dict())
    trainers[1].run(1, loader())
    with pytest.raises(ConfigError, match="a length of 18 steps"):
        trainers[1].run(1, loader())


class Unsized:
    """A loader without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize(
    ("arguments", "on_batch", "refused"),
    [
        ({"n_epoch": None, "max_steps": 12}, False, ""),  # Two epochs of six batches.
        ({"n_epoch": None, "max_steps": 17}, False, ""),  # And an open one.
        ({"n_epoch": 99, "max_steps": 12}, False, ""),
        ({"n_epoch": 2, "steps_per_epoch": 99}, True, ""),  # The loader ends first.
        ({"n_epoch": None, "max_steps": 18}, False, "but this run has 3 epochs; create it with a length of 3"),
        ({"n_epoch": 3, "max_steps": 99}, False, "but this run has 3 epochs; create it with a length of 3"),
        (
            {"n_epoch": 2, "max_steps": 13, "length": False},
            True,
            "but this run has 13 optimizer steps; create it with a length of 13",
        ),
        ({"n_epoch": None, "max_steps": 9, "length": False}, False, "or a number of epochs: run(n_epoch, ...)"),
        ({"n_epoch": 9, "length": False}, True, "or run(..., max_steps=...)"),
    ],
)
def test_a_schedule_is_held_to_the_epochs_and_steps_that_a_run_really_takes(
    arguments: dict[str, Any], on_batch: bool, refused: str
) -> None:
    """Whichever of its ends comes first; ``plan`` refuses what ``run`` does, in the same words."""
    batches, given = list(loader()), {key: value for key, value in arguments.items() if key != "length"}
    model = network()
    trainer = Task(
        model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), scheduler_step_on_batch=on_batch,
        scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=12 if on_batch else 2),
    )  # fmt: skip
    stream = batches if arguments.get("length", True) else Unsized(batches)
    for call in (trainer.plan, trainer.run):
        if not refused:
            call(loader=stream, **given)
            continue
        with pytest.raises(ConfigError, match=re.escape(refused)):
            call(loader=stream, **given)
    assert bool(trainer.progress_checker.step) is not bool(refused)


class Clearing(SGD):
    """Keeps what it has seen of a step until it is told that the step is over, as optimizers for privacy do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps_of_now: list[int] = []
        self.cleared = 0

    def step(self, closure: Any = None) -> None:
        assert not self.steps_of_now
        self.steps_of_now.append(1)
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.steps_of_now.clear()
        self.cleared += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon, EMAAddon)])
def test_an_optimizer_s_own_zero_grad_is_called_as_by_hand(add_ons: Any) -> None:
    """After each step, and as an epoch begins; nobody pays for it whose optimizer has none."""
    model, by_hand = network(), network()
    optimizer, twin = Clearing(model.parameters(), lr=0.1), Clearing(by_hand.parameters(), lr=0.1)
    trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=[optimizer])
    batches = list(loader())
    torch.manual_seed(3)
    trainer.run(2, batches)
    torch.manual_seed(3)
    for inputs, targets in batches * 2:
        nn.functional.cross_entropy(by_hand(inputs), targets).backward()
        twin.step()
        twin.zero_grad()
    assert digest(model) == digest(by_hand)
    assert optimizer.cleared == 12 + 2
    assert twin.cleared == 12


def test_a_network_that_is_frozen_for_a_while_has_no_gradient_of_its_loss() -> None:
    """The loss of the other one still goes through it; its own is nobody's."""
    gan, by_hand = Gan(), Gan()
    batches = [torch.randn(4, 4) for _ in range(3)]

    class Adversarial(Trainer):
        def train_step(self, batch: Any) -> Any:
            self.model.critic.requires_grad_(self.progress_checker.step == 0)
            return {"loss": self.model.losses(batch)}

        test_step = train_step

    torch.manual_seed(3)
    Adversarial(gan, "cpu", optimizer=gan.optimizers()).run(1, batches)
    torch.manual_seed(3)
    optimizers = by_hand.optimizers()
    for step, batch in enumerate(batches):
        by_hand.critic.requires_grad_(step == 0)
        losses = by_hand.losses(batch)
        losses["generator"].backward(inputs=list(by_hand.generator.parameters()), retain_graph=True)
        if step == 0:
            losses["critic"].backward(inputs=list(by_hand.critic.parameters()))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert digest(gan) == digest(by_hand)
