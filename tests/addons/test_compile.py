"""CompileAddon: the eager numbers from one graph, and what a graph does not support is eager or refused (issue 6)."""

from __future__ import annotations

import logging
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
from zae.compiling.benchmark import Benchmark

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
@pytest.mark.parametrize("mode", ["model", "graph"])
def test_the_weights_are_those_of_eager(mode: str, optimizer: str) -> None:
    """float64, with a clip that bites, BatchNorm's buffers, evaluation in between, and a short batch in each epoch."""
    eager = trained(Task, optimizer)
    compiled = trained(Task.add_on(CompileAddon), optimizer, compile_mode=mode, **TRACED)
    assert float(eager.grad_norm) > 0.05
    assert compiled.compile_report["kept"] == mode
    assert furthest(eager, compiled) < OPTIMIZERS[optimizer][1]
    assert compiled.get_loss_history("test") == pytest.approx(eager.get_loss_history("test"), abs=1e-10)
    assert [*compiled.log_train] == [*eager.log_train] == ["loss", "size"]


@pytest.mark.parametrize("mode", ["model", "graph"])
def test_a_short_batch_is_not_compiled_again(mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = trained(Task.add_on(CompileAddon), epochs=5, compile_mode=mode, **FAST)
    assert compiled.compile_report["graphs"] == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_it_composes_with_accumulation_and_averages() -> None:
    add_ons = (GradientAccumulationAddon, EMAAddon)
    options = {"gradient_accumulation_steps": 2, "decay": 0.5}
    eager = trained(Task.add_on(*add_ons), **options)
    compiled = trained(Task.add_on(CompileAddon, *add_ons), compile_mode="graph", **FAST, **options)
    assert furthest(eager, compiled) < 1e-12
    assert compiled.evaluate(batches()) == pytest.approx(eager.evaluate(batches()), abs=1e-12)


def test_it_compiles_the_steps_of_a_global_batch_size() -> None:
    """Two batches of four make a step; the window at the end of an epoch is shorter, and its last batch too."""
    tasks = []
    for add_ons, options in (((), {}), ((CompileAddon,), {"compile_mode": "graph", **FAST})):
        task = Task.add_on(*add_ons, GradientAccumulationAddon)(
            network().float(), "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, global_batch_size=8, **options
        )
        task.run(2, hand.loader(22, shuffle=False))
        tasks.append(task)
    assert tasks[1].compile_report["graphs"] == 1
    assert tasks[1].progress_checker.step == 6
    assert furthest(*tasks) < 1e-6


def test_an_add_on_counts_the_targets_of_a_graph() -> None:
    """A batch weighs as much as it has samples of the second class, and one more."""

    class WeightAddon(AddOnBase):
        layer = "loop"

        def count_targets(self, values: Any, batch: Any) -> Any:
            super().count_targets(values, batch)
            return batch[1].sum() + 1.0

    add_ons, options = (WeightAddon, GradientAccumulationAddon), {"gradient_accumulation_steps": 2}
    eager = trained(Task.add_on(*add_ons), **options)
    compiled = trained(Task.add_on(CompileAddon, *add_ons), compile_mode="graph", **FAST, **options)
    plain = trained(Task.add_on(GradientAccumulationAddon), **options)
    assert compiled.compile_report["graphs"] == 1
    assert furthest(eager, compiled) < 1e-12 < furthest(eager, plain)


def test_checkpoints_are_interchangeable_with_eager_runs() -> None:
    compiled = trained(Task.add_on(CompileAddon), epochs=1, compile_mode="graph", **FAST)
    state = compiled.state_dict()
    assert list(state["model"]) == list(network().state_dict())
    eager = Task(network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], gradient_clip=0.05, log_bar=False)
    eager.current_run.set_up()
    eager.load_state_dict(state)
    for task in (eager, compiled):
        task.run(1, batches())
    assert furthest(eager, compiled) < 1e-12


