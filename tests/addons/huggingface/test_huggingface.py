"""HuggingFaceAddon against transformers.Trainer: the same weights, for six heads."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import DatasetDict
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset
from transformers import TrainingArguments

from kit import hf
from zae import Every, Trainer
from zae.addons import CallbackAddon, GradientAccumulationAddon, HuggingFaceAddon, StateManagerAddon
from zae.addons.huggingface.transformers import from_arguments
from zae.errors import ConfigError, OptionError, ZaeError

Task = Trainer.add_on(HuggingFaceAddon)
_SGD = {"optim": "sgd", "learning_rate": 0.1}
_ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


def theirs(head: str, folder: Any, kind: Any = transformers.Trainer, **more: Any) -> dict[str, torch.Tensor]:
    """The weights that transformers.Trainer arrives at."""
    model = hf.make_model(head)
    args = hf.arguments(folder, num_train_epochs=2, **more)
    kind(model, args, train_dataset=hf.dataset(head)).train()
    return model.state_dict()


def ours(head: str, **more: Any) -> dict[str, torch.Tensor]:
    """The weights that zae arrives at."""
    model = hf.make_model(head)
    options = {"num_train_epochs": 2, "train_dataset": hf.dataset(head), **more}
    Trainer.add_on(HuggingFaceAddon, GradientAccumulationAddon)(model, "cpu", **options).train()
    return model.state_dict()


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def without_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out attention's key biases: their gradient is zero in exact arithmetic, and AdamW steps on its rounding."""
    found = {name: value for name, value in weights.items() if not name.endswith("key.bias")}
    for name in [name for name in found if name.endswith("c_attn.bias")]:  # Queries, keys and values in one.
        found[name] = torch.cat([found[name].chunk(3)[0], found[name].chunk(3)[2]])
    return found


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("head", hf.HEADS)
def test_weights_are_those_of_transformers(head: str, tmp_path: Any) -> None:
    """Two epochs in the same random order, with clipping and a linear schedule."""
    start = hf.make_model(head).state_dict()
    expected, found = theirs(head, tmp_path, **_SGD), ours(head, **_SGD)
    assert difference(expected, found) <= 1e-6
    assert difference(start, found) > 1e-2
    expected, found = theirs(head, tmp_path, **_ADAMW), ours(head, **_ADAMW)
    assert difference(without_key_biases(expected), without_key_biases(found)) <= 1e-6


def rates_of(trainer: Any) -> list[float]:
    return [row["lr"] for row in trainer.log_history if "lr" in row]


