"""Optimizers with train and eval modes: one kind of weights to evaluate, another to train, both exact."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from test_optimizer_state import Base, assert_resumes_at_every_step
from torch import Tensor, nn

from kit.hand import digest, loader, network
from kit.matrix import first_difference
from kit.table import Task
from zae import Every
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.weights import load_weights


class Exchanging(Base):
    """It exchanges weights and their average, and notes its mode on itself: no state and no group has it."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.is_training = False

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        assert self.is_training
        parameter.sub_(parameter.grad, alpha=lr)
        state.setdefault("other", parameter.clone()).mul_(0.5).add_(parameter, alpha=0.5)

    def _exchange(self, is_training: bool) -> None:
        for parameter in self.param_groups[0]["params"] if self.is_training != is_training else ():
            if "other" in self.state[parameter]:
                kept = parameter.detach().clone()
                parameter.data.copy_(self.state[parameter]["other"])
                self.state[parameter]["other"].copy_(kept)
        self.is_training = is_training

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)


KINDS: dict[str, Any] = {
    "AdamW": lambda p, lr=0.05: schedulefree.AdamWScheduleFree(p, lr=lr, warmup_steps=2),
    "RAdam": lambda p, lr=0.05: schedulefree.RAdamScheduleFree(p, lr=lr),
    "SGD": lambda p, lr=0.5: schedulefree.SGDScheduleFree(p, lr=lr),
    "exchanging": Exchanging,
}


def make(kind: str, *add_ons: Any, cls: Any = Task, **options: Any) -> Any:
    model = network()
    return cls.add_on(*add_ons)(model, "cpu", optimizer=KINDS[kind](model.parameters()), log_bar=False, **options)


