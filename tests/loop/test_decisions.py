"""should_validate and should_checkpoint: a task, an add-on or an attribute decides, alike on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.rank_tasks import forks
from zae import AddOnBase, Every, TaskError, Trainer
from zae.addons import MultiGPUAddon, StateManagerAddon


class Plain(Trainer):
    """The defaults."""

    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class Task(Plain):
    """Validates after steps 2 and 5, and saves where the step divides by 4, whatever is due."""

    def should_validate(self, is_due):
        return self.progress_checker.epoch_batch > 0 and self.progress_checker.step in (2, 5)

    def should_checkpoint(self, is_due):
        return self.progress_checker.epoch_batch > 0 and self.progress_checker.step % 4 == 0


class Opinion(Task):
    """Each rank decides otherwise, as those would that read a clock."""

    def should_validate(self, is_due):
        assert self.world_size == 2
        return self.progress_checker.epoch_batch > 0 and self.progress_checker.step == 1 + self.rank

    def should_checkpoint(self, is_due):
        return self.progress_checker.epoch_batch > 0 and self.progress_checker.step == 2 - self.rank


def make(cls, *add_ons, device="cpu", **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return cls.add_on(*add_ons)(model, device, optimizer=optimizer, log_bar=False, **options)


def batches(count=6):
    return [torch.full((4, 2), index + 1.0) for index in range(count)]


def saved(folder):
    return sorted(int(path.name[-8:]) for path in folder.glob("step-*"))


def validated(trainer):
    return [row["step"] for row in trainer.valid_history]


def test_a_task_decides_when_to_validate_and_to_save(tmp_path):
    trainer = make(Task, StateManagerAddon, save_path=tmp_path, keep_last=None, keep_best=0)
    trainer.run(1, batches(), batches(1))
    assert validated(trainer) == [2, 5]
    assert saved(tmp_path) == [4, 6]  # The end of a run is always saved.
    plain = make(Plain, StateManagerAddon, save_path=tmp_path / "plain", keep_last=None, keep_best=0)
    plain.run(1, batches(), batches(1))
    assert (validated(plain), saved(tmp_path / "plain")) == ([6], [6])
    assert torch.equal(plain.model.weight, trainer.model.weight)


def test_an_add_on_sees_what_the_task_decided_and_what_is_due(tmp_path):
    asked = []

    class NotBeforeAddon(AddOnBase):
        """Validate not before step 3."""

        def should_validate(self, is_due):
            answer = super().should_validate(is_due)
            asked.append((self.progress_checker.step, self.progress_checker.epoch_batch == 0, is_due, answer))
            return answer and self.progress_checker.step > 2

    trainer = make(Task, NotBeforeAddon)
    trainer.run(1, batches(), batches(1), valid_every=3)
    assert validated(trainer) == [5]
    assert asked == [(1, False, False, False), (2, False, False, True), (3, False, True, False),
                     (4, False, False, False), (5, False, False, True), (6, False, True, False),
                     (6, True, False, False)]  # fmt: skip
    assert "should_validate(is_due)" in make(Task, NotBeforeAddon).explain()
    assert "when that is True:" in Task.explain()
    assert "is_due" not in Plain.explain()
    assert "should_validate is overridden" in str(make(Task).plan(1, batches(), batches(1)))


def test_what_was_asked_for_is_done_in_any_case(tmp_path):
    class Never(Task):
        def should_validate(self, is_due):
            return False

        def should_checkpoint(self, is_due):
            return False

        def on_step_end(self, outputs):
            super().on_step_end(outputs)
            if self.progress_checker.step == 3:
                self.request("validate")
                self.request("save")

    trainer = make(Never, StateManagerAddon, save_path=tmp_path, save_every=1, keep_last=None)
    trainer.run(1, batches(), batches(1))
    assert validated(trainer) == [3]
    assert saved(tmp_path) == [3, 6]


def test_a_resumed_run_decides_as_the_one_that_was_not_interrupted(tmp_path):
    whole = make(Task, StateManagerAddon, save_path=tmp_path / "whole")
    expected = whole.run(2, batches(), batches(1))
    make(Task, StateManagerAddon, save_path=tmp_path / "cut").run(2, batches(), batches(1), max_steps=5)
    resumed = make(Task, StateManagerAddon, save_path=tmp_path / "cut", resume="auto")
    found = resumed.run(2, batches(), batches(1))
    assert found["valid_metrics_history"] == expected["valid_metrics_history"]
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_rank_0_decides_for_all(tmp_path):
    """No rank waits for another one."""
    trainer = make(Opinion, MultiGPUAddon, StateManagerAddon, device=["cpu", "cpu"], save_path=tmp_path, keep_best=0)
    with forks():
        trainer.run(1, batches(), batches(1))
    assert validated(trainer) == [1]
    assert saved(tmp_path) == [2, 3]


def test_a_decision_that_is_not_returned_is_refused(tmp_path):
    class Forgets(Task):
        def should_checkpoint(self, is_due):
            self.log({"x": 1.0}, 0)

    with pytest.raises(TaskError, match=r"Forgets\.should_checkpoint .*returned None, and the loop needs"):
        make(Forgets, StateManagerAddon, save_path=tmp_path, save_every=Every(steps=9)).run(1, batches())