@pytest.mark.parametrize("mode", ["model", "graph"])
def test_evaluation_is_never_stale(mode: str) -> None:
    """After training with dropout, evaluation is without, and of the weights of this moment."""
    model = network(0.5)
    task = Task.add_on(CompileAddon)(
        model, "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, compile_mode=mode, **FAST
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


def test_auto_keeps_one_step_and_says_which_and_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zae.compiling.benchmark._SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger="zae"):
        task = trained(Task.add_on(CompileAddon), epochs=10, compile_mode="auto", **FAST)
    report = task.compile_report
    assert report["kept"] in ("eager", "graph")
    assert report["not_fused"] == "running statistics of BatchNorm or the like (1)"
    assert list(report["seconds"]) == ["eager", "graph"]
    assert (report["breakeven_steps"] is None) == (report["kept"] == "eager")
    assert report["compile_seconds"] > 0
    assert f"keeps the step {report['kept']!r}" in caplog.text
    assert furthest(trained(Task, epochs=10), task) < 1e-10


@pytest.mark.parametrize(
    ("graph", "kept", "breakeven_steps"),
    [
        (lambda step: 0.5 + 0.1 * (step % 2), "graph", 14),
        (lambda step: 1.5, "eager", None),
        (lambda step: 0.99, "eager", None),  # Too little to tell.
        (lambda step: 0.2 if step % 2 else 1.7, "eager", None),  # It scatters by more than it gains.
        (lambda step: 100.0 if step < 9 else 0.5, "graph", 13),  # It was compiled at first.
    ],
)
def test_a_trial_keeps_what_is_faster_and_a_tie_keeps_eager(graph: Any, kept: str, breakeven_steps: int | None) -> None:
    benchmark, report, step = Benchmark(["eager", "graph"]), {"compile_seconds": 6.0, "graphs": 1}, 0
    turns = []
    while not benchmark.decide(report):
        turns.append(benchmark.next_way)
        benchmark.record(turns[-1], 1.0 if turns[-1] == "eager" else graph(step // 2))
        step += 1
    assert turns == ["eager", "graph"] * 20
    assert (report["kept"], report["breakeven_steps"]) == (kept, breakeven_steps)


class Reads(Task):
    """Decides by a value: no single graph can hold that."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        if out["loss"].item() > 1e9:
            raise RuntimeError("diverged")
        return out


def test_what_the_compiler_refuses_runs_eagerly_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zae"):
        task = trained(Reads.add_on(CompileAddon), compile_mode="graph", **FAST)
    assert "torch.compile refuses it" in caplog.text
    assert task.compile_report["kept"] == "eager"
    assert furthest(trained(Task), task) == 0


class Shaken(nn.Sequential):
    """Draws numbers that are not torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__(*network())
        np.random.seed(3)
        self.random, self.is_own = random.Random(3), kind == "random.Random"

    def forward(self, inputs: Tensor) -> Tensor:
        drawn: Any = self.random.random() if self.is_own else torch.from_numpy(np.random.rand(4))
        return super().forward(inputs * drawn)


@pytest.mark.parametrize("mode", ["model", "graph", "fused"])
@pytest.mark.parametrize("kind", ["numpy.random", "random.Random"])
def test_numbers_that_are_not_of_torch_are_drawn_as_in_eager(kind: str, mode: str) -> None:
    """Torch would draw NumPy's from its own stream, and take those of a stream of one's own for constants."""
    ends, states = [], []
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), {"compile_mode": mode, **FAST})):
        model = Shaken(kind)
        del model[1]  # BatchNorm, which "fused" refuses.
        task = cls(model, "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, **options)
        torch.manual_seed(2)
        task.run(2, batches())
        ends.append(task)
        states.append((np.random.get_state()[1].tolist(), model.random.getstate(), torch.get_rng_state().tolist()))
    assert furthest(*ends) < 1e-12
    assert states[0] == states[1]


class OwnBackward(Task):
    """Differentiates in its own way."""

    def backward(self, loss: Any) -> None:
        super().backward(loss * 2)


def two(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def test_what_a_graph_cannot_hold_is_refused_by_name() -> None:
    def start(cls: type[Trainer] = Task, optimizer: Any = two, hook: bool = False) -> None:
        model = network()
        if hook:
            model[0].weight.register_hook(lambda gradient: gradient)
        task = cls.add_on(CompileAddon)(model, "cpu", optimizer=optimizer, compile_mode="graph", **FAST)
        task.run(1, batches())

    with pytest.raises(ConfigError, match="does not support 2 optimizers; write compile_mode='model'"):
        start(optimizer=[lambda parameters: two([*parameters][:1]), lambda parameters: two([*parameters][1:])])
    with pytest.raises(ConfigError, match=r"hooks of the gradient of 0\.weight"):
        start(hook=True)
    with pytest.raises(ConfigError, match=r"backward\(\) of OwnBackward"):
        start(OwnBackward)
    for option, meant in (("compile_mode", "graph"), ("compile_backend", "inductor")):
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            Task.add_on(CompileAddon)(network(), "cpu", optimizer=two, **{option: meant[:-1]})
    with pytest.raises(ConfigError, match="compile_backend=3; it must be the name of a backend"):
        Task.add_on(CompileAddon)(network(), "cpu", optimizer=two, compile_backend=3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"compile_mode": "max-autotune"},
            r"a mode of torch\.compile, .* write compile_options=\{'max_autotune': True\}",
        ),
        ({"compile_options": "max-autotune"}, "compile_options='max-autotune'; write a dict of options of inductor"),
        ({"compile_options": {"max_autotun": True}}, "compile_options: Unexpected optimization option max_autotun;"),
        ({"compile_options": {"max_autotune": "yes"}}, "compile_options: Unexpected type of attr max_autotune"),
        ({"compile_options": {"triton.cudagraphs": True}}, "gradients of each batch over those of the last"),
        ({"compile_options": {"max_autotune": True}, **FAST}, "those of the backend 'inductor', and compile_backend="),
    ],
)
def test_options_of_inductor_that_cannot_be_meant(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Task.add_on(CompileAddon)(network(), "cpu", optimizer=two, **options)


def test_teardown_leaves_the_compiler_and_the_optimizer_as_they_were() -> None:
    before = torch._dynamo.config.trace_autograd_ops
    task = trained(Task.add_on(CompileAddon), epochs=1, compile_mode="graph", **FAST)
    assert torch._dynamo.config.trace_autograd_ops == before
    assert task.optimizer.param_groups[0]["fused"] is None
    task.setup()
    task.setup()
    task.teardown()
    assert torch._dynamo.config.trace_autograd_ops == before


def test_inductor_draws_dropout_like_eager_on_request() -> None:
    def losses(cls: type[Trainer], **options: Any) -> list[float]:
        task = cls(network(0.5), "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, **options)
        torch.manual_seed(2)
        task.run(1, batches())
        values: list[Tensor] = task.log_train["loss"]
        return [float(value) for value in values]

    eager = losses(Task)
    for option in ({"fallback_random": True}, {"compile_options": {"fallback_random": True}}):
        compiled = losses(Task.add_on(CompileAddon), compile_mode="graph", **option)
        assert compiled == pytest.approx(eager, abs=1e-12)


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
    for cls, options in ((DirectTask, {}), (DirectTask.add_on(CompileAddon), {"compile_mode": "graph", **FAST})):
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
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), {"compile_mode": "graph", **FAST})):
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


