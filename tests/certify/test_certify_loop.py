"""The loop by hand of a certificate: it is that of the tests, and it names what it does not do."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch

from kit import oracle
from zae import Every, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, SpikeGuardAddon
from zae.certify import loop, recipe

CASES = {
    "plain": {},
    "clip": {"clip": 0.05},
    "accumulation": {"accumulate": 4, "clip": 0.05},
    "targets": {"accumulate": 4, "count_targets": True},
    "bf16": {"precision": "bf16", "clip": 0.05},
    "fp16": {"precision": "fp16", "scale": 2.0**22, "accumulate": 2, "scheduler": "batch"},
    "scheduler of epochs": {"scheduler": "epoch", "epochs": 5, "optimizer": "sgd"},
    "scheduler of steps": {"scheduler": "batch", "precision": "bf16", "accumulate": 2, "epochs": 3},
    "steps": {"max_steps": 7, "epochs": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_it_leaves_the_weights_of_the_oracle(name: str) -> None:
    """Bitwise, with BatchNorm, dropout and a short last batch; both are in plain PyTorch, written apart."""
    options = oracle.Options(**CASES[name])
    expected = oracle.train(options)
    model, (optimizer,), schedulers, loader, _ = oracle.make(options)

    def step(batch: Any) -> dict[str, Any]:
        (loss,), targets = oracle.losses_of(model, batch, options)
        return {"loss": loss} | ({} if targets is None else {"num_targets": targets})

    made = loop.Recipe(
        n_epoch=options.epochs, max_steps=options.max_steps, accumulate=options.accumulate or 1, clip=options.clip,
        precision=options.precision or "fp32", loss_scale=(options.scale, 1.0),
    )  # fmt: skip
    due = {f"per_{'step' if options.scheduler == 'batch' else 'epoch'}": schedulers}
    loop.train(step, model, optimizer, loader, made, **due)
    found = model.state_dict()
    assert found.keys() == expected.weights.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.weights.items())
    assert expected.step > 3
    assert torch.equal(torch.get_rng_state(), expected.random)
    if options.precision == "fp16":
        assert expected.skipped > 0


def test_neither_it_nor_the_oracle_imports_zae() -> None:
    for module in (loop, oracle):
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {each.module if isinstance(each, ast.ImportFrom) else each.names[0].name for each in imports}
        assert {name.partition(".")[0] for name in names if name} <= {
            "__future__", "collections", "contextlib", "copy", "dataclasses", "itertools", "torch", "typing",
        }  # fmt: skip


class Task(Trainer):
    """A plain task."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class Paced(Task):
    """A step that reads the counters of a run."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": super().train_step(batch)["loss"] * (self.progress_checker.step + 1)}


class Signs(Task):
    """A class that overrides the loop."""

    def unscale(self) -> None:
        super().unscale()


def trainer_of(cls: Any, **options: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **options}
    return cls(model, "cpu", log_bar=False, **options)


def test_what_it_does_not_do_is_named() -> None:
    arguments = {"n_epoch": 1, "loader": [torch.ones(2, 2)], "valid_every": Every(steps=1)}
    plain = Task.add_on(AMPAddon, EMAAddon, GradientAccumulationAddon)
    assert recipe.uncovered(trainer_of(plain, precision="bf16"), arguments) == []
    assert recipe.uncovered_add_ons(trainer_of(plain)) == []
    assert recipe.uncovered_add_ons(trainer_of(Task.add_on(SpikeGuardAddon, EMAAddon))) == ["SpikeGuardAddon"]
    assert recipe.uncovered(trainer_of(Signs), arguments) == ["Signs.unscale"]
    assert recipe.uncovered(trainer_of(Task), {**arguments, "limit_batches": 1}) == ["limit_batches= of run()"]
    halves = {each: torch.optim.SGD(torch.nn.Linear(2, 1).parameters()) for each in "ab"}
    several = trainer_of(Task)
    several.optimization.optimizer = halves
    assert recipe.uncovered(several, arguments) == ["2 optimizers"]
    low = trainer_of(Task.add_on(AMPAddon), dtype="bf16", optimizer=torch.optim.SGD)
    assert recipe.uncovered(low, arguments) == ["dtype='bf16'"]


def test_a_step_that_reads_the_counters_of_a_run_is_named() -> None:
    """They do not count in the loop by hand, which would leave other weights."""
    given, more = recipe.make_loop(trainer_of(Paced), {"n_epoch": 1, "loader": [torch.ones(2, 2)]}, "fp32")
    with pytest.raises(loop.Uncovered, match=r"self.progress_checker.step, which the step reads"):
        loop.train(*given, **more)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau, which follows the validation"),
        ({"optimizer": lambda p: schedulefree.SGDScheduleFree(p)}, "SGDScheduleFree, which has other weights"),
        ({"optimizer": lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.ones(1))])}, "outside of the model"),
    ],
)
def test_an_optimizer_or_a_scheduler_of_another_loop_is_named(options: dict[str, Any], words: str) -> None:
    """Also where a function makes it."""
    arguments = {"n_epoch": 1, "loader": [torch.ones(2, 2)]}
    with pytest.raises(loop.Uncovered, match=words):
        recipe.make_loop(trainer_of(Task, **options), arguments, "fp32")


@pytest.mark.parametrize("loss", [torch.tensor(torch.nan), {"a": torch.tensor(1.0)}])
def test_what_a_step_returns_and_it_does_not_do_is_named(loss: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(loop.Uncovered, match=r"a loss that is nan|a loss for each of several optimizers"):
        loop.train(lambda batch: {"loss": loss}, model, optimizer, [torch.ones(2)], loop.Recipe(n_epoch=1))
