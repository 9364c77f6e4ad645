"""SilentFaultGuardAddon: a flip in one gradient is found, and a run that is checked is the run that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kit.ranks import on_ranks
from kit.regression import Float32Regression as Task
from kit.regression import NoisyNet as Net
from zae import ConfigError, Every, SilentFaultError, StepError
from zae.addons import (
    AMPAddon,
    CallbackAddon,
    CompileAddon,
    EMAAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    MultiGPUAddon,
    SilentFaultGuardAddon,
    SpikeGuardAddon,
    StateManagerAddon,
    ThroughputAddon,
)
from zae.testing.watch import difference, streams


class Fault:
    """A hook that changes one gradient in its n-th computations, as a processor would that computes a wrong number."""

    def __init__(self, parameter: nn.Parameter, *numbers: int, size: float = 1e-6) -> None:
        self.numbers, self.size, self.count = numbers, size, 0
        parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        self.count += 1
        if self.count not in self.numbers:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[1] += self.size
        return gradient


class Drawing(Dataset[Any]):
    """Samples with noise that is drawn where they are read, of the stream that dropout draws from too."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(4), self.y[index]


def build(*add_ons: Any, task: Any = Task, guard: bool = True, model: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    made = Net() if model is None else model
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    known = {"log_bar": False, **({"fault_check_every": 3} if guard else {}), **options}
    return task.add_on(*([SilentFaultGuardAddon] if guard else []), *add_ons)(made, "cpu", optimizer=optimizer, **known)


def train(trainer: Any, loader: Any = None, n_epoch: int = 2) -> Any:
    torch.manual_seed(2)
    np.random.seed(2)
    trainer.run(n_epoch, DataLoader(Drawing(56), 4, shuffle=True) if loader is None else loader)
    return trainer


def left(trainer: Any) -> dict[str, Any]:
    """All that decides how training continues."""
    state = trainer.state_dict()
    kept = {key: value for key, value in state.items() if key in ("model", "optimizer", "EMAAddon", "AMPAddon")}
    return {**kept, "history": trainer.history.train, "streams": streams()}


KINDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": ([], {"gradient_clip": 0.5}),
    "windows": ([GradientAccumulationAddon, EMAAddon], {"gradient_accumulation_steps": 3, "decay": 0.9}),
    "fp16": ([AMPAddon, GradientAccumulationAddon], {"precision": "fp16", "gradient_accumulation_steps": 2}),
    "bf16": ([AMPAddon, SpikeGuardAddon], {"precision": "bf16"}),
    "recomputed": ([GradientCheckpointingAddon], {"checkpoint_modules": ["body"]}),
    "model": ([CompileAddon], {"compile_backend": "aot_eager"}),
    "step": (
        [CompileAddon, GradientAccumulationAddon],
        {"compile_target": "step", "compile_backend": "aot_eager", "gradient_accumulation_steps": 2},
    ),
}


@pytest.mark.parametrize("kind", [*KINDS][:3] + [pytest.param(k, marks=pytest.mark.exhaustive) for k in [*KINDS][3:]])
def test_a_run_that_is_checked_is_the_run_that_is_not(kind: str) -> None:
    """Bitwise: weights, buffers, optimizer, averages, loss scale, history and random streams."""
    add_ons, options = KINDS[kind]
    with_it, without = (train(build(*add_ons, guard=guard, **options)) for guard in (True, False))
    assert with_it.fault_checks == with_it.progress_checker.step // 3 > 1
    assert with_it.faults == []
    assert difference(left(without), left(with_it)) is None


