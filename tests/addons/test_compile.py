"""CompileAddon: the eager numbers from graphs, with the modes and options of torch.compile."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kit import hand
from zae import AddOnBase, ConfigError, StepError, Trainer
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EMAAddon,
    GradientAccumulationAddon,
)

FAST = {"compile_backend": "eager"}
# The graph as inductor would be given it: for what torch itself may lose on the way.
TRACED = {"compile_backend": "aot_eager"}


class Task(Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(output, targets), "output": output, "size": len(inputs)}

    test_step = train_step


def batches(dtype: torch.dtype = torch.float64) -> list[Any]:
    """Six batches, the last one short."""
    return [(inputs.to(dtype), targets) for inputs, targets in hand.loader(22, shuffle=False)]


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2)).double()


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1e-12),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01), 1e-10),
}


def trained(cls: type[Trainer], optimizer: str = "sgd", epochs: int = 2, task: Any = None, **options: Any) -> Any:
    model = network()
    task = cls(model, "cpu", optimizer=OPTIMIZERS[optimizer][0], gradient_clip=0.05, log_bar=False, **options)
    torch.manual_seed(2)
    task.run(epochs, batches(), batches())
    return task


def furthest(a: Any, b: Any) -> float:
    """The largest difference between two models' weights and buffers."""
    pairs = zip(a.unwrap().state_dict().values(), b.unwrap().state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("target", ["model", "step"])
def test_the_weights_are_those_of_eager(target: str, optimizer: str) -> None:
    """float64, with a clip that bites, BatchNorm's buffers, evaluation in between, and a short batch in each epoch."""
    eager = trained(Task, optimizer)
    compiled = trained(Task.add_on(CompileAddon), optimizer, compile_target=target, **TRACED)
    assert float(eager.grad_norm) > 0.05
    assert compiled.compile_report["graphs"] == 2  # Of full batches and of short ones.
    assert furthest(eager, compiled) < OPTIMIZERS[optimizer][1]
    assert hand.losses(compiled, "valid") == pytest.approx(hand.losses(eager, "valid"), abs=1e-10)
    assert [*compiled.log_train] == [*eager.log_train] == ["loss", "size"]


def test_it_composes_with_accumulation_and_averages() -> None:
    add_ons = (GradientAccumulationAddon, EMAAddon)
    options = {"gradient_accumulation_steps": 2, "decay": 0.5}
    eager = trained(Task.add_on(*add_ons), **options)
    compiled = trained(Task.add_on(CompileAddon, *add_ons), compile_target="step", **FAST, **options)
    assert furthest(eager, compiled) < 1e-12
    assert compiled.evaluate(batches()) == pytest.approx(eager.evaluate(batches()), abs=1e-12)


def test_an_add_on_counts_the_targets_of_a_graph() -> None:
    """A batch weighs as much as it has samples of the second class, and one more."""

    class WeightAddon(AddOnBase):
        layer = "loop"

        def count_targets(self, values: Any, batch: Any) -> Any:
            super().count_targets(values, batch)
            return batch[1].sum() + 1.0

    add_ons, options = (WeightAddon, GradientAccumulationAddon), {"gradient_accumulation_steps": 2}
    eager = trained(Task.add_on(*add_ons), **options)
    compiled = trained(Task.add_on(CompileAddon, *add_ons), compile_target="step", **FAST, **options)
    plain = trained(Task.add_on(GradientAccumulationAddon), **options)
    assert compiled.compile_report["graphs"] == 2
    assert furthest(eager, compiled) < 1e-12 < furthest(eager, plain)


def test_checkpoints_are_interchangeable_with_eager_runs() -> None:
    compiled = trained(Task.add_on(CompileAddon), epochs=1, compile_target="step", **FAST)
    state = compiled.state_dict()
    assert list(state["model"]) == list(network().state_dict())
    eager = Task(network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], gradient_clip=0.05, log_bar=False)
    eager.current_run.set_up()
    eager.load_state_dict(state)
    for task in (eager, compiled):
        task.run(1, batches())
    assert furthest(eager, compiled) < 1e-12


@pytest.mark.parametrize("target", ["model", "step"])
def test_evaluation_is_never_stale(target: str) -> None:
    """After training with dropout, evaluation is without, and of the weights of this moment."""
    model = network(0.5)
    task = Task.add_on(CompileAddon)(
        model, "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, compile_target=target, **FAST
    )
    task.run(1, batches())
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            expected = [nn.functional.cross_entropy(model(x), y).item() for x, y in batches()]
            model.train()
            task.inference(batches())
            assert [float(out["loss"]) for out in task.inference(batches())] == expected
            model[0].weight.mul_(2)