def test_a_second_call_of_train_begins_the_schedule_anew(tmp_path: Any) -> None:
    """As long as the first, at the same learning rates; also where it is killed and resumed."""

    class Killed(BaseException):
        pass

    class Logs(Trainer):
        killed_at = 0

        def on_step_end(self, outputs: Any) -> None:
            super().on_step_end(outputs)
            if self.progress_checker.step == self.killed_at:
                raise Killed

    def script(folder: str, killed_at: int = 0) -> Any:
        options = {"log_every": 1, "log_bar": False, "save_path": tmp_path / folder, "save_every": 1, "resume": "auto"}
        kind = Logs.add_on(HuggingFaceAddon, StateManagerAddon)
        trainer = kind(hf.make_model(), "cpu", num_train_epochs=2, train_dataset=hf.dataset(), **_ADAMW, **options)
        trainer.killed_at = killed_at
        for _ in range(2):
            trainer.train()
        return trainer

    whole = script("whole")
    rates, half = rates_of(whole), whole.progress_checker.step // 2
    assert half == 6
    assert rates[:half] == rates[half:]
    assert rates[0] > rates[half - 1]
    for step in (3, half, half + 2):
        with pytest.raises(Killed):
            script(f"killed-{step}", step)
        resumed = script(f"killed-{step}")
        assert rates_of(resumed) == rates
        assert difference(resumed.model.state_dict(), whole.model.state_dict()) == 0


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("more", [{}, {"max_steps": 4}, {"num_train_epochs": 1.5}, {"model_init": True}], ids=str)
def test_a_second_call_of_train_is_that_of_transformers(more: Any, tmp_path: Any) -> None:
    """Steps, epochs, loss, order of the data and evaluations begin again; with model_init the weights do."""
    settings = {"optim_args": "momentum=0.9", "eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2, **_SGD}
    settings |= {name: value for name, value in more.items() if name != "model_init"}
    given = {"train_dataset": hf.dataset(), "eval_dataset": hf.dataset(count=5)}

    def model() -> dict[str, Any]:
        return {"model_init": lambda: hf.make_model()} if "model_init" in more else {"model": hf.make_model()}

    theirs = transformers.Trainer(args=hf.arguments(tmp_path, **settings), **model(), **given)
    task = Trainer.add_on(HuggingFaceAddon)
    trainer = task(device="cpu", **model(), **given, **settings)
    for _ in range(2):
        expected = theirs.train()
        found = trainer.train()
        assert found.global_step == expected.global_step
        assert found.training_loss == pytest.approx(expected.training_loss, abs=1e-6)
        assert found.metrics["epoch"] == pytest.approx(expected.metrics["epoch"])
        assert difference(trainer.model.state_dict(), theirs.model.state_dict()) <= 1e-6
        evaluated = [row["step"] for row in theirs.state.log_history if "eval_loss" in row]
        first = trainer.progress_checker.step - found.global_step
        assert [row["step"] - first for row in trainer.history.valid if row["step"] > first] == evaluated


def test_the_best_of_one_of_several_sets_and_a_share_of_the_run(tmp_path: Any) -> None:
    """``metric_for_best_model="eval_two_loss"`` and ``eval_steps=0.25`` through ``args=``, as Transformers has them."""
    sets = {"one": hf.dataset(count=5), "two": hf.dataset(count=9), "two_more": hf.dataset(count=3)}
    best = {}
    for metric in ("eval_two_loss", "two_more_loss"):
        settings = {"eval_strategy": "steps", "eval_steps": 0.25, "metric_for_best_model": metric, **_SGD}
        args = hf.arguments(tmp_path, num_train_epochs=2, **settings)
        theirs = transformers.Trainer(hf.make_model(), args, train_dataset=hf.dataset(), eval_dataset=sets)
        theirs.train()
        trainer = Task(hf.make_model(), args, train_dataset=hf.dataset(), eval_dataset=sets)
        trainer.train()
        assert trainer.best["score"] == pytest.approx(theirs.state.best_metric, abs=1e-6)
        steps = [row["step"] for row in theirs.state.log_history if "eval_one_loss" in row]
        assert [row["step"] for row in trainer.history.valid] == steps == [2, 4, 6]
        best[metric] = trainer.best["score"]
    assert len(set(best.values())) == 2


class Weighted(transformers.Trainer):
    """A trainer of Transformers with the right mean over the targets of a window, for models that do not compute it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs).loss * inputs["labels"].ne(-100).sum() / num_items_in_batch


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("head", hf.HEADS)
def test_accumulation_with_unequal_numbers_of_targets(head: str, tmp_path: Any) -> None:
    """Each target weighs alike in a window of three batches of 4 samples; the last window has two."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, **_SGD}
    found = ours(head, **settings)
    # Only causal models divide by num_items_in_batch themselves; question answering has no labels to count.
    kind = transformers.Trainer if head in ("causal", "question") else Weighted
    assert difference(theirs(head, tmp_path, kind, **settings), found) <= 1e-6
    assert difference(ours(head, **{**settings, "gradient_accumulation_steps": 1}), found) > 1e-3


@pytest.mark.sample(count=2)
@pytest.mark.parametrize(
    "given",
    [
        {"eval_strategy": "steps", "eval_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3},
        {"eval_strategy": "epoch", "eval_delay": 2},
        {"eval_strategy": "epoch", "eval_on_start": True, "num_train_epochs": 2.5},
        {"eval_strategy": "steps", "eval_steps": 0.3, "max_steps": 7},
        {"eval_strategy": "epoch", "max_steps": 7, "eval_delay": 2.5},
        {"eval_strategy": "epoch", "max_steps": 6},
    ],
    ids=str,
)
def test_train_evaluates_when_transformers_does(given: dict[str, Any], tmp_path: Any) -> None:
    options = {"num_train_epochs": 3, **_SGD, **given}
    data = {"train_dataset": hf.dataset(), "eval_dataset": hf.dataset(count=9)}
    model = hf.make_model()
    trainer = transformers.Trainer(model, hf.arguments(tmp_path, **options), **data)
    expected = trainer.train()
    evaluated = [(each["step"], each["eval_loss"]) for each in trainer.state.log_history if "eval_loss" in each]
    own = Trainer.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", **data, **options)
    found = own.train()
    assert (found.global_step, found.metrics["epoch"]) == (expected.global_step, expected.metrics["epoch"])
    assert found.training_loss == pytest.approx(expected.training_loss, abs=1e-6)
    seen = [(each["step"], each["loss"]) for each in own.history.valid]
    assert seen == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in evaluated if step]
    assert bool(own.eval_on_start) == any(step == 0 for step, _ in evaluated)


def test_the_best_weights_are_loaded_at_the_end(tmp_path: Any) -> None:
    data = {"train_dataset": hf.dataset(), "eval_dataset": hf.dataset(count=9)}
    options = {"num_train_epochs": 3, "optim": "sgd", "learning_rate": 8.0, "max_grad_norm": 0.0,
               "eval_strategy": "epoch", "load_best_model_at_end": True}  # fmt: skip
    with pytest.raises(ConfigError, match=r"load_best_model_at_end=True needs .*StateManagerAddon\)"):
        Trainer.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", **data, **options)
    trainer = Trainer.add_on(HuggingFaceAddon, StateManagerAddon)(
        hf.make_model(), "cpu", save_path=tmp_path, save_every=Every(epochs=1), **data, **options
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.history.valid]
    assert min(losses) < losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-6)