def test_streams_of_the_task_and_of_add_ons_are_put_back() -> None:
    """Generators that are attributes, and that of an add-on; NumPy's global stream."""

    class Noisy(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.numpy_noise, self.torch_noise = np.random.default_rng(3), torch.Generator().manual_seed(3)
            self.old_noise = np.random.RandomState(3)

        def to_device(self, batch: Any) -> Any:
            x, y = super().to_device(batch)
            return x + torch.randn(x.shape, generator=self.torch_noise), y

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            added = [self.numpy_noise.normal(), np.random.normal(), self.old_noise.normal()]
            return super().train_step((x + float(sum(added)), y))

    runs = [train(build(GradientAccumulationAddon, task=Noisy, guard=guard, gradient_accumulation_steps=2))
            for guard in (True, False)]  # fmt: skip
    assert runs[0].fault_checks > 1
    assert difference(left(runs[1]), left(runs[0])) is None


def test_what_a_step_does_to_its_batch_is_undone() -> None:
    """It may change tensors in place, and take entries out of a dict."""

    class Rough(Task):
        def train_step(self, batch: Any) -> Any:
            target = batch.pop("y")
            batch["x"].mul_(0.5)
            return super().train_step((batch["x"], target))

    def batches() -> Any:
        torch.manual_seed(3)
        return [{"x": torch.randn(4, 4), "y": torch.randn(4, 1)} for _ in range(6)]

    windows = {"gradient_accumulation_steps": 2}
    runs = [train(build(GradientAccumulationAddon, task=Rough, guard=guard, **windows), batches(), 1)
            for guard in (True, False)]  # fmt: skip
    assert runs[0].fault_checks == 1
    assert difference(left(runs[1]), left(runs[0])) is None


def faulty(*numbers: int, size: float = 1e-6, **options: Any) -> Any:
    """A trainer with a fault in these computations of a gradient, and batches that another one can have too."""
    trainer = build(**options)
    Fault(trainer.unwrap().head.weight, *numbers, size=size)
    return trainer


def batches(count: int = 10) -> list[Any]:
    torch.manual_seed(4)
    return [*DataLoader(Drawing(4 * count), 4)]


@pytest.mark.parametrize("number", [3, 4])
def test_a_flip_is_found_before_the_optimizer_steps(number: int) -> None:
    """In either computation; the error tells the step, the parameter and the size."""
    trainer, reference = faulty(number), build(guard=False)
    train(reference, batches()[:2], 1)
    words = r"step 3: two computations of its gradients differ in the gradient of head.weight: 1 elements, by at most 1"
    with pytest.raises(SilentFaultError, match=words) as error:
        train(trainer, batches(), 1)
    assert "use_deterministic_algorithms" in str(error.value)
    (fault,) = trainer.faults
    assert fault["difference"] == pytest.approx(1e-6, rel=0.2)
    assert (fault["step"], fault["rank"], fault["where"], fault["name"]) == (3, 0, "gradient", "head.weight")
    assert (fault["elements"], fault["names"]) == (1, 1)
    assert trainer.progress_checker.step == 2
    for name, value in reference.unwrap().named_parameters():
        assert torch.equal(value, trainer.unwrap().get_parameter(name)), name
    assert trainer.log_history[-1]["fault/difference"] == fault["difference"]


def test_a_fault_in_a_window_is_found() -> None:
    """In the second batch of the first computation."""
    options = {"gradient_accumulation_steps": 2, "fault_check_every": 2}
    trainer = build(GradientAccumulationAddon, **options)
    Fault(trainer.unwrap().head.weight, 4)  # Two batches of step 1; of step 2 the second one.
    with pytest.raises(SilentFaultError, match=r"step 2: .* in the gradient of head\.weight"):
        train(trainer, DataLoader(Drawing(40), 4), 1)
    assert [each["step"] for each in trainer.faults] == [2]


def test_a_step_that_does_not_compute_the_same_twice_ends_the_run() -> None:
    """The text names what makes torch deterministic."""

    class Counting(Task):
        calls = 0

        def train_step(self, batch: Any) -> Any:
            self.calls += 1
            x, y = batch
            return super().train_step((x + 1e-3 * self.calls, y))

    trainer = build(task=Counting)
    with pytest.raises(SilentFaultError, match=r"use_deterministic_algorithms\(True\)"):
        train(trainer, batches(), 1)
    assert trainer.calls == 2 + 2


def test_a_difference_of_a_buffer_and_of_a_loss_is_found() -> None:
    """Where the gradients agree."""

    class Counting(Task):
        calls = 0
        where = "buffer"

        def train_step(self, batch: Any) -> Any:
            self.calls += 1
            out = super().train_step(batch)
            if self.calls == 4 and self.where == "buffer":
                self.model.counted += 1e-6
            return {"loss": out["loss"] + 1e-3 * (self.calls == 4 and self.where == "loss")}

    for where, name in {"buffer": "counted", "loss": "batch 1 of the step"}.items():
        trainer = build(task=Counting)
        trainer.unwrap().register_buffer("counted", torch.zeros(1))
        trainer.where = where
        with pytest.raises(SilentFaultError, match=f"the {where} of {name}: 1 elements"):
            train(trainer, batches(), 1)
        assert trainer.faults[0]["name"] == name


def test_observers_count_a_step_once() -> None:
    """The ledger, callbacks, throughput and the file of a logger are those of a run without the guard."""

    class Counts:
        def __init__(self) -> None:
            self.substeps = 0

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.substeps += 1

    found = []
    for guard in (True, False):
        own = Counts()
        trainer = build(
            LedgerAddon, CallbackAddon, ThroughputAddon, JSONLLoggerAddon, GradientAccumulationAddon, guard=guard,
            ledger_path=f"ledger-{guard}.jsonl", callbacks=[own], jsonl_path=f"log-{guard}.jsonl",
            gradient_accumulation_steps=2, **({"fault_check_every": 1} if guard else {}),
        )  # fmt: skip
        train(trainer)
        ledger = Path(f"ledger-{guard}.jsonl").read_text().splitlines()[1:]
        log = [json.loads(line) for line in Path(f"log-{guard}.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in each.items() if k in ("train/loss", "step", "train/grad_norm")} for each in log]
        found.append((ledger, own.substeps, trainer.step_flops, kept, left(trainer)))
    assert len(found[0][0]) == 14
    assert difference(found[1], found[0]) is None
    assert found[0][1] == 14


def test_the_number_of_checks_is_resumed() -> None:
    """And the resumed run ends bitwise as the whole one."""
    whole = train(build(StateManagerAddon, save_path="whole", save_every=4), batches(), 1)
    first, data = build(StateManagerAddon, save_path="parts", save_every=4), batches()
    torch.manual_seed(2)
    first.run(1, data, max_steps=5)
    again = build(StateManagerAddon, save_path="parts", save_every=4, resume="auto")
    again.run(1, data)
    assert again.fault_checks == whole.fault_checks == 3
    assert difference(left(whole), left(again)) is None


def test_what_cannot_be_computed_twice_is_refused() -> None:
    """A step that changes parameters."""

    class Changing(Task):
        def train_step(self, batch: Any) -> Any:
            with torch.no_grad():
                self.model.head.bias.mul_(0.5)
            return super().train_step(batch)

    with pytest.raises(StepError, match=r"train_step changes the parameter head\.bias"):
        train(build(task=Changing), batches(), 1)


def test_parameters_without_shapes_wait_for_a_later_step() -> None:
    """The first forward draws the weights of a lazy layer; that step is not checked."""

    def run(guard: bool) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.2), nn.Linear(8, 1))
        return train(build(guard=guard, model=model, **({"fault_check_every": 1} if guard else {})), batches(), 1)

    with_it, without = run(True), run(False)
    assert with_it.fault_checks == 9
    assert difference(left(without), left(with_it)) is None


WRONG: dict[str, dict[str, Any]] = {
    "fault_check_every=0; write": {"fault_check_every": 0},
    r"steps are checked: write a number of them": {"fault_check_every": Every(epochs=1)},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**WRONG[words])


# ------------------------------------------------------------------------------------------------------ several ranks


class OnRank(Task):
    """The gradient of one rank is another one in the second computation of step 2: before the ranks average it."""

    def train_step(self, batch: Any) -> Any:
        if (self.progress_checker.step, self.current_run.computation, self.rank) == (1, 2, 1):
            handle = self.unwrap().head.weight.register_hook(lambda g: (handle.remove(), g + 1e-6)[1])
        return super().train_step(batch)


@on_ranks(2, 4)
def test_the_rank_with_the_fault_is_named(world: int, tmp_path: Path) -> None:
    """In windows with dropout, also in the batch whose gradients DistributedDataParallel averages."""
    options = {"gradient_accumulation_steps": 2, "fault_check_every": 2}
    data = [(x.repeat(world, 1), y.repeat(world, 1)) for x, y in batches(8)]
    loader = DataLoader(torch.utils.data.TensorDataset(*(torch.cat(each) for each in zip(*data))), 4)
    trainer = build(MultiGPUAddon, GradientAccumulationAddon, task=OnRank, **options)
    with pytest.raises(SilentFaultError, match=r"the gradient of head\.weight on rank 1: 8 elements, by at most 2"):
        train(trainer, loader, 1)
    assert trainer.progress_checker.step == 1
    assert trainer.world_size == world
    found = trainer.gather([(each["step"], each["rank"], each["name"]) for each in trainer.faults])
    assert found == [[(2, 1, "head.weight")]] * world