class Reads(Task):
    """Decides by a value: no single graph can hold that."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        if out["loss"].item() > 1e9:
            raise RuntimeError("diverged")
        return out


class ByStep(Task):
    """Its loss depends on a number of Python that changes with every step."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        return {**out, "loss": out["loss"] * (1 + self.progress_checker.step)}


class Hooked(Task):
    """Doubles a gradient by a hook that comes after the set-up."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.model[0].weight.register_hook(lambda gradient: gradient * 2)


class Freezing(Task):
    """Trains its first layer every second epoch, so that momentum begins late for it."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.model[0].weight.requires_grad_(self.progress_checker.epoch % 2 == 1)


class OwnBackward(Task):
    """Differentiates in its own way."""

    def backward(self, loss: Any) -> None:
        super().backward(loss * 2)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("task", [Reads, ByStep, OwnBackward, Hooked, Freezing])
@pytest.mark.parametrize("target", ["model", "step"])
def test_what_a_graph_cannot_hold_is_computed_by_python(task: type[Trainer], target: str) -> None:
    """A branch on a value, a counter, a backward of one's own, hooks, and weights that are frozen for a while."""
    compiled = trained(task.add_on(CompileAddon), epochs=4, compile_target=target, **FAST)
    assert compiled.compile_report["graphs"] > 0
    assert furthest(trained(task, epochs=4), compiled) < 1e-12


def test_several_optimizers_and_a_loss_scale_go_with_both_targets() -> None:
    """Bitwise where torch only traces."""

    class Adversaries(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model.losses(batch[0].float())}

        test_step = train_step

    def gan(*add_ons: Any, **options: Any) -> Any:
        model = hand.Gan()
        cls = Adversaries.add_on(*add_ons)
        task = cls(model, "cpu", optimizer=model.optimizers(), monitor="loss/critic", **options)
        torch.manual_seed(2)
        task.run(2, batches())
        return task

    def mixed(precision: str, *add_ons: Any, **options: Any) -> Any:
        cls = Task.add_on(AMPAddon, *add_ons)
        options = {"gradient_clip": 0.05, "precision": precision, **options}
        task = cls(network().float(), "cpu", optimizer=OPTIMIZERS["sgd"][0], **options)
        task.run(2, batches(torch.float32))
        return task

    for target in ("model", "step"):
        assert furthest(gan(), gan(CompileAddon, compile_target=target, **FAST)) == 0
        for precision in ("bf16", "fp16"):
            compiled = mixed(precision, CompileAddon, compile_target=target, **FAST)
            assert compiled.compile_report["graphs"] > 0
            assert furthest(mixed(precision), compiled) <= 1e-6


def test_each_shape_is_compiled_for_itself_or_all_together() -> None:
    """A second run of the same shapes compiles nothing; other shapes are compiled once."""
    task = trained(Task.add_on(CompileAddon), epochs=5, **FAST)
    task.run(1, batches())
    assert task.compile_report["graphs"] == 2
    task.run(1, [(inputs[:3], targets[:3]) for inputs, targets in batches()])
    assert task.compile_report["graphs"] == 3
    dynamic = trained(Task.add_on(CompileAddon), epochs=5, compile_dynamic=True, **FAST)
    assert dynamic.compile_report["graphs"] == 1
    assert furthest(trained(Task, epochs=5), dynamic) < 1e-12


def test_many_trainers_of_a_process_are_compiled() -> None:
    """A search makes more of them than the graphs that torch keeps for one function."""
    kept = [trained(Task.add_on(CompileAddon), epochs=1, compile_target="step", **FAST) for _ in range(10)]
    assert [task.compile_report["graphs"] for task in kept] == [2] * 10


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compile_target": "stp"}, "compile_target='stp'; it must be 'model' or 'step'; did you mean 'step'"),
        ({"compile_mode": "max-autotun"}, "compile_mode: Unrecognized mode=max-autotun"),
        ({"compile_mode": "max-autotune", **FAST}, "chooses options of the backend 'inductor', and compile_backend="),
        ({"compile_mode": "default", "compile_options": {}}, "and compile_options is given too"),
        ({"compile_backend": "inducto"}, "did you mean 'inductor'"),
        ({"compile_backend": 3}, "compile_backend=3; it must be the name of a backend"),
        ({"compile_options": "max-autotune"}, "compile_options='max-autotune'; it must be a dict, for instance"),
        ({"compile_options": {"max_autotun": True}}, "compile_options: Unexpected optimization option max_autotun"),
        ({"compile_options": {"max_autotune": "yes"}}, "compile_options: Unexpected type of attr max_autotune"),
    ],
)
def test_options_that_cannot_be_meant(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Task.add_on(CompileAddon)(network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], **options)