@pytest.mark.parametrize("mode", ["graph", "fused"])
def test_what_is_known_of_a_parameter_is_not_taken_for_what_is_known_of_the_one_in_its_place(mode: str) -> None:
    """A new weight is stepped by its own gradient, in its own order of memory, at the rate of its own group."""
    ends = []
    for cls, options in ((Replacing, {}), (Replacing.add_on(CompileAddon), {"compile_mode": mode, **FAST})):
        model = Images()
        groups = [{"params": model.convolve.parameters(), "lr": 0.1}, {"params": [model.spaced, model.classify]}]
        task = cls(model, "cpu", optimizer=torch.optim.AdamW(groups, lr=0.01), gradient_clip=0.5, **options)
        task.run(3, pictures())
        ends.append(task)
    assert ends[1].compile_report["kept"] == mode
    assert furthest(*ends) < OPTIMIZERS["adamw"][1]


def test_a_kernel_is_taken_for_the_parameters_of_this_moment() -> None:
    """One with gaps in its memory comes with the second epoch: the fused kernel would step what lies between."""

    class Growing(Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1:
                self.model.scale = nn.Parameter(torch.ones(2, 3, dtype=torch.float64)[:, 0])
                self.optimizer.add_param_group({"params": [self.model.scale]})

    class Scaled(Images):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * getattr(self, "scale", 1)

    ends = []
    for cls, options in ((Growing, {}), (Growing.add_on(CompileAddon), {"compile_mode": "graph", **FAST})):
        task = cls(Scaled(), "cpu", optimizer=OPTIMIZERS["sgd"][0], **options)
        task.run(3, pictures())
        ends.append(task)
    assert furthest(*ends) < 1e-12


class ByStep(Task):
    """Its loss depends on a number of Python that changes with every step."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        return {**out, "loss": out["loss"] * (1 + self.progress_checker.step)}


def test_a_step_that_would_be_compiled_anew_each_time_ends_up_eager(caplog: pytest.LogCaptureFixture) -> None:
    task = trained(ByStep.add_on(CompileAddon), compile_mode="graph", **FAST)
    assert task.compile_report["kept"] == "eager"
    assert "it reads a Python value that changes with each step" in task.compile_report["reason"]
    assert furthest(trained(ByStep), task) < 1e-12


def test_many_trainers_of_a_process_are_compiled() -> None:
    """A search makes more of them than the graphs that torch keeps for one function."""
    kept = [trained(Task.add_on(CompileAddon), epochs=1, compile_mode="graph", **FAST) for _ in range(10)]
    assert [task.compile_report["graphs"] for task in kept] == [1] * 10


class Hooked(Task):
    """Doubles a gradient by a hook that comes after the set-up."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.model[0].weight.register_hook(lambda gradient: gradient * 2)


def test_a_hook_that_comes_later_is_called() -> None:
    task = trained(Hooked.add_on(CompileAddon), compile_mode="graph", **FAST)
    assert task.compile_report["eager_batches"] == 12
    assert furthest(trained(Hooked), task) < 1e-12


class Watched(Task):
    """Halves what its first layer returns, from the second epoch on."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1:
            self.model[0].register_forward_hook(lambda module, inputs, output: output / 2)


@pytest.mark.parametrize("mode", ["graph", "fused", "model"])
def test_a_hook_of_a_module_that_comes_later_is_called(mode: str) -> None:
    """By itself, torch does not look for hooks that a module did not have when it was compiled."""
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    ends = []
    for cls, options in ((Watched, {}), (Watched.add_on(CompileAddon), {"compile_mode": mode, **FAST})):
        torch.manual_seed(3)
        task = cls(nn.Sequential(nn.Linear(4, 2)).double(), "cpu", optimizer=OPTIMIZERS["sgd"][0], **options)
        task.run(2, batches())
        ends.append(task)
    assert ends[1].compile_report["graphs"] == 2
    assert furthest(*ends) < 1e-12
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before


@pytest.mark.parametrize("mode", ["auto", "graph", "fused", "model"])
def test_where_torch_compile_is_switched_off_the_step_is_eager(mode: str) -> None:
    with torch._dynamo.config.patch(disable=True):
        task = trained(Task.add_on(CompileAddon), epochs=1, compile_mode=mode)
    assert task.compile_report["kept"] == "eager"
    assert "torch.compile is switched off" in task.compile_report["reason"]
    assert furthest(trained(Task, epochs=1), task) == 0


class Freezing(Task):
    """Trains its first layer every second epoch, so that momentum begins late for it."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.model[0].weight.requires_grad_(self.progress_checker.epoch % 2 == 1)


def test_layers_may_be_frozen_and_thawed() -> None:
    task = trained(Freezing.add_on(CompileAddon), epochs=4, compile_mode="graph", **FAST)
    assert task.compile_report["graphs"] == 2
    assert furthest(trained(Freezing, epochs=4), task) < 1e-12


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
    with pytest.raises(StepError, match=told):
        trained(cls.add_on(CompileAddon), compile_mode="graph", **FAST)


class Undecided(AMPAddon):
    """Settles on float16 only when it is set up, as "auto" does on a GPU that lacks bfloat16."""

    def setup(self) -> None:
        self._asked_for_one = True
        super().setup()


@pytest.mark.parametrize("mode", ["graph", "auto"])
def test_a_loss_scale_that_comes_late_is_refused_too(mode: str) -> None:
    def run(*add_ons: Any, **options: Any) -> Any:
        model = network().float()
        cls = Task.add_on(Undecided, *add_ons)
        task = cls(model, "cpu", optimizer=OPTIMIZERS["sgd"][0], gradient_clip=0.05, precision=["fp16"], **options)
        task.run(1, batches(torch.float32))
        return task

    if mode == "graph":
        with pytest.raises(ConfigError, match="does not support a float16 loss scale; write compile_mode='model'"):
            run(CompileAddon, compile_mode=mode, **FAST)
        return
    assert furthest(run(), run(CompileAddon, compile_mode=mode, **FAST)) == 0


@pytest.mark.parametrize(("precision", "kept"), [("bf16", "graph"), ("fp16", "eager")])
def test_mixed_precision_is_compiled_or_eager(precision: str, kept: str) -> None:
    """A loss scale is not for a graph: "graph" refuses it by name, "auto" is eager to the last bit."""
    mode = {"bf16": "graph", "fp16": "auto"}[precision]

    def run(*add_ons: Any, **options: Any) -> Any:
        model = network().float()
        task = Task.add_on(AMPAddon, *add_ons)(
            model, "cpu", optimizer=OPTIMIZERS["sgd"][0], gradient_clip=0.05, precision=precision, **options
        )
        task.run(2, batches(torch.float32))
        return task

    task = run(CompileAddon, compile_mode=mode, **FAST)
    assert task.compile_report["kept"] == kept
    assert furthest(run(), task) <= (1e-6 if kept == "graph" else 0)
    if kept == "eager":
        with pytest.raises(ConfigError, match="does not support a float16 loss scale; write compile_mode='model'"):
            run(CompileAddon, compile_mode="graph", **FAST)


def test_auto_is_eager_where_a_graph_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    def gan(*add_ons: Any, **options: Any) -> Any:
        class Adversaries(Trainer):
            def train_step(self, batch: Any) -> dict[str, Any]:
                return {"loss": self.model.losses(batch[0].float())}

            test_step = train_step

        model = hand.Gan()
        task = Adversaries.add_on(*add_ons)(
            model, "cpu", optimizer=model.optimizers(), monitor="loss/critic", **options
        )
        torch.manual_seed(2)
        task.run(2, batches())
        return task

    task = gan(CompileAddon, **FAST)
    assert "the step runs eagerly: a graph does not support 2 optimizers" in caplog.text
    assert furthest(gan(), task) == 0
    assert furthest(gan(), gan(CompileAddon, compile_mode="model", **FAST)) == 0