def test_a_part_of_an_epoch_needs_its_length() -> None:
    stream = hf.dataset().to_iterable_dataset()
    trainer = Trainer.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", train_dataset=stream, num_train_epochs=1.5)
    with pytest.raises(ConfigError, match=r"num_train_epochs=1\.5 of a loader without a length has no end"):
        trainer.train()


MISTAKES = [
    ({"eval_strategy": "epochs"}, r"eval_strategy='epochs'; it must be 'no', 'steps' or 'epoch'; did you mean 'epoch'"),
    ({"eval_strategy": "epoch"}, r"eval_strategy='epoch' needs data; write eval_dataset=dataset"),
    (
        {"compute_metrics": {"accuracy": 1.0}},
        r"compute_metrics=.*it must be the function itself, without calling it",
    ),
    ({"train_dataset": None}, r"train\(\) needs data; write .*train_dataset=dataset"),
    ({"train_dataset": hf.dataset(count=3), "dataloader_drop_last": True}, "0 batches .*drop_last=False"),
    ({"train_dataset": hf.dataset().remove_columns("labels")}, "the model returned no loss .*a column 'labels'"),
    ({"train_dataset": [{"input_ids": [1] * (i + 2), "labels": 0} for i in range(4)]}, "processing_class=tokenizer"),
    ({"args": {"output_dir": "x", "num_train_epoch": 2}}, "'num_train_epoch'.*did you mean 'num_train_epochs'"),
    ({"optim": "adamw"}, r"unknown optim='adamw'; did you mean 'adamw_torch' or 'adamw_torch_fused' or "),
    ({"optim": "AdamW"}, r"did you mean 'adamw_torch'"),
    ({"hub_model_id": "a/b/c"}, r"hub_model_id='a/b/c' is no name of a repository; write 'name' or 'owner/name'"),
    ({"hub_model_id": "a b"}, r"hub_model_id='a b' is no name of a repository"),
    ({"push_to_hub": True, "output_dir": "a..b"}, r"hub_model_id='a\.\.b' is no name of a repository"),
    ({"push_to_hub": True}, "push_to_hub=True uploads output_dir; write output_dir='folder'"),
]