@pytest.mark.parametrize("mode", torch._inductor.list_mode_options())
def test_each_mode_of_torch_is_taken_by_name(mode: str) -> None:
    task = Task.add_on(CompileAddon)(network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], compile_mode=mode)
    assert task.compile_mode == mode


def test_teardown_leaves_the_compiler_as_it_was() -> None:
    before = torch._dynamo.config.use_numpy_random_stream
    task = trained(Task.add_on(CompileAddon), epochs=1, **FAST)
    assert torch._dynamo.config.use_numpy_random_stream == before
    task.setup()
    task.setup()
    assert torch._dynamo.config.use_numpy_random_stream is True
    task.teardown()
    assert torch._dynamo.config.use_numpy_random_stream == before


@pytest.mark.exhaustive
def test_inductor_draws_dropout_like_eager_on_request() -> None:
    def losses(cls: type[Trainer], **options: Any) -> list[float]:
        task = cls(network(0.5), "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, **options)
        torch.manual_seed(2)
        task.run(1, batches())
        values: list[Tensor] = task.log_train["loss"]
        return [float(value) for value in values]

    options = {"compile_target": "step", "compile_options": {"fallback_random": True}}
    assert losses(Task.add_on(CompileAddon), **options) == pytest.approx(losses(Task), abs=1e-12)


@pytest.mark.parametrize("target", ["model", "step"])
def test_where_torch_compile_is_switched_off_the_step_is_eager(target: str) -> None:
    with torch._dynamo.config.patch(disable=True):
        task = trained(Task.add_on(CompileAddon), epochs=1, compile_target=target)
    assert task.compile_report["graphs"] == 0
    assert furthest(trained(Task, epochs=1), task) == 0


def fail(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no kernel for this machine")


@pytest.mark.parametrize("target", ["model", "step"])
def test_a_compiler_that_fails_ends_the_run(target: str) -> None:
    """Nothing goes on eagerly in its place, and no weight has moved."""
    model = network()
    before = hand.digest(model)
    task = Task.add_on(CompileAddon)(
        model, "cpu", optimizer=OPTIMIZERS["sgd"][0], compile_target=target, compile_backend=fail
    )
    with pytest.raises(RuntimeError, match="no kernel for this machine"):
        task.run(1, batches())
    assert hand.digest(model) == before


class Shaken(nn.Sequential):
    """Draws numbers that are not torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__(*network())
        np.random.seed(3)
        self.random, self.is_own = random.Random(3), kind == "random.Random"

    def forward(self, inputs: Tensor) -> Tensor:
        drawn: Any = self.random.random() if self.is_own else torch.from_numpy(np.random.rand(4))
        return super().forward(inputs * drawn)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("target", ["model", "step"])
@pytest.mark.parametrize("kind", ["numpy.random", "random.Random"])
def test_numbers_that_are_not_of_torch_are_drawn_as_in_eager(kind: str, target: str) -> None:
    """Torch would draw NumPy's from its own stream, and take those of a stream of one's own for constants."""
    ends, states = [], []
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), {"compile_target": target, **FAST})):
        model = Shaken(kind)
        task = cls(model, "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, **options)
        torch.manual_seed(2)
        task.run(2, batches())
        ends.append(task)
        states.append((np.random.get_state()[1].tolist(), model.random.getstate(), torch.get_rng_state().tolist()))
    assert furthest(*ends) < 1e-12
    assert states[0] == states[1]


# ------------------------------------------------------------------------------------- what eager does without thought


class Direct(nn.Module):
    """Its gradients are the batch itself, one number over and over, and twice the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4, 4).double()), nn.Parameter(torch.ones(3).double())
        self.twice = nn.ParameterList([nn.Parameter(torch.ones(4, 4).double()) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return (
            (inputs * self.scale).sum() + self.shift.sum() + ((self.twice[0] + self.twice[1]) * inputs.square()).sum()
        )


class DirectTask(Trainer):
    """The output is the loss."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[0])}

    test_step = train_step


def test_clipping_changes_no_memory_but_the_gradients_own() -> None:
    """A gradient that shares memory is clipped twice, or clips the batch; one that is expanded cannot be clipped."""
    loader = batches()[:5]
    before, ends = [inputs.clone() for inputs, _ in loader], []
    for cls, options in ((DirectTask, {}), (DirectTask.add_on(CompileAddon), {"compile_target": "step", **FAST})):
        task = cls(Direct(), "cpu", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), gradient_clip=0.05, **options)
        task.run(2, loader)
        ends.append(task)
    assert ends[1].compile_report["graphs"] == 1
    assert furthest(*ends) < 1e-12
    assert all(torch.equal(inputs, kept) for (inputs, _), kept in zip(loader, before, strict=True))


class Images(nn.Module):
    """Its gradients come in another order of memory than its weights, and one weight has gaps in its memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolve, self.classify = nn.Conv2d(3, 4, 2), nn.Parameter(torch.randn(2, 36))
        self.spaced = nn.Parameter(torch.ones(36, 6)[:, ::3])
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.convolve(inputs.to(memory_format=torch.channels_last)).tanh().flatten(1)
        return torch.einsum("bh,ch->bc", hidden, self.classify) + hidden @ self.spaced


def pictures() -> list[Any]:
    """Four batches, none short."""
    return [(torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(n)).double(), torch.arange(4) % 2)
            for n in range(4)]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_in_another_order_of_memory_steps_the_weights_it_is_of(optimizer: str) -> None:
    """A fused kernel goes through both number by number, wherever they lie; by hand autograd puts them in order."""
    ends = []
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), {"compile_target": "step", **FAST})):
        task = cls(Images(), "cpu", optimizer=OPTIMIZERS[optimizer][0], **options)
        task.run(2, pictures())
        ends.append(task)
    assert ends[1].compile_report["graphs"] == 1
    assert furthest(*ends) < OPTIMIZERS[optimizer][1]


