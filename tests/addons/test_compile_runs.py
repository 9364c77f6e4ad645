"""CompileAddon in runs that are resumed, and with the models, batches and add-ons that a graph may meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compile import FAST, OPTIMIZERS, Task, batches, furthest, network, trained
from torch import Tensor, nn

from kit import hand
from zae import AddOnBase, Trainer
from zae.addons import CompileAddon, StateManagerAddon


class Doubled(Task):
    """In double precision."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step((batch[0].double(), batch[1]))


def test_a_run_resumes_bitwise_before_a_short_batch(tmp_path: Any) -> None:
    """What is compiled does not depend on where a run begins."""
    graph = {"compile_target": "step", **FAST}
    straight = resumable(tmp_path / "straight", None, (CompileAddon,), **graph)
    resumable(tmp_path / "resumed", 5, (CompileAddon,), **graph)
    resumed = resumable(tmp_path / "resumed", None, (CompileAddon,), **graph)
    assert furthest(straight, resumed) == 0


def test_a_run_goes_on_with_the_add_on_or_without_it(tmp_path: Any) -> None:
    """The checkpoint knows nothing of the add-on."""
    graph = {"compile_target": "step", **FAST}
    straight = resumable(tmp_path / "straight", None)
    for first, then in (((CompileAddon,), ()), ((), (CompileAddon,))):
        folder = tmp_path / f"{len(first)}"
        stopped = resumable(folder, 8, first, **(graph if first else {}))
        assert stopped.state_dict().keys() == {*straight.state_dict().keys()}
        task = resumable(folder, None, then, **(graph if then else {}))
        assert task.progress_checker.step == 24
        assert furthest(straight, task) < 1e-10


def resumable(
    folder: Any,
    max_steps: int | None,
    add_ons: tuple[Any, ...] = (),
    cls: Any = Doubled,
    loader: Any = None,
    **options: Any,
) -> Any:
    """A run of four epochs that ends early, or continues from where one ended."""
    task = cls.add_on(StateManagerAddon, *add_ons)(
        network(0.2), "cpu", optimizer=OPTIMIZERS["adamw"][0], gradient_clip=0.05, log_bar=False, seed=5,
        save_path=folder, resume="auto", **options,
    )  # fmt: skip
    task.run(4, loader or hand.loader(22), max_steps=max_steps)
    return task


# ----------------------------------------------------------------------------------------------- models and batches


class Pair:
    """A batch of a type of one's own."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Any:
        return iter((self.inputs, self.targets))


@pytest.mark.parametrize("target", ["model", "step"])
def test_a_batch_may_be_of_a_type_of_ones_own(target: str) -> None:
    ends = []
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), {"compile_target": target, **FAST})):
        task = cls(network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, **options)
        task.run(2, [Pair(*batch) for batch in batches()])
        ends.append(task)
    assert ends[1].compile_report["graphs"] > 0
    assert furthest(*ends) < 1e-12


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(inputs).tanh())
        return output


class OfDicts(Trainer):
    """Takes a dict, with words in it, and returns more than numbers."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = self.model(batch["inputs"])
        loss = nn.functional.cross_entropy(output, batch["targets"])
        return {"loss": loss, "num_targets": len(output), "kind": batch["kind"], "parts": {"output": [output]}}

    test_step = train_step


def test_weights_may_be_tied_and_batches_dicts() -> None:
    """With targets that are counted, and what a step returns beside numbers free of its graph."""
    loader = [{"inputs": inputs, "targets": targets, "kind": "train"} for inputs, targets in batches()]
    ends = []
    for cls, options in ((OfDicts, {}), (OfDicts.add_on(CompileAddon), {"compile_target": "step", **FAST})):
        task = cls(
            Tied(), "cpu", optimizer=OPTIMIZERS["adamw"][0], gradient_clip=0.05, keep_train_outputs=True, **options
        )
        task.on_epoch_end = lambda task=task: setattr(task, "outputs", task.log_train["parts/output"])
        task.run(3, loader)
        ends.append(task)
    assert ends[1].compile_report["graphs"] > 0
    assert furthest(*ends) < 1e-10
    outputs = [part[0] for part in ends[1].outputs]
    assert len(outputs) == 6
    assert not any(output.requires_grad for output in outputs)


# ----------------------------------------------------------------------------------------- beside others, and the plan


class Scalar(Trainer):
    """The mean square of what the model returns."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.mark.parametrize("target", ["model", "step"])
def test_lazy_layers_take_their_weights_from_the_stream_as_in_eager(target: str) -> None:
    ends = []
    for cls, options in ((Scalar, {}), (Scalar.add_on(CompileAddon), {"compile_target": target, **FAST})):
        torch.manual_seed(1)
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        task: Any = cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options)
        task.run(1, [torch.arange(8.0).view(4, 2)] * 3)
        ends.append((task, torch.rand(1)))
    assert ends[1][0].compile_report["graphs"] == 1
    assert furthest(ends[0][0], ends[1][0]) < 1e-6
    assert torch.equal(ends[0][1], ends[1][1])


class OwnMicroStep(Task):
    """Halves each gradient as it comes, by hand."""

    def micro_step(self, batch: Any, count: int) -> Any:
        out, weight = super().micro_step(batch, count)
        self.model[0].weight.grad /= 2
        return out, weight


class OuterAddon(AddOnBase):
    """Notes the micro-batches, in any code."""

    layer = "observe"

    def micro_step(self, batch: Any, count: int) -> Any:
        """Count them."""
        self.seen = getattr(self, "seen", 0) + 1
        return super().micro_step(batch, count)


def test_a_micro_step_of_ones_own_is_called_inside_and_outside() -> None:
    for target in ("model", "step"):
        options = {"compile_target": target, **FAST}
        assert furthest(trained(OwnMicroStep), trained(OwnMicroStep.add_on(CompileAddon), **options)) < 1e-12
        outer = trained(Task.add_on(CompileAddon, OuterAddon), **options)
        assert (outer.seen, outer.compile_report["graphs"]) == (12, 2)
