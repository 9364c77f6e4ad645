"""An optimizer that evaluates the loss itself: with the closure of the page, each option acts as in a loop by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit import hand
from zae import ConfigError, TaskError, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon


class Task(Trainer):
    """Regression."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    test_step = train_step


class OfThePage(Task):
    """The closure of docs/howto/optimizers.md."""

    def gradients(self, batch):
        self.present = batch
        self.outputs = super().gradients(batch)
        return self.outputs

    def step_one(self, optimizer):
        self.is_evaluated = True

        def closure():
            if not self.is_evaluated:
                optimizer.zero_grad()
                self.gradients(self.present)
                self.unscale()
                self.clip()
            self.is_evaluated = False
            return sum(values["loss"].detach() for values, _ in self.outputs) / len(self.outputs)

        optimizer.step(closure)
        return True


class OfTorch(Task):
    """The closure of torch's documentation."""

    def on_step_begin(self, batch):
        super().on_step_begin(batch)
        self.present = batch

    def step_one(self, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = self.train_step(self.present)["loss"]
            loss.backward()
            return loss

        optimizer.step(closure)
        return True


def start():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def pairs(count=4):
    stream = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=stream), torch.randn(8, 2, generator=stream)) for _ in range(count)]


def by_hand(window, clip, precision):
    model, optimizer = start()
    for first in range(0, 4, window):

        def closure(first=first):
            batches = pairs()[first : first + window]
            optimizer.zero_grad()
            losses = []
            for inputs, targets in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    losses.append(nn.functional.mse_loss(model(inputs), targets))
                (losses[-1] / len(batches)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return sum(loss.detach() for loss in losses) / len(losses)

        optimizer.step(closure)
    return hand.digest(model.weight)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_closure_of_the_page_keeps_windows_clip_and_precision(window, clip, precision):
    model, optimizer = start()
    cls = OfThePage.add_on(AMPAddon, GradientAccumulationAddon, EMAAddon)
    options = {"precision": precision, "gradient_clip": clip, "gradient_accumulation_steps": window}
    cls(model, "cpu", optimizer=optimizer, log_bar=False, **options).run(1, pairs())
    assert hand.digest(model.weight) == by_hand(window, clip, precision)


def layer(kind):
    return {"dropout": nn.Dropout(0.2), "batch norm": nn.BatchNorm1d(8)}[kind]


@pytest.mark.parametrize("kind", ["dropout", "batch norm"])
@pytest.mark.parametrize("max_iter", [1, 5])
def test_a_step_evaluates_as_often_as_the_loop_by_hand(kind, max_iter):
    """Once more would draw other dropout masks, and move the running statistics of a batch norm."""

    def begin():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), layer(kind), nn.Linear(8, 2))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=max_iter)

    model, optimizer = begin()
    for inputs, targets in pairs():

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        optimizer.step(closure)
    other, optimizer = begin()
    OfThePage(other, "cpu", optimizer=optimizer, log_bar=False, gradient_clip=0.1).run(1, pairs())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("add_ons", "options", "found"),
    [
        ((), {"gradient_clip": 0.1}, "without gradient_clip; "),
        ((AMPAddon,), {"precision": "bf16"}, "without AMPAddon; "),
        ((AMPAddon,), {"precision": "bf16", "gradient_clip": 0.1}, "without gradient_clip, AMPAddon; "),
    ],
)
def test_a_closure_that_leaves_something_out_is_refused(add_ons, options, found):
    model, optimizer = start()
    trainer = OfTorch.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
    with pytest.raises(TaskError, match=rf"OfTorch.*gradients {found}.*closure calls self\.gradients\(batch\)"):
        trainer.run(1, pairs())


@pytest.mark.parametrize("add_ons", [(), (EMAAddon,)])
def test_a_closure_that_leaves_nothing_out_is_taken(add_ons):
    model, optimizer = start()
    OfTorch.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False).run(1, pairs())
    assert hand.digest(model.weight) == by_hand(1, 0.0, "fp32")


@pytest.mark.parametrize("cls", [OfThePage, OfTorch])
def test_a_loss_scale_is_refused(cls):
    model, optimizer = start()
    trainer = cls.add_on(AMPAddon)(model, "cpu", optimizer=optimizer, precision="fp16", log_bar=False)
    with pytest.raises(ConfigError, match=r"precision='fp16' scales the loss.*LBFGS.*write precision='bf16'"):
        trainer.run(1, pairs())


class Bag(Trainer):
    """Gradients of an embedding, sparse or not."""

    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_norm_of_sparse_gradients_is_refused_in_words(kind):
    model = kind(10, 2, sparse=True)
    options = {"optimizer": torch.optim.SparseAdam(model.parameters()), "log_bar": False}
    data = [torch.randint(10, (8, 3))]
    Bag(model, "cpu", **options).run(1, data)
    with pytest.raises(ConfigError, match=r"norm of the gradients.*sparse.*\(10, 2\).*sparse=False.*gradient_clip=0"):
        Bag(model, "cpu", gradient_clip=1.0, **options).run(1, data)