@pytest.mark.parametrize(("given", "told"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_told_with_what_to_write(given: dict[str, Any], told: str) -> None:
    options = {"device": "cpu", "train_dataset": hf.dataset(), "num_train_epochs": 1, **given}
    with pytest.raises((ZaeError, ValueError)) as caught:
        Trainer.add_on(HuggingFaceAddon)(hf.make_model(), **options).train()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(told, said, re.S)
    assert len(str(caught.value)) < 400


# -------------------------------------------------------------- an optimizer and a scheduler of one's own


SCHEDULERS: dict[str, Any] = {
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9),
    "warm-up": lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 2, 9),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


class Rates(transformers.TrainerCallback):
    """The rate after each optimizer step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


class OwnSteps(Trainer):
    """The task of a user who takes the arguments alone."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(**batch).loss}

    test_step = train_step


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_of_ones_own_is_stepped_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """After each optimizer step, with the default clip; however the trainer is made, and from a factory too."""
    data, schedule = hf.dataset(count=24), SCHEDULERS[kind]
    given = {"num_train_epochs": 3, "per_device_train_batch_size": 8}
    args = hf.arguments(tmp_path, eval_strategy="epoch", metric_for_best_model="loss", **given)
    model, rates = hf.make_model(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pair = optimizer, schedule(optimizer)
    transformers.Trainer(model, args, train_dataset=data, eval_dataset=data, optimizers=pair, callbacks=[rates]).train()
    assert len(rates.rates) == 9

    def ours(make: Any) -> None:
        other, found = hf.make_model(), Rates()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        make(other, optimizer, found)
        assert found.rates == rates.rates
        assert all(torch.equal(each, other.state_dict()[name]) for name, each in model.state_dict().items())

    def by_options(other: Any, optimizer: Any, found: Any, scheduler: Any = None) -> None:
        Task.add_on(CallbackAddon)(
            other, "cpu", train_dataset=data, eval_dataset=data, eval_strategy="epoch", callbacks=[found],
            optimizer=optimizer, scheduler=scheduler or schedule(optimizer), **given,
        ).train()  # fmt: skip

    def by_arguments(other: Any, optimizer: Any, found: Any) -> None:
        converted = from_arguments(args)
        more = {"optimizer": optimizer, "scheduler": schedule(optimizer), "callbacks": [found]}
        trainer = converted.trainer(Task.add_on(CallbackAddon), other, train_dataset=data, eval_dataset=data, **more)
        converted.train(trainer)

    ours(by_options)
    ours(lambda *parts: by_options(*parts, scheduler=schedule))
    ours(by_arguments)


def test_arguments_alone_step_a_given_scheduler_after_each_step(tmp_path: Path) -> None:
    converted = from_arguments(hf.arguments(tmp_path, num_train_epochs=2))
    model = hf.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = converted.trainer(OwnSteps, model, optimizer=optimizer, scheduler=scheduler)
    converted.train(trainer, [transformers.default_data_collator(hf.rows(count=2))] * 3)
    assert optimizer.param_groups[0]["lr"] == 0.5**6


def test_a_scheduler_that_counts_epochs_is_stepped_so_on_request() -> None:
    model = hf.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options = {"optimizer": optimizer, "scheduler": scheduler, "scheduler_step_on_batch": False}
    Task(model, "cpu", train_dataset=hf.rows(count=24), num_train_epochs=2, **options).train()
    assert optimizer.param_groups[0]["lr"] == 0.5**2


@pytest.mark.parametrize(
    ("options", "clip"),
    [({}, 1.0), ({"max_grad_norm": 0.5}, 0.5), ({"max_grad_norm": 0}, math.inf), ({"gradient_clip": 2.0}, 2.0)],
)
def test_the_default_clip_holds_beside_an_optimizer(options: Any, clip: float) -> None:
    for optimizer in ({}, {"optimizer": torch.optim.SGD}):
        assert Task(hf.make_model(), "cpu", **optimizer, **options).gradient_clip == clip


# ------------------------------------------------------------------------------------------ args=TrainingArguments


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "use_cpu": True,
        "load_best_model_at_end": True, "report_to": "none", "seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["object", "second", "dict", "model_init"])
def test_arguments_are_an_option(given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The class gets their add-ons, and trains as `from_arguments` does."""
    data = {"train_dataset": hf.dataset(count=16), "eval_dataset": hf.dataset(count=6)}
    converted = from_arguments(settings(tmp_path / "expected"))
    expected = converted.trainer(Task, hf.make_model(), **data)
    converted.train(expected)
    entries = settings(tmp_path / "found")
    args = TrainingArguments(**entries)
    made = {
        "object": lambda: Task(model=hf.make_model(), args=args, **data),
        "second": lambda: Task(hf.make_model(), args, **data),
        "dict": lambda: Task(hf.make_model(), {**entries, "torch_empty_cache_steps": 4}, **data),
        "model_init": lambda: Task(model_init=hf.make_model, args=args, **data),
    }
    trainer = made[given]()
    assert trainer.train().global_step == 4
    assert difference(expected.model_state(), trainer.model_state()) == 0
    assert len([*(tmp_path / "found").glob("step-*")]) == 2
    assert ("torch_empty_cache_steps=4: call" in caplog.text) == (given == "dict")
    assert (trainer.save_model(tmp_path / "final") / "training_args.json").is_file()


def test_arguments_of_a_derived_class_and_options_beside_them(tmp_path: Path) -> None:
    class Own(Task):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs.loss * 0, outputs) if return_outputs else outputs.loss * 0

    args = TrainingArguments(**settings(tmp_path))
    options = {"train_dataset": hf.rows(count=8), "eval_dataset": hf.rows(count=4), "num_train_epochs": 1}
    trainer = Own(hf.make_model(), args=args, **options, gradient_clip=0.5, weight_decay=0.0)
    assert isinstance(trainer, Own)
    assert (trainer.num_train_epochs, trainer.gradient_clip, trainer.gradient_accumulation_steps) == (1, 0.5, 2)
    trainer.train()
    assert difference(trainer.model_state(), hf.make_model().state_dict()) == 0
    with pytest.raises(OptionError, match="name what is given beside args"):
        Own(hf.make_model(), "cpu", args=args)


def test_a_class_of_optimizers_and_its_arguments(tmp_path: Path) -> None:
    """``optimizer_cls_and_kwargs``: with the groups of parameters and the schedule that Transformers has then."""
    pair = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    model = hf.make_model()
    args = hf.arguments(tmp_path, num_train_epochs=2, weight_decay=0.1)
    transformers.Trainer(model, args, train_dataset=hf.dataset(), optimizer_cls_and_kwargs=pair).train()
    found = ours("sequence", optimizer_cls_and_kwargs=pair, weight_decay=0.1)
    assert difference(dict(model.state_dict()), found) == 0
    with pytest.raises(OptionError, match=r"optimizer_cls_and_kwargs=.* is given beside optimizer"):
        ours("sequence", optimizer_cls_and_kwargs=pair, optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"optimizer_cls_and_kwargs=.* cannot be made: .*'rate'"):
        ours("sequence", optimizer_cls_and_kwargs=(torch.optim.SGD, {"rate": 1}))


# ------------------------------------------------------------------------------------------------- what is a dataset


class Pairs(Task):
    """Steps of a user, on samples without names."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


POINTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
MAPS = {
    "TensorDataset": TensorDataset(*POINTS),
    "Subset": Subset(TensorDataset(*POINTS), range(12)),
    "ConcatDataset": ConcatDataset([TensorDataset(POINTS[0][:8], POINTS[1][:8]), TensorDataset(*POINTS)][:1]),
    "list of tuples": list(zip(*POINTS)),
    "StackDataset": StackDataset(*POINTS),
}


@pytest.mark.parametrize("kind", MAPS)
def test_samples_without_names_are_those_of_ones_own_steps(kind: str) -> None:
    data = MAPS[kind]
    model = torch.nn.Linear(4, 3)
    by_hand = copy.deepcopy(model)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "max_grad_norm": 0, "num_train_epochs": 2}
    options |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4}
    trainer = Pairs(model, "cpu", train_dataset=data, eval_dataset=data, eval_strategy="epoch", **options)
    trainer.train()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in DataLoader(data, batch_size=4):
            torch.nn.functional.cross_entropy(by_hand(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert difference(dict(by_hand.state_dict()), dict(model.state_dict())) == 0
    whole = torch.utils.data.default_collate([data[index] for index in range(len(data))])
    expected = torch.nn.functional.cross_entropy(by_hand(whole[0]), whole[1]).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


class Squares(Trainer):
    """A step over batches that are one tensor."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.mark.parametrize("data", [POINTS[0], [*POINTS[0]]], ids=["tensor", "list of tensors"])
def test_samples_that_are_tensors_make_a_batch(data: Any) -> None:
    given = {"train_dataset": data, "eval_dataset": data, "num_train_epochs": 1}
    trainer = Squares.add_on(HuggingFaceAddon)(torch.nn.Linear(4, 1), "cpu", **given)
    with torch.no_grad():
        expected = trainer.model(POINTS[0]).square().mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.train().global_step == 2


NO_DATASETS: dict[str, tuple[Any, str]] = {
    "name": ("imdb", r"='imdb' is a name; load it: datasets.load_dataset\('imdb'\)\['train'\]"),
    "empty list": ([], r" is a list without samples; give it data"),
    "empty TensorDataset": (TensorDataset(torch.empty(0, 4)), " is a TensorDataset without samples"),
    "empty datasets.Dataset": (hf.dataset().select([]), " is a Dataset without samples"),
    "class": (TensorDataset, " is the class TensorDataset; give a list of dicts"),
    "generator": ((row for row in hf.rows()), "give a list of dicts, a Dataset of torch or of datasets"),
    "loader": (DataLoader(TensorDataset(*POINTS)), "give its dataset, or call run"),
}


@pytest.mark.parametrize("kind", NO_DATASETS)
def test_what_is_no_dataset_is_named(kind: str) -> None:
    data, said = NO_DATASETS[kind]
    with pytest.raises(ConfigError, match=f"train_dataset.*{said}"):
        Task(hf.make_model(), "cpu", train_dataset=data).train()
    if kind != "loader":  # It is evaluated as it is.
        with pytest.raises(ConfigError, match=f"eval_dataset.*{said}"):
            Task(hf.make_model(), "cpu", eval_dataset=data).evaluate()


def test_several_sets_are_no_training_set() -> None:
    sets = DatasetDict(train=hf.dataset(), test=hf.dataset())
    with pytest.raises(ConfigError, match=r"with 'train', 'test', and training takes one dataset; .*=data\[...\]"):
        Task(hf.make_model(), "cpu", train_dataset=sets).train()


def test_a_batch_without_names_for_a_model_of_transformers() -> None:
    with pytest.raises(ZaeError, match=r"the batch is a list, and the model takes arguments by name; .*train_step"):
        Task(hf.make_model(), "cpu", train_dataset=MAPS["TensorDataset"], num_train_epochs=1).train()
    with pytest.raises(ZaeError, match=r"the batch is a list, and the model takes arguments by name"):
        Task(hf.make_model(), "cpu").predict(MAPS["TensorDataset"])


def test_a_collator_that_is_no_function_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"data_collator=.*; it must be a function of a list of rows"):
        Trainer.add_on(HuggingFaceAddon)(torch.nn.Linear(2, 1), "cpu", train_dataset=[{"x": 1}], data_collator=5)
