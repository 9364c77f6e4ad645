"""The examples of addons.md and addon_examples.md in docs/extending: they pass check_addon, and do what they say."""

from __future__ import annotations

import ast
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import zae.addons
from kit import hand
from kit.rank_tasks import forks
from zae import AddOnBase, Trainer
from zae.addon import LAYERS
from zae.addons import (
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    PipelineAddon,
    StateManagerAddon,
    TensorParallelAddon,
)
from zae.errors import AddOnConflict, DistributedError
from zae.testing import check_addon

DOCS = Path(__file__).resolve().parents[2] / "docs" / "extending"


def blocks_of(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_page(page: str, name: str) -> Any:
    """Run the blocks of a page as a module, so that their classes can be pickled by name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    for block in blocks_of(page):
        exec(compile(block, page, "exec"), vars(module))
    return module


examples = run_page("addon_examples.md", "addon_examples")


class OutputTask(Trainer):
    """A regression that returns what the model computed."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        output = self.model(inputs)
        return {"loss": nn.functional.mse_loss(output, targets.reshape(len(inputs), -1)), "output": output}

    test_step = train_step


class TwoTask(OutputTask):
    """Two tasks that pull the weights apart."""

    def train_step(self, batch: Any) -> Any:
        output = self.model(batch[0])
        losses = [(output - 1).square().mean(), (output + 2).square().mean()]
        return {"loss": sum(losses), "losses": losses}

    test_step = train_step


OPTIONS: dict[str, dict[str, Any]] = {
    "SAMAddon": {},
    "GradientNoiseAddon": {},
    "PCGradAddon": {"task": TwoTask},
    "LookAheadAddon": {"look_every": 3},
    "MixupAddon": {},
    "UnfreezeAddon": {"unfreeze_prefix": "0."},
    "DistillationAddon": {"teacher": nn.Linear(3, 2), "task": OutputTask},
    "LRFinderAddon": {},
}


def classes() -> list[Any]:
    return [value for value in vars(examples).values() if isinstance(value, type) and value is not AddOnBase]


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("add_on", classes(), ids=lambda add_on: add_on.__name__)
def test_an_example_passes_the_kit(add_on: Any) -> None:
    check_addon(add_on, **OPTIONS[add_on.__name__])


def test_the_page_on_writing_an_add_on_runs() -> None:
    """It ends with check_addon on each of its classes; the layout that CountAddon adapts is read."""
    guide = run_page("addons.md", "addon_guide")
    trainer, other = build(guide.CountAddon), build(guide.CountAddon)
    trainer.run(1, loader())
    assert trainer.samples == 22
    other.load_state_dict({**trainer.state_dict(), "CountAddon": {"seen": 22}})
    assert other.samples == 22


def test_examples_are_short() -> None:
    """At most twenty lines of code in the methods of each, without the ``__init__`` that stores options."""
    blocks = blocks_of("addon_examples.md")
    for block in blocks[1:]:
        (tree,) = ast.parse(block).body
        assert isinstance(tree, ast.ClassDef)
        methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        lines = {n.lineno for method in methods for n in ast.walk(method) if isinstance(n, (ast.stmt, ast.expr))}
        assert len(lines) <= 20, f"{tree.name}: {len(lines)}"
    assert len(blocks) == 9


def build(*add_ons: Any, devices: Any = "cpu", task: Any = OutputTask, **options: Any) -> Any:
    model = hand.network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"seed": 3, "log_bar": False, **options}
    return task.add_on(*add_ons)(model, devices, optimizer=optimizer, **options)


def loader(size: int = 22) -> Any:
    """Four features, and two numbers to be predicted."""
    inputs, targets = hand.data(size).tensors
    dataset = torch.utils.data.TensorDataset(inputs, nn.functional.one_hot(targets, 2).float())
    return torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)


