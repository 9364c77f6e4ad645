"""What the documentation of OmniGenBench, Forgather and Accelerate shows, written through zae."""

import os
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import zae
from kit.mistakes import Task, loader, trainer_of
from zae.addons import AMPAddon, EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon


class Classify(zae.Trainer):
    def train_step(self, batch):
        inputs, targets = batch
        logits = self.model(inputs)
        return {"loss": cross_entropy(logits, targets), "accuracy": (logits.argmax(1) == targets).float().mean()}

    test_step = train_step


def weights(trainer):
    return {name: value.clone() for name, value in trainer.unwrap().state_dict().items()}


# --------------------------------------------------------------------------------------------------- OmniGenBench


def test_the_native_trainer_of_omnigenbench(tmp_path):
    """Its example with all options, each in its place here, and the snippet of MetricsDict as it is written."""
    model = torch.nn.Linear(4, 2)
    optimizer = AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    add_ons = AMPAddon, EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon
    trainer = Classify.add_on(*add_ons)(
        model,
        device="cpu",
        optimizer=optimizer,
        scheduler=CosineAnnealingLR(optimizer, T_max=10000),
        gradient_accumulation_steps=2,
        gradient_clip=1.0,
        precision="bf16",
        patience=3,
        delta=0.001,
        monitor="accuracy",
        save_path=tmp_path / "checkpoints",
        save_every=zae.Every(steps=2),
        keep_last=3,
        seed=42,
        log_bar=False,
    )
    metrics = trainer.run(2, loader(64), loader())
    best_accuracy = metrics["best_valid"]["eval_accuracy"]
    final_loss = metrics["train_metrics_history"][-1]["train_loss"]
    assert best_accuracy == max(row["valid_accuracy"] for row in metrics["valid_metrics_history"])
    assert final_loss == trainer.train_metrics["loss"]
    assert "train_loss" in str(metrics)
    test_metrics = trainer.evaluate(loader(16))
    assert set(test_metrics) == {"loss", "accuracy"}
    if trainer.is_main:
        assert len(list((tmp_path / "checkpoints").glob("step-*"))) >= 3


@pytest.mark.parametrize(("metric", "direction"), [("loss", "min"), ("accuracy", "max")])
def test_the_direction_follows_from_the_metric(metric, direction):
    assert trainer_of(Classify, monitor=metric).history.direction == direction


def test_the_override_points_of_omnigenbench_are_named():
    """A warning names for each method of its custom trainer the one that is called instead, and that one runs."""
    with pytest.warns(UserWarning, match=r"_setup_training_components .* setup\(\)"):

        class Components(Task):
            def _setup_training_components(self): ...

    with pytest.warns(UserWarning, match=r"_prepare_batch .* to_device\(batch\)"):

        class Prepared(Task):
            def _prepare_batch(self, batch): ...

    class Custom(Task):
        def setup(self):
            super().setup()
            self.epochs = []

        def to_device(self, batch):
            return [each.double() if each.is_floating_point() else each for each in super().to_device(batch)]

        def run_epoch(self, loader):
            metrics = super().run_epoch(loader)
            self.epochs.append(metrics["loss"])
            return metrics

    trainer = trainer_of(Custom, model=torch.nn.Linear(4, 2).double())
    trainer.run(2, loader())
    assert trainer.epochs == [row["train_loss"] for row in trainer.train_history]


# ------------------------------------------------------------------------------------------------------ Forgather


def test_the_factories_of_forgather(tmp_path):
    """``optimizer_factory`` and ``lr_scheduler_factory`` as they are, with groups by name, and a resume bitwise."""

    def optimizer_factory(named_parameters):
        return torch.optim.AdamW(named_parameters(), lr=1e-3, weight_decay=0.01)

    def lr_scheduler_factory(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    def make(cls=Task, factory=optimizer_factory, **options):
        return trainer_of(
            cls,
            model=lambda: torch.nn.Linear(4, 2),
            seed=0,
            optimizer=factory,
            scheduler=lr_scheduler_factory,
            **options,
        )

    trainer = make()
    trainer.run(3, loader())
    assert trainer.optimizers["0"].param_groups[0]["param_names"] == ["weight", "bias"]
    plain = make(factory=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01))
    plain.run(3, loader())
    saving = Task.add_on(StateManagerAddon)
    make(saving, save_path=tmp_path).run(2, loader())
    resumed = make(saving, save_path=tmp_path, resume=True)
    resumed.run(3, loader())
    for other in (plain, resumed):
        assert all(torch.equal(weights(trainer)[name], value) for name, value in weights(other).items())


def test_groups_by_name():
    def without_decay_on_biases(named_parameters):
        decayed = [p for name, p in named_parameters() if not name.endswith("bias")]
        plain = [p for name, p in named_parameters() if name.endswith("bias")]
        return AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}])

    trainer = trainer_of(optimizer=without_decay_on_biases)
    assert "lr" in str(trainer.plan(1, loader()))  # It calls the function with a copy.
    trainer.run(1, loader())
    assert [group["weight_decay"] for group in trainer.optimizers["0"].param_groups] == [0.01, 0.0]


def test_a_class_and_its_arguments_are_refused_with_the_line():
    """``optimizer_cls_and_kwargs``: under its own name, and as the optimizer."""
    with pytest.raises(zae.OptionError, match=r"optimizer=lambda parameters: AdamW\(parameters, lr=...\)"):
        trainer_of(optimizer_cls_and_kwargs=(AdamW, {"lr": 1e-3}))
    with pytest.raises(
        zae.ConfigError, match=r"optimizer=lambda parameters: torch.optim.AdamW\(parameters, lr=0.001\)"
    ):
        trainer_of(optimizer=(AdamW, {"lr": 1e-3}))


def test_model_init_and_the_unwrapped_model():
    trainer = trainer_of(model=lambda: torch.nn.Linear(4, 2), seed=3)
    assert isinstance(trainer.unwrap(), torch.nn.Linear)
    with pytest.raises(zae.MissingError, match=r"unwrapped_model'; here it is unwrap\(\)"):
        trainer.unwrapped_model()
    with pytest.raises(zae.OptionError, match=r"here it is model, which may be a function"):
        trainer_of(model_init=lambda: torch.nn.Linear(4, 2))


def test_a_resume_takes_the_newest_checkpoint_that_is_whole(tmp_path):
    """Forgather takes the newest by modification time whose files exist: a copy of an old one, or a cut one, wins."""

    class Noting(Task):
        def on_run_begin(self):
            super().on_run_begin()
            self.began_at = self.progress_checker.step

    cls = Noting.add_on(StateManagerAddon)
    options = {"save_path": tmp_path, "save_every": zae.Every(steps=2), "keep_last": 3, "keep_best": 0}
    trainer_of(cls, **options).run(None, loader(), max_steps=6)
    first, second, third = sorted(tmp_path.glob("step-*"))
    for file in (first, *first.iterdir()):
        os.utime(file, (2e9, 2e9))  # As after a copy or a download of the first one.
    newest = max(third.iterdir(), key=lambda file: file.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:-1])  # All files exist, and one is cut.
    trainer = trainer_of(cls, **options)
    trainer.load_state()
    assert trainer.progress_checker.step == int(second.name[-8:]) == 4
    shutil.rmtree(third)
    resumed = trainer_of(cls, **options, resume="auto")
    resumed.run(None, loader(), max_steps=6)
    assert (resumed.began_at, resumed.progress_checker.step) == (4, 6)
