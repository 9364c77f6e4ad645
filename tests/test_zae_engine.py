"""What the tests of zae-engine use beyond its document: the same names work here, or say what to write."""

import pytest
import torch

from kit import hand
from kit.table import Task, parts
from zae import MissingError, ProgressChecker
from zae.schedulers import CosineAnnealingScheduler, SchedulerBase, SchedulerChain, WarmUpScheduler


def test_the_counters_of_progress_begin_at_1():
    checker = ProgressChecker()
    for _ in range(7):
        checker.update_epoch()
    for _ in range(5):
        checker.update_step()
    assert (checker.get_epoch(), checker.get_step()) == (8, 6)
    assert (checker.epoch, checker.step, checker.batch) == (7, 5, 5)
    checker.init_state()
    assert (checker.get_epoch(), checker.get_step()) == (1, 1)
    assert checker == ProgressChecker()


def test_the_base_of_schedulers_is_public_and_abstract():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(TypeError, match="abstract method lr_at"):
        SchedulerBase(optimizer, total_iters=9, eta_min=0.1)

    class Half(SchedulerBase):
        def lr_at(self, step):
            return [base / 2 for base in self.base_lrs]

    assert Half(optimizer, total_iters=9).get_last_lr() == [0.5]
    assert issubclass(WarmUpScheduler, SchedulerBase)


def test_a_chain_tells_where_its_parts_end():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    chain = SchedulerChain(WarmUpScheduler(optimizer, 3), CosineAnnealingScheduler(optimizer, 4))
    assert chain.next_iters == [3, 7] == [3, chain.total_iters]
    assert chain.lr_at(chain.next_iters[0]) == [1.0]


def test_the_log_can_be_reset_with_the_metrics_and_its_entries_be_set():
    model, optimizer = parts()
    trainer = Task(model, "cpu", optimizer=optimizer, log_bar=False)
    trainer.run(1, hand.loader(), hand.loader())
    trainer.log_reset()
    assert trainer.train_metrics["loss"] > 0
    trainer.log_reset(epoch_end=True)
    assert [len(trainer.log_train), len(trainer.log_test)] == [0, 0]
    assert [trainer.train_metrics, trainer.test_metrics] == [{}, {}]
    trainer.log_train.record({"loss": 1.0, "output": torch.zeros(2)}, weight=3)
    trainer.log_train["loss"] = [1, 2.0, torch.tensor(6.0)]
    assert trainer.log_train["loss"] == [1.0, 2.0, 6.0]
    assert trainer.log_train.means() == {"loss": 3.0}
    trainer.run(1, hand.loader())
    assert len(trainer.log_train["loss"]) == 6


@pytest.mark.parametrize("name", ["batch_size", "valid_batch_size"])
def test_a_trainer_has_no_batch_size_of_a_loader_that_it_does_not_own(name):
    model, optimizer = parts()
    with pytest.raises(MissingError, match=f"no attribute '{name}'; here it is .*own batch_size"):
        getattr(Task(model, "cpu", optimizer=optimizer), name)