def sam_by_hand(rho: float, accumulate: int, clip: float, decay: float, n_epoch: int) -> tuple[nn.Module, Any]:
    """Train with SAM, accumulation, clipping and an average of the weights in plain PyTorch."""
    torch.manual_seed(3)
    model = hand.network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trained = dict(model.named_parameters())

    def gradients(window: list[Any]) -> None:
        for inputs, targets in window:
            (nn.functional.mse_loss(model(inputs), targets) / len(window)).backward()

    for _ in range(n_epoch):
        batches = list(loader())
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            gradients(window)
            before = [p.detach().clone() for p in model.parameters()]
            grads = [p.grad for p in model.parameters()]
            share = rho / torch.stack([grad.norm() for grad in grads]).norm().clamp(min=1e-12)
            optimizer.zero_grad()
            with torch.no_grad():
                for p, grad in zip(model.parameters(), grads):
                    p.add_(grad * share)
            gradients(window)
            with torch.no_grad():
                for p, value in zip(model.parameters(), before):
                    p.copy_(value)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    if name in trained:
                        average[name].mul_(decay).add_(value, alpha=1 - decay)
                    else:
                        average[name].copy_(value)
    return model, average


def test_sam_beside_other_add_ons_is_bitwise_the_loop_by_hand() -> None:
    """With accumulation (the last window is short), clipping and an average of the weights."""
    trainer = build(
        examples.SAMAddon, GradientAccumulationAddon, EMAAddon,
        rho=0.1, gradient_accumulation_steps=4, gradient_clip=0.3, decay=0.9,
    )  # fmt: skip
    trainer.run(3, loader())
    model, average = sam_by_hand(0.1, 4, 0.3, 0.9, 3)
    assert hand.digest(trainer.model) == hand.digest(model)
    assert hand.digest(*(trainer.average[name] for name in average)) == hand.digest(*average.values())