class Replacing(Task):
    """Resets its classifier in the second epoch, and has the optimizer's groups exchange what they hold."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1:
            first, second = self.optimizer.param_groups
            self.replaced = second["params"].pop()  # Kept, so that nothing else is in its place.
            self.model.classify = nn.Parameter(self.replaced.detach().flip(0))
            first["params"], second["params"] = [*second["params"], self.model.classify], first["params"]
            del self.optimizer.state[self.replaced]


@pytest.mark.parametrize("target", ["model", "step"])
def test_what_is_known_of_a_parameter_is_not_taken_for_what_is_known_of_the_one_in_its_place(target: str) -> None:
    """A new weight is stepped by its own gradient, in its own order of memory, at the rate of its own group."""
    ends = []
    for cls, options in ((Replacing, {}), (Replacing.add_on(CompileAddon), {"compile_target": target, **FAST})):
        model = Images()
        groups = [{"params": model.convolve.parameters(), "lr": 0.1}, {"params": [model.spaced, model.classify]}]
        task = cls(model, "cpu", optimizer=torch.optim.AdamW(groups, lr=0.01), gradient_clip=0.5, **options)
        task.run(3, pictures())
        ends.append(task)
    assert ends[1].compile_report["graphs"] > 0
    assert furthest(*ends) < OPTIMIZERS["adamw"][1]


class Watched(Task):
    """Halves what its first layer returns, from the second epoch on."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1:
            self.model[0].register_forward_hook(lambda module, inputs, output: output / 2)


@pytest.mark.parametrize("target", ["model", "step"])
def test_a_hook_of_a_module_that_comes_later_is_called(target: str) -> None:
    """By itself, torch does not look for hooks that a module did not have when it was compiled."""
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    ends = []
    for cls, options in ((Watched, {}), (Watched.add_on(CompileAddon), {"compile_target": target, **FAST})):
        torch.manual_seed(3)
        task = cls(nn.Sequential(nn.Linear(4, 2)).double(), "cpu", optimizer=OPTIMIZERS["sgd"][0], **options)
        task.run(2, batches())
        ends.append(task)
    assert ends[1].compile_report["graphs"] == 4  # Of two shapes, before and after.
    assert furthest(*ends) < 1e-12
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before


class NoLoss(Task):
    """Misspells it."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"los": super().train_step(batch)["loss"]}


class NoMapping(Task):
    """Forgets the dict, and returns more than the loss."""

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch)["loss"], 1.0


@pytest.mark.parametrize(("cls", "told"), [(NoLoss, "rename 'los' to 'loss'"), (NoMapping, "return a dict")])
def test_a_step_that_is_wrong_is_told_so_in_the_same_words(cls: type[Trainer], told: str) -> None:
    """The compiler does not hide it."""
    with pytest.raises(StepError, match=told):
        trained(cls.add_on(CompileAddon), compile_target="step", **FAST)
