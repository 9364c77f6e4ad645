"""CompileAddon in runs that are resumed, and with the models, batches and add-ons that a graph may meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compile import FAST, OPTIMIZERS, Task, batches, furthest, network, trained
from torch import Tensor, nn

from kit import hand
from zae import AddOnBase, ConfigError, Trainer
from zae.addons import CompileAddon, StateManagerAddon


class Doubled(Task):
    """In double precision."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step((batch[0].double(), batch[1]))


def test_a_run_resumes_bitwise_before_a_short_batch(tmp_path: Any) -> None:
    """What is compiled does not depend on where a run begins."""
    graph = {"compile_mode": "graph", **FAST}
    straight = resumable(tmp_path / "straight", None, (CompileAddon,), **graph)
    resumable(tmp_path / "resumed", 5, (CompileAddon,), **graph)
    resumed = resumable(tmp_path / "resumed", None, (CompileAddon,), **graph)
    assert resumed.compile_report["eager_batches"] == 4
    assert furthest(straight, resumed) == 0


class TimeFirst(Doubled):
    """Takes batches whose first dimension is not that of the samples."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step((batch[0].squeeze(0), batch[1]))

    test_step = train_step


def time_first(samples: Any) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs[None], targets


@pytest.mark.parametrize(("kind", "at", "eager"), [("time first", 5, 4), ("list", 5, 4), ("one batch", 2, 0)])
def test_a_full_batch_is_told_by_its_place_too(tmp_path: Any, kind: str, at: int, eager: int) -> None:
    """Where its size does not tell, it is one that another comes after, or the only one of its epoch."""
    loaders: dict[str, Any] = {
        "time first": hand.loader(22, shuffle=False, collate_fn=time_first),
        "list": [*hand.loader(22, shuffle=False)],
        "one batch": hand.loader(22, batch_size=64),
    }
    task, options = TimeFirst if kind == "time first" else Doubled, {"compile_mode": "graph", **FAST}
    ends = []
    for folder, stop in (("straight", None), ("resumed", at), ("resumed", None)):
        ends.append(resumable(tmp_path / folder, stop, (CompileAddon,), task, loaders[kind], **options))
    assert furthest(ends[0], ends[2]) == 0
    for task in (ends[0], ends[2]):
        assert (task.compile_report["graphs"], task.compile_report["eager_batches"]) == (1, eager)


def test_a_run_goes_on_with_the_add_on_or_without_it(tmp_path: Any) -> None:
    """The checkpoint knows nothing of the add-on: neither keys, nor the kernel that the optimizer stepped with."""
    graph = {"compile_mode": "graph", **FAST}
    straight = resumable(tmp_path / "straight", None)
    for first, then in (((CompileAddon,), ()), ((), (CompileAddon,))):
        folder = tmp_path / f"{len(first)}"
        stopped = resumable(folder, 8, first, **(graph if first else {}))
        assert stopped.state_dict().keys() == {*straight.state_dict().keys()}
        task = resumable(folder, None, then, **(graph if then else {}))
        assert task.progress_checker.step == 24
        assert task.optimizer.param_groups[0]["fused"] is None
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


def test_a_second_run_does_not_compile_again() -> None:
    """Of the same shapes; of others it does, once."""
    task = trained(Task.add_on(CompileAddon), epochs=1, compile_mode="graph", **FAST)
    task.run(1, batches())
    assert task.compile_report["graphs"] == 1
    task.run(1, [(inputs[:2], targets[:2]) for inputs, targets in batches()])
    assert task.compile_report["graphs"] == 1
    assert task.compile_report["eager_batches"] == 0


# ----------------------------------------------------------------------------------------------- models and batches


class Pair:
    """A batch of a type of one's own."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Any:
        return iter((self.inputs, self.targets))


def test_a_short_batch_of_a_type_of_ones_own_is_not_compiled_again() -> None:
    task = Task.add_on(CompileAddon)(
        network(), "cpu", optimizer=OPTIMIZERS["sgd"][0], log_bar=False, compile_mode="graph", **FAST
    )
    task.run(2, [Pair(*batch) for batch in batches()])
    assert (task.compile_report["graphs"], task.compile_report["eager_batches"]) == (1, 2)


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
    for cls, options in ((OfDicts, {}), (OfDicts.add_on(CompileAddon), {"compile_mode": "graph", **FAST})):
        task = cls(
            Tied(), "cpu", optimizer=OPTIMIZERS["adamw"][0], gradient_clip=0.05, keep_train_outputs=True, **options
        )
        task.on_epoch_end = lambda task=task: setattr(task, "outputs", task.log_train["parts/output"])
        task.run(3, loader)
        ends.append(task)
    assert ends[1].compile_report["graphs"] == 1
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_kernel_is_taken_that_does_not_step(dtype: torch.dtype, momentum: float) -> None:
    """Torch 2.13's fused SGD leaves half-precision weights as they were; nor is the optimizer's state touched."""
    states, weights = [], []
    for cls, options in ((Scalar, {}), (Scalar.add_on(CompileAddon), {"compile_mode": "graph", **FAST})):
        torch.manual_seed(1)
        model = nn.Linear(40, 1).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        task: Any = cls(model, "cpu", optimizer=optimizer, log_bar=False, **options)
        task.run(1, [torch.ones(4, 40, dtype=dtype)] * 4)
        states.append({index: [*state] for index, state in optimizer.state_dict()["state"].items()})
        weights.append(model.weight.detach().double())
    assert task.compile_report["kept"] == "graph"
    assert states[0] == states[1]
    assert float((weights[0] - weights[1]).abs().max()) < 0.01


@pytest.mark.parametrize("mode", ["model", "graph"])
def test_lazy_layers_take_their_weights_from_the_stream_as_in_eager(mode: str) -> None:
    ends = []
    for cls, options in ((Scalar, {}), (Scalar.add_on(CompileAddon), {"compile_mode": mode, **FAST})):
        torch.manual_seed(1)
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        task: Any = cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options)
        task.run(1, [torch.arange(8.0).view(4, 2)] * 3)
        ends.append((task, torch.rand(1)))
    report = ends[1][0].compile_report
    assert (report["kept"], report["eager_batches"], report["graphs"]) == (mode, 1, 1)
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


def test_a_micro_step_of_ones_own_is_refused_inside_of_the_graph_and_called_around_it() -> None:
    with pytest.raises(ConfigError, match=r"does not support micro_step\(\) of OwnMicroStep"):
        trained(OwnMicroStep.add_on(CompileAddon), compile_mode="graph", **FAST)
    assert furthest(trained(OwnMicroStep), trained(OwnMicroStep.add_on(CompileAddon), **FAST)) == 0
    outer = trained(Task.add_on(CompileAddon, OuterAddon), compile_mode="graph", **FAST)
    assert (outer.seen, outer.compile_report["kept"]) == (12, "graph")


@pytest.mark.parametrize(
    ("optimizer", "options", "suggested"),
    [
        (torch.optim.AdamW, {"compile_mode": "graph"}, False),
        (torch.optim.AdamW, {"compile_mode": "auto"}, False),
        (torch.optim.AdamW, {"compile_mode": "model"}, True),
        (torch.optim.Adagrad, {"compile_mode": "graph"}, True),
    ],
)
def test_plan_suggests_no_kernel_that_is_taken_as_it_is(optimizer: Any, options: Any, suggested: bool) -> None:
    task = Task.add_on(CompileAddon)(network(), "cpu", optimizer=lambda p: optimizer(p), **options)
    notes = task.plan(1, batches()).notes
    assert any("fused=True" in note for note in notes) is suggested
