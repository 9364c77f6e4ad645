"""CompileAddon: the eager numbers from one graph, and what a graph cannot hold is eager or refused (issue 6)."""

from __future__ import annotations

import logging
from typing import Any

import hand
import pytest
import torch
from torch import Tensor, nn

from zae import ConfigError, Trainer
from zae.addons import EMAAddon, GradientAccumulationAddon
from zae.addons.compile import CompileAddon

FAST = {"compile_backend": "aot_eager"}


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["model", "graph", "fused"])
def test_the_weights_are_those_of_eager(mode: str, optimizer: str) -> None:
    """float64, with a clip that bites, BatchNorm's buffers, evaluation in between, and a short batch in each epoch."""
    eager = trained(Task, optimizer)
    compiled = trained(Task.add_on(CompileAddon), optimizer, compile_mode=mode, **FAST)
    assert float(eager.grad_norm) > 0.05
    assert compiled.compile_report["kept"] == "compiled"
    assert furthest(eager, compiled) < OPTIMIZERS[optimizer][1]
    assert compiled.get_loss_history("test") == pytest.approx(eager.get_loss_history("test"), abs=1e-10)
    assert [*compiled.log_train] == [*eager.log_train] == ["loss", "size", "output"]


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


def test_checkpoints_are_interchangeable_with_eager_runs() -> None:
    compiled = trained(Task.add_on(CompileAddon), epochs=1, compile_mode="graph", **FAST)
    state = compiled.state_dict()
    assert list(state["model"]) == list(network().state_dict())
    eager = Task(network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], gradient_clip=0.05, log_bar=False)
    eager._set_up()
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


def test_auto_keeps_one_step_and_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zae"):
        task = trained(Task.add_on(CompileAddon), epochs=10, compile_mode="auto", **FAST)
    report = task.compile_report
    assert report["kept"] == ("compiled" if report["compiled"] < report["eager"] else "eager")
    assert (report["pays_after"] is None) == (report["kept"] == "eager")
    assert report["compile_seconds"] > 0
    assert f"keeps the {report['kept']} step" in caplog.text
    assert furthest(trained(Task, epochs=10), task) < 1e-10


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

    with pytest.raises(ConfigError, match="cannot hold 2 optimizers; write compile_mode='model'"):
        start(optimizer=[two, two])
    model = network()
    rprop = Task.add_on(CompileAddon)(
        model, "cpu", optimizer=torch.optim.Rprop(model.parameters()), compile_mode="fused", **FAST
    )
    with pytest.raises(ConfigError, match="optimizer 0 is a Rprop; write compile_mode='graph'"):
        rprop.run(1, batches())
    with pytest.raises(ConfigError, match=r"hooks of the gradient of 0\.weight"):
        start(hook=True)
    with pytest.raises(ConfigError, match=r"backward\(\) of your own"):
        start(OwnBackward)
    with pytest.raises(ConfigError, match="did you mean 'graph'"):
        Task.add_on(CompileAddon)(network(), "cpu", optimizer=two, compile_mode="grap")


def test_teardown_leaves_the_compiler_and_the_optimizer_as_they_were() -> None:
    before = torch._dynamo.config.trace_autograd_ops
    task = trained(Task.add_on(CompileAddon), epochs=1, compile_mode="fused", **FAST)
    assert torch._dynamo.config.trace_autograd_ops == before
    assert task.optimizer.param_groups[0]["fused"] is None


def test_inductor_draws_dropout_like_eager_on_request() -> None:
    def losses(cls: type[Trainer], **options: Any) -> list[float]:
        task = cls(network(0.5), "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, **options)
        torch.manual_seed(2)
        task.run(1, batches())
        values: list[Tensor] = task.log_train["loss"]
        return [float(value) for value in values]

    compiled = losses(Task.add_on(CompileAddon), compile_mode="graph", fallback_random=True)
    assert compiled == pytest.approx(losses(Task), abs=1e-12)
