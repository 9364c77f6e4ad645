"""The hooks of a step that say when it begins and ends, whether it may step, and how it is differentiated."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zae import AddOnBase, Trainer, replaces
from zae.addons import AMPAddon, GradientAccumulationAddon, StateManagerAddon
from zae.compose.introspect import hooks_of
from zae.loop.step_output import StepOutput


class Task(Trainer):
    """A squared error, with the output of the model."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = self.model(batch)
        return {"loss": output.square().mean(), "output": output}

    test_step = train_step


def make(cls: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options)


def batches(count: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 2, generator=torch.Generator().manual_seed(0)))


class WatchingAddon(AddOnBase):
    """Note the begin and the end of each step, and the outputs of its model."""

    layer = "observe"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[tuple[str, int, int]] = []
        self.outputs: list[Any] = []

    def on_step_begin(self, batch: Any) -> None:
        super().on_step_begin(batch)
        self.events.append(("begin", self.progress_checker.step, len(self.micro_batches(batch))))

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        self.events.append(("end", self.progress_checker.step, len(outputs)))
        assert all(output.weight == 8 and output.loss is output.values["loss"] for output in outputs)
        self.outputs += [weakref.ref(output.values["output"]) for output in outputs]
        assert all(each() is not None for each in self.outputs[-len(outputs) :])


def test_a_step_says_when_it_begins_and_ends_and_frees_its_outputs() -> None:
    trainer = make(Task.add_on(WatchingAddon, GradientAccumulationAddon), gradient_accumulation_steps=2)
    trainer.run(1, batches(5))
    windows = [(0, 2), (1, 2), (2, 1)]
    assert trainer.events == [each for n, size in windows for each in (("begin", n, size), ("end", n + 1, size))]
    gc.collect()
    assert [each() for each in trainer.outputs] == [None] * 5


def test_an_override_of_should_step_leaves_steps_out() -> None:
    class EveryOther(Task):
        def should_step(self, outputs: Any) -> bool:
            assert all(isinstance(output, StepOutput) for output in outputs)
            return super().should_step(outputs) and self.progress_checker.step % 2 == 0

    trainer, plain = make(EveryOther), make(Task)
    trainer.run(1, batches())
    plain.run(1, batches()[::2])
    assert (trainer.progress_checker.step, trainer.progress_checker.skipped_steps) == (4, 2)
    assert not torch.equal(trainer.model.weight, make(Task).model.weight)
    one = make(EveryOther)
    one.run(1, batches(2))
    other = make(Task)
    other.run(1, batches(1))
    assert torch.equal(one.model.weight, other.model.weight)


class TwiceAddon(AddOnBase):
    """Differentiate twice, and so keep the graph."""

    layer = "loop"

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradient a second time."""
        super().backward(loss, **{**kwargs, "retain_graph": True})
        super().backward(loss, retain_graph=False)


def test_backward_passes_its_arguments_on() -> None:
    twice, once = make(Task.add_on(TwiceAddon, AMPAddon), precision="fp32"), make(Task)
    twice.run(1, batches(1))
    once.run(1, batches(1))
    start = make(Task).model.weight
    torch.testing.assert_close(twice.model.weight - start, 2 * (once.model.weight - start))


def test_an_override_of_backward_without_kwargs_fails_beside_one_that_passes_them() -> None:
    class Plain(Task):
        def backward(self, loss: Any) -> None:  # type: ignore[override]
            super().backward(loss)

    make(Plain).run(1, batches(1))
    with pytest.raises(TypeError, match=r"Plain.backward\(\) got an unexpected keyword argument"):
        make(Plain.add_on(TwiceAddon)).run(1, batches(1))


def test_an_engine_may_return_plain_pairs() -> None:
    class EngineAddon(AddOnBase):
        """Do forward and backward in one."""

        layer = "parallel"

        @replaces
        def gradients(self, batch: Any) -> Any:
            out = self.train_step(batch)
            out["loss"].backward()
            return [(out, 8)]

    ours, plain = make(Task.add_on(EngineAddon, WatchingAddon)), make(Task)
    assert repr(ours.run(1, batches())) == repr(plain.run(1, batches()))
    assert torch.equal(ours.model.weight, plain.model.weight)


def test_the_table_of_events_is_what_a_run_calls(tmp_path: Path) -> None:
    """Each event is in the table of docs/extending/addons.md, and they are called in its order."""
    page = (Path(__file__).parents[2] / "docs" / "extending" / "addons.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(on_\w+)\(", page, re.M)
    assert sorted(table) == sorted(name for name in hooks_of(Trainer) if name.startswith("on_"))
    called: list[str] = []

    def noting(name: str) -> Any:
        def event(self: Any, *args: Any) -> None:
            getattr(super(watching, self), name)(*args)
            called.append(name)

        return event

    watching = type("Watching", (Task,), {name: noting(name) for name in table})
    options = {"save_path": tmp_path, "keep_best": 0, "save_on_signal": False}
    make(watching.add_on(StateManagerAddon), **options).run(1, batches(1), batches(1))
    once = [name for name in table if name not in ("on_load", "on_exception")]
    assert called == once
    called.clear()
    make(watching.add_on(StateManagerAddon), **options, resume="auto").run(2, batches(1), batches(1))
    assert called == ["on_load", *once]
    called.clear()
    with pytest.raises(TypeError):
        make(watching).run(1, [None, "no tensor"])
    assert called[-1] == "on_exception"