def by_hand(kind: str, n_epoch: int) -> tuple[Any, Any]:
    """A loop as its authors write it."""
    model = network()
    optimizer = KINDS[kind](model.parameters())
    torch.manual_seed(5)
    model.train()
    optimizer.train()
    for _ in range(n_epoch):
        for inputs, targets in loader():
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def loss_by_hand(model: Any, batches: Any, *, by_sample: bool = True) -> float:
    model.eval()
    weights = [len(x) if by_sample else 1 for x, _ in batches]
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in batches]
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_files_have_the_evaluation_weights(kind: str) -> None:
    """As by hand with ``optimizer.eval()``; no code has called ``optimizer.train()``."""
    valid = list(loader(seed=4, shuffle=False))
    model, optimizer = by_hand(kind, 2)
    training = digest(model)
    optimizer.eval()
    expected = loss_by_hand(model, valid)
    trainer = make(kind, StateManagerAddon, save_path="save")
    torch.manual_seed(5)
    metrics = trainer.run(2, loader(), valid)
    assert digest(trainer.unwrap()) == training
    assert digest(model) != training
    assert metrics["valid_metrics_history"][-1]["valid_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate(valid)["loss"] == pytest.approx(expected, rel=1e-6)
    inferred = [out["loss"].item() for out in trainer.inference(valid)]
    assert sum(inferred) / len(inferred) == pytest.approx(loss_by_hand(model, valid, by_sample=False), rel=1e-6)
    for weights in (load_weights(trainer.save_model("own.safetensors")), load_checkpoint(trainer.last_path)[1]):
        assert first_difference(dict(model.state_dict()), weights) is None
    assert digest(trainer.unwrap()) == training


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_and_saves_leave_training_as_it_is(kind: str) -> None:
    """The way to the other weights and back is not exact, so it is not gone."""

    class Curious(Task):
        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            self.save_model("own.safetensors")
            self.evaluate(loader(shuffle=False))

    outcomes = []
    for cls, every, add_ons in ((Task, None, ()), (Curious, 1, (StateManagerAddon,))):
        options = {"save_path": "save", "save_every": 1} if add_ons else {}
        trainer = make(kind, *add_ons, cls=cls, **options)
        torch.manual_seed(5)
        trainer.run(2, loader(), loader(seed=4, shuffle=False) if every else None, valid_every=every)
        outcomes.append((trainer.unwrap().state_dict(), trainer.optimizer.state_dict()))
    assert first_difference(*outcomes) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_goes_on_from_the_training_weights(kind: str, dtype: torch.dtype) -> None:
    """Bitwise from every step, though the weights in the file are those of evaluation."""
    assert_resumes_at_every_step(KINDS[kind], dtype)


ALL = (StateManagerAddon, EMAAddon, AMPAddon, GradientAccumulationAddon)


@pytest.mark.parametrize(("kind", "precision"), [("AdamW", "bf16"), ("AdamW", "fp16"), ("exchanging", "fp16")])
def test_composed_with_an_average_mixed_precision_and_windows(kind: str, precision: str) -> None:
    """Killed after any step and started again, with skipped steps among them."""

    def run(folder: str, steps: int) -> Any:
        trainer = make(
            kind, *ALL, save_path=folder, save_every=1, resume="auto", decay=0.5, precision=precision,
            loss_scale=(2.0**19, 1.0), gradient_accumulation_steps=2, seed=3, gradient_clip=1.0,
        )  # fmt: skip
        trainer.run(3, loader(), loader(seed=4, shuffle=False), max_steps=steps)
        return trainer

    whole = run("whole", 8)
    assert (whole.progress_checker.skipped_steps > 0) == (precision == "fp16")
    for steps in (1, 5):
        run(f"cut-{steps}", steps)
        resumed = run(f"cut-{steps}", 8)
        a, b = whole.state_dict(), resumed.state_dict()
        for part in ("model", "training_weights", "optimizer", "EMAAddon"):
            assert first_difference(a[part], b[part]) is None, part
        assert whole.metrics["valid_metrics_history"] == resumed.metrics["valid_metrics_history"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_weights_are_evaluated_as_they_were_scored(kind: str) -> None:
    """After restore_best(), and after the weights of a file were loaded."""
    valid = list(loader(seed=4, shuffle=False))
    trainer = make(kind, StateManagerAddon, save_path="save", keep_last=None)
    trainer.run(3, loader(), valid)
    trainer.restore_best()
    assert trainer.evaluate(valid)["loss"] == trainer.best["loss"]
    best = load_checkpoint(trainer.best_path)[1]
    assert first_difference(best, load_weights(trainer.save_model("best.safetensors"))) is None
    fresh = make(kind)
    fresh.apply_weights("best.safetensors")
    assert fresh.evaluate(valid)["loss"] == trainer.best["loss"]
    trainer.apply_weights(load_checkpoint(trainer.last_path)[1])
    assert trainer.evaluate(valid)["loss"] == trainer.valid_history[-1]["valid_loss"]


@pytest.mark.parametrize(("kind", "cut"), [("AdamW", 4), ("AdamW", 10), ("exchanging", 10)])
def test_a_script_that_restores_the_best_between_two_runs(kind: str, cut: int) -> None:
    """Killed in either run, the script ends as if it had not been."""

    class Killed(Exception):
        pass

    class Ending(Task):
        at = 0

        def checkpoint(self) -> None:
            super().checkpoint()
            if self.progress_checker.step == self.at:
                raise Killed

    def script(folder: str, at: int) -> Any:
        trainer = make(
            kind, StateManagerAddon, cls=Ending, save_path=folder, save_every=1, keep_last=None, resume="auto", seed=2
        )
        trainer.at = at
        trainer.run(1, loader(), loader(seed=4, shuffle=False), valid_every=2)
        trainer.restore_best()
        trainer.run(1, loader(), loader(seed=4, shuffle=False), valid_every=Every(epochs=1))
        return trainer

    whole = script("whole", -1)
    with pytest.raises(Killed):
        script("cut", cut)
    resumed = script("cut", -1)
    a, b = whole.state_dict(), resumed.state_dict()
    for part in ("model", "training_weights", "optimizer"):
        assert first_difference(a[part], b[part]) is None, part


def test_steps_without_a_run_and_an_evaluation_that_fails() -> None:
    """Each finds the weights that it needs; mode "test" evaluates a batch with those of evaluation too."""
    trainer, batch = make("AdamW"), next(iter(loader(shuffle=False)))
    for _ in range(3):
        trainer.run_batch(batch)
    training = digest(trainer.unwrap())
    expected = trainer.evaluate([batch])["loss"]
    trainer.toggle("test")
    trainer.log_reset()
    trainer.run_batch(batch)
    assert trainer.log_test.means()["loss"] == pytest.approx(expected)
    trainer.toggle("train")
    trainer.test_step = lambda batch: {"loss": 1 / 0}
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate([batch])
    assert digest(trainer.unwrap()) == training
    trainer.run_batch(batch)
    assert trainer.progress_checker.step == 4


def test_weights_outside_of_the_model_and_an_optimizer_in_eval_mode() -> None:
    """A learnt loss weight has its training value; a state that was saved in eval mode stays in it."""

    def make_both() -> Any:
        model, weight = network(), nn.Parameter(torch.ones(1))

        class Weighted(Task):
            def train_step(self, batch: Any) -> Any:
                out = super().train_step(batch)
                return {**out, "loss": out["loss"] * self.weight.square().sum()}

        trainer = Weighted(model, "cpu", optimizer=KINDS["SGD"]([*model.parameters(), weight]), log_bar=False)
        trainer.weight = weight
        return trainer

    batches = list(loader(shuffle=False))
    torch.manual_seed(0)
    first = make_both()
    first.run(1, batches)
    resumed = make_both()
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(first.weight, resumed.weight)
    assert digest(first.unwrap()) == digest(resumed.unwrap())
    first.optimizer.eval()
    state = first.state_dict()
    assert "training_weights" not in state
    for trainer in (resumed, first):
        trainer.load_state_dict(state)
        assert digest(trainer.unwrap()) == digest(first.unwrap())
        trainer.run(1, batches)
    assert digest(first.unwrap()) == digest(resumed.unwrap())


def test_training_weights_that_are_not_weights_are_refused() -> None:
    trainer = make("AdamW")
    trainer.run(1, loader())
    state = trainer.state_dict()
    for wrong in (3, {"a": torch.ones(1)}, dict.fromkeys(state["training_weights"], 1)):
        with pytest.raises(ValueError, match="weights"):
            trainer.load_state_dict({**state, "training_weights": wrong})