class KillAddon(AddOnBase):
    """End the process at a step, as a kill does."""

    layer = "control"

    def __init__(self, *args: Any, kill_at: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kill_at = kill_at

    def checkpoint(self) -> None:
        super().checkpoint()
        if self.progress_checker.step == self.kill_at:
            os._exit(9)


def test_mixup_and_noise_resume_bitwise_on_two_ranks_after_a_kill(tmp_path: Path) -> None:
    def make(*more: Any, **options: Any) -> Any:
        add_ons = (examples.MixupAddon, examples.GradientNoiseAddon, MultiGPUAddon, *more)
        return build(*add_ons, devices=["cpu"] * 2, noise=0.1, **options)

    with forks():
        straight = make()
        straight.run(3, loader(16))
        saving = {"save_path": tmp_path, "save_every": 1}
        with pytest.raises(DistributedError):
            make(StateManagerAddon, KillAddon, kill_at=3, **saving).run(3, loader(16))
        again = make(StateManagerAddon, **saving, resume="auto")
        again.run(3, loader(16))
    assert again.progress_checker.step == straight.progress_checker.step == 6
    assert hand.digest(again.model) == hand.digest(straight.model)
    ranks = [each["add_ons"]["generators"]["states"] for each in again.state_dict()["MultiGPUAddon"]["ranks"]]
    for name, owners in (("mixup", [0, 1]), ("noise", [None, None])):
        assert [each[name]["rank"] for each in ranks] == owners
        assert torch.equal(ranks[0][name]["state"], ranks[1][name]["state"]) == (name == "noise")


def test_pcgrad_projects_conflicting_gradients() -> None:
    """Two tasks of opposite gradients: what is left of each is orthogonal to the other one."""
    trainer = build(examples.PCGradAddon, task=TwoTask)
    plain = build(task=TwoTask)
    for each in (trainer, plain):
        each.run(1, loader())
    assert hand.digest(trainer.model) != hand.digest(plain.model)

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    class Conflict(OutputTask):
        def train_step(self, batch: Any) -> Any:
            w = self.model.weight
            return {"loss": w.sum(), "losses": [w[0] * 1.0, -w[0] + w[1]]}

    model = Vector()
    conflict = Conflict.add_on(examples.PCGradAddon)(model, "cpu", optimizer=SGD(model.parameters(), lr=1.0), seed=0)
    conflict.run(1, [torch.zeros(1)])
    # Gradients (1, 0) and (-1, 1): the first loses its part along the second, (0.5, 0.5), the second becomes (0, 1).
    assert torch.allclose(model.weight, -torch.tensor([0.5, 1.5]))


def test_the_finder_tries_rates_and_the_thawed_layers_wait() -> None:
    finder = build(examples.LRFinderAddon, find_from=1e-4, find_to=1.0, find_steps=5, log_every=1)
    assert finder.run(9, loader())["step"] == 5
    rates = [row["lr"] for row in finder.log_history if "train/loss" in row]
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    thaw = build(examples.UnfreezeAddon, unfreeze_prefix="0.", unfreeze_at=2)
    first = hand.digest(*thaw.model[0].parameters())
    thaw.run(2, loader())
    assert hand.digest(*thaw.model[0].parameters()) == first
    thaw.run(1, loader())
    assert hand.digest(*thaw.model[0].parameters()) != first


def test_look_ahead_and_distillation_are_the_loops_by_hand() -> None:
    """Bitwise, with slow weights that are moved every second step; the last step moves none."""
    teacher = nn.Linear(4, 2)
    both = build(examples.LookAheadAddon, examples.DistillationAddon, look_every=2, teacher=teacher)
    both.run(1, loader(20))
    torch.manual_seed(3)
    model = hand.network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = [each.detach().clone() for each in model.parameters()]
    for step, (inputs, targets) in enumerate(loader(20), start=1):
        output = model(inputs)
        loss = nn.functional.mse_loss(output, targets) + 0.5 * nn.functional.mse_loss(output, teacher(inputs).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            for kept, each in zip(slow, model.parameters(), strict=True):
                each.data.copy_(kept.lerp_(each.detach(), 0.5))
    assert both.progress_checker.step == step == 5
    assert hand.digest(both.model) == hand.digest(model)
    assert hand.digest(*both.slow.values()) == hand.digest(*slow)


def test_an_average_is_of_the_weights_that_look_ahead_leaves() -> None:
    trainer = build(examples.LookAheadAddon, EMAAddon, look_every=1, look_alpha=0.5, decay=0.0)
    trainer.run(1, loader())
    weights = dict(trainer.model.named_parameters())
    assert hand.digest(*(trainer.average[name] for name in weights)) == hand.digest(*weights.values())


@pytest.mark.parametrize("engine", [FSDPAddon, PipelineAddon, TensorParallelAddon])
def test_look_ahead_is_refused_where_an_engine_divides_the_weights(engine: Any) -> None:
    with pytest.raises(AddOnConflict, match="the slow weights are whole; leave LookAheadAddon out"):
        OutputTask.add_on(examples.LookAheadAddon, engine)


def test_what_an_add_on_reads_is_as_the_table_says() -> None:
    """The counter in a step and after it, the model without its wrapper, and the mode in a validation."""
    seen: list[Any] = []

    class ReadAddon(AddOnBase):
        """Note what is there."""

        def optimizer_step(self) -> bool:
            seen.append(self.progress_checker.step)
            return super().optimizer_step()

        def on_step_end(self, outputs: Any) -> None:
            super().on_step_end(outputs)
            seen.append((self.progress_checker.step, self.mode))

        def metric_on_epoch_end(self) -> Any:
            seen.append(self.mode)
            return super().metric_on_epoch_end()

    trainer = build(ReadAddon)
    trainer.run(1, loader(8), loader(8))
    assert seen == [0, (1, "train"), 1, (2, "train"), "train", "test"]
    assert isinstance(trainer.parameters, list)
    assert trainer.unwrap() is trainer.model
    text = (DOCS / "addons.md").read_text(encoding="utf-8")
    table = text[text.index("| attribute | what it is |") :].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])]
    assert len(names) == 8
    assert [name for name in names if not hasattr(trainer, name)] == []


def test_each_layer_of_the_table_is_that_of_its_add_ons() -> None:
    text = (DOCS / "addons.md").read_text(encoding="utf-8")
    table = text[text.index("| layer | for what |") :].partition("\n\n")[0]
    rows = [[re.findall(r"`(\w+)`", cell) for cell in row.split("|")] for row in table.splitlines()[2:]]
    assert [layer for row in rows for layer in row[1]] == list(LAYERS)
    for row in rows:
        assert {getattr(zae.addons, name).layer for name in row[3]} == {*row[1]}
