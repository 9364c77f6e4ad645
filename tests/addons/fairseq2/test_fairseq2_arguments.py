"""The constructor call of fairseq2's trainer: every argument is converted, reported or refused; the weights are its."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from kit.fairseq2_parts import FakeGang, HandTrainer, Reader, ScoreUnit, Unit, batches, network, parallel_gangs, weights
from kit.faults import Child
from zae import ConfigError, Every, LoaderError, NonFiniteError, OptionError, StepError, TaskError
from zae.addons import AMPAddon, EarlyStoppingAddon, JSONLLoggerAddon, ProfilerAddon, StateManagerAddon
from zae.addons.fairseq2 import RegimeAddon, any_of, from_arguments, task_of
from zae.addons.fairseq2.arguments import DEFAULTS, REPORTED, REQUIRED
from zae.testing import PlainTask

NAMES = {**REQUIRED, **DEFAULTS}


def given(**more):
    """Return the arguments that every call has, with these."""
    unit = Unit(more.pop("model", None) or network())
    reader = more.pop("data_reader", None) or Reader(batches(), 2)
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    return {"unit": unit, "data_reader": reader, "optimizer": optimizer, "max_num_steps": 8, **more}


def validation(*names, model):
    """Return units that evaluate a model, each with its own score, and their readers."""
    units = [ScoreUnit(model, name, factor=index + 1.0) for index, name in enumerate(names)]
    return {"valid_units": units, "valid_data_readers": [Reader(batches((3, 2), seed=9), 1) for _ in names]}


def trained(**more):
    """Run the call, and return the trainer and its metrics."""
    converted = from_arguments(**given(**more))
    trainer = converted.trainer(log_bar=False, **{} if "root_gang" in more else {"device": "cpu"})
    return trainer, converted.train(trainer)


def warmed_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 5))


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


# ------------------------------------------------------------------------------------------------------- it trains


def test_the_call_of_the_documentation_trains_with_another_name(tmp_path, monkeypatch):
    """Every argument of the constructor in fairseq2's page on its trainer, with its values."""
    monkeypatch.chdir(tmp_path)
    train_unit, data_reader, root_gang = Unit(network()), Reader(batches(), 2), FakeGang()
    optimizer = torch.optim.AdamW(train_unit.model.parameters(), lr=0.01)
    lr_scheduler = warmed_up(optimizer)
    gangs = parallel_gangs(root_gang)
    valid_unit, valid_reader = Unit(train_unit.model), Reader(batches((3, 2), seed=9))
    trainer = from_arguments(
        unit=train_unit,
        data_reader=data_reader,
        optimizer=optimizer,
        checkpoint_manager=SimpleNamespace(_checkpoint_dir=Path("checkpoints")),
        root_gang=root_gang,
        dp_gang=gangs.dp,
        tp_gang=gangs.tp,
        dtype=torch.float32,
        lr_scheduler=lr_scheduler,
        max_num_steps=100_000,
        max_num_data_epochs=10,
        valid_units=[valid_unit],
        valid_data_readers=[valid_reader],
        validate_every_n_steps=1_000,
        checkpoint_every_n_steps=5_000,
        keep_last_n_checkpoints=5,
        keep_best_n_checkpoints=3,
        publish_metrics_every_n_steps=100,
        tb_dir=Path("runs"),
        metrics_dir=Path("metrics"),
        fp16_loss_scale=(128.0, 0.0001),
        max_gradient_norm=None,
        amp=False,
        anomaly_detection=False,
        seed=2,
    )
    metrics = trainer()
    assert metrics["step"] == 30
    assert metrics["epoch"] == 10
    assert [row["step"] for row in metrics["valid_metrics_history"]] == [30]
    assert [path.name for path in Path("checkpoints").glob("step-*")] == ["step-00000030"]
    assert list(Path("runs").glob("events.out.tfevents.*"))
    rows = [json.loads(line) for line in Path("metrics/metrics.jsonl").read_text().splitlines()]
    assert {"train/loss", "valid/loss", "grad_norm"} <= {name for row in rows for name in row}
    assert set(trainer.report) == {"keep_best_n_checkpoints"}
    assert "score_metric_name" in str(trainer.report)
    expected = Unit(network())
    by_hand = torch.optim.AdamW(expected.model.parameters(), lr=0.01)
    schedule = warmed_up(by_hand)
    HandTrainer(expected, Reader(batches(), 2), by_hand, schedule, steps=100_000, epochs=10).run()
    assert same(train_unit.model, expected.model)


def hand(steps, *, every=3, norm=None, epochs=None, dropout=0.0, valid=True):
    """Train by hand, and return the unit and the scores of its validations."""
    unit = Unit(network(dropout))
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    schedule = warmed_up(optimizer)
    made = validation("dev", "test", model=unit.model)
    pairs = tuple(zip(made["valid_units"], made["valid_data_readers"], strict=True)) if valid else ()
    options = {"norm": norm, "valid": pairs, "validate_every": every, "epochs": epochs}
    loop = HandTrainer(unit, Reader(batches(), 2), optimizer, schedule, steps=steps, **options)
    return unit, loop.run()


def call(*, dropout=0.0, kill_at=0, **more):
    """Return the call that trains as `hand`."""
    unit = Unit(network(dropout), kill_at)
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    return from_arguments(
        unit=unit,
        data_reader=Reader(batches(), 2),
        optimizer=optimizer,
        lr_scheduler=warmed_up(optimizer),
        root_gang=FakeGang(),
        score_metric_name="score",
        lower_better=True,
        **validation("dev", "test", model=unit.model),
        **{"max_gradient_norm": 0.5, "validate_every_n_steps": 3, **more},
    )


@pytest.mark.parametrize("ends", [{"max_num_steps": 10}, {"max_num_data_epochs": 3}])
def test_weights_and_scores_are_bitwise_those_of_the_loop(ends):
    """With accumulation, a short last step, clipping, a schedule, dropout, and two units that score together."""
    expected, scores = hand(
        ends.get("max_num_steps", 100), norm=0.5, epochs=ends.get("max_num_data_epochs"), dropout=0.3
    )
    converted = call(dropout=0.3, **ends)
    metrics = converted()
    assert same(converted.args.unit.model, expected.model)
    assert converted.args.unit.steps == [step for step in expected.steps if step <= len(converted.args.unit.steps)]
    found = {row["step"]: row["valid_score"] for row in metrics["valid_metrics_history"]}
    assert found == pytest.approx(scores, abs=1e-6)
    assert found.keys() == scores.keys()
    first = metrics["valid_metrics_history"][0]
    assert first["valid_score"] == pytest.approx((first["valid/dev/score"] + first["valid/test/score"]) / 2)
    assert metrics["best_valid"]["score"] == pytest.approx(min(scores.values()), abs=1e-6)


@pytest.mark.parametrize("kill_at", [4, 13])
def test_a_run_that_was_killed_within_an_epoch_ends_as_the_loop(tmp_path, kill_at):
    """The kill hits a batch in the middle of a step."""
    expected, scores = hand(10, norm=0.5, dropout=0.3)
    options = {"checkpoint_manager": tmp_path, "checkpoint_every_n_steps": 1, "max_num_steps": 10, "dropout": 0.3}
    outcome = Child(lambda: call(kill_at=kill_at, **options)()).wait()
    assert outcome.status == -9, outcome.error
    assert list(tmp_path.glob("step-*"))
    converted = call(**options)
    metrics = converted()
    assert same(converted.args.unit.model, expected.model)
    assert converted.args.unit.steps[0] > 1
    assert [row["step"] for row in metrics["valid_metrics_history"]] == [*scores]


def test_a_loss_without_targets_is_added_and_not_divided():
    class Mean(Unit):
        def __call__(self, batch):
            loss, count = super().__call__(batch)
            return loss / count, None

    unit = Mean(network())
    optimizer = torch.optim.SGD(unit.model.parameters(), lr=0.01)
    from_arguments(unit=unit, data_reader=Reader(batches(), 2), optimizer=optimizer, max_num_steps=3).train(None)
    expected = Mean(network())
    by_hand = torch.optim.SGD(expected.model.parameters(), lr=0.01)
    for step in (batches()[:2], batches()[2:4], batches()[4:]):
        for batch in step:
            expected(batch)[0].backward()
        by_hand.step()
        by_hand.zero_grad()
    assert same(unit.model, expected.model)


def test_half_precision_is_bitwise_that_of_autocast():
    class Autocast(Unit):
        def __call__(self, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().__call__(batch)

    trainer, _ = trained(dtype=torch.bfloat16, amp=True, max_num_steps=4)
    assert trainer.precision == "bf16"
    unit = Autocast(network())
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    HandTrainer(unit, Reader(batches(), 2), optimizer, steps=4).run()
    assert same(trainer.unwrap(), unit.model)


# ------------------------------------------------------------------------------------------------- when and what


CHANGED = {
    "unit": lambda: Unit(network(0.5)),
    "data_reader": lambda: Reader(batches(), 3),
    "optimizer": lambda: torch.optim.SGD(network().parameters(), lr=0.2),
    "lr_scheduler": lambda: warmed_up(torch.optim.SGD(network().parameters(), lr=0.1)),
    "checkpoint_manager": lambda: Path("runs"),
    "root_gang": FakeGang,
    "gangs": lambda: parallel_gangs(FakeGang()),
    "amp": lambda: True,
    "fp16_loss_scale": lambda: (64.0, 0.1),
    "valid_units": list,
    "profile": lambda: (1, 2),
    "profiler": lambda: SimpleNamespace(step=None),
    "anomaly_detection": lambda: True,
    "max_num_steps": lambda: 3,
    "seed": lambda: 3,
    "max_gradient_norm": lambda: 2.0,
    "early_stopper": lambda: lambda step_nr, score: False,
    "tb_dir": lambda: Path("tb"),
    "metrics_dir": lambda: Path("metrics"),
    "score_metric_name": lambda: "score",
    "score_metric_descriptor": lambda: "score",
    "lower_better": lambda: True,
}
CADENCES = ("validate", "checkpoint", "publish_metrics")


def described(converted):
    parts = (
        converted.add_ons,
        converted.options,
        converted.run,
        converted.report,
        converted.loader.reader,
        converted.gangs,
    )
    return repr(parts), repr(vars(converted.args)["unit"])


def test_every_argument_changes_what_is_carried(tmp_path, monkeypatch):
    """Each one that is not only reported changes the options, the run, the loaders or the report."""
    monkeypatch.chdir(tmp_path)
    fixed = {"unit": Unit(network()), "data_reader": Reader(batches(), 2), "max_num_steps": 8}
    fixed["optimizer"] = torch.optim.SGD(fixed["unit"].model.parameters(), lr=0.1)
    valid = {"valid_units": [ScoreUnit(fixed["unit"].model, "dev")], "valid_data_readers": [Reader(batches())]}
    cadences = {f"{name}_every_n_steps": 4 for name in CADENCES}
    unnamed = {"dp_gang", "tp_gang", "valid_data_readers", "valid_units", "dtype"}  # They go with another one.
    for name in sorted(NAMES.keys() - unnamed):
        base = {**fixed, **valid, **cadences, "checkpoint_manager": Path("one")}
        if name in ("lower_better", "keep_last_n_models", "keep_best_n_models"):
            base["score_metric_name"] = "score"
        if name == "profile":
            base["tb_dir"] = "tb"
        if "_after_n_data_epochs" in name:
            base[name.replace("after", "every")] = 1
        value = CHANGED.get(name, lambda: 2)()
        before, after = (described(from_arguments(**each)) for each in (base, {**base, name: value}))
        assert before != after, name


def test_what_has_no_effect_is_reported():
    """No argument is in two tables; what is reported says why."""
    assert not set(NAMES) & set(REPORTED)
    for name, why in REPORTED.items():
        report = from_arguments(**given(**{name: object()})).report
        assert report == {name: f"{name}=<object>: {why}"}
    assert str(from_arguments(**given()).report) == "every argument has an effect, or its default"


def test_cadences_begin_at_their_step_and_end_with_the_run():
    """``after`` is the first step that counts, and the last step is validated in any case."""
    made = validation("dev", model=(model := network()))
    more = {"validate_every_n_steps": 2, "validate_after_n_steps": 4, "max_num_steps": 7}
    _, metrics = trained(model=model, **made, **more)
    assert [row["step"] for row in metrics["valid_metrics_history"]] == [4, 6, 7]


def test_a_step_that_is_due_twice_is_validated_once():
    """Epochs have three steps: the sixth is due by its number, as the last of an epoch, and at the end."""
    made = validation("dev", model=(model := network()))
    more = {"validate_every_n_steps": 2, "validate_every_n_data_epochs": 1, "max_num_data_epochs": 2}
    trainer, metrics = trained(model=model, **made, **more)
    assert RegimeAddon in type(trainer).__mro__
    assert [row["step"] for row in metrics["valid_metrics_history"]] == [2, 3, 4, 6]


def test_metrics_are_published_since_the_record_before(tmp_path):
    """Windows of two steps go over the ends of epochs, also after a resume; the rows of epochs have the loss alone."""
    more = {"publish_metrics_every_n_steps": 2, "checkpoint_manager": tmp_path, "metrics_dir": tmp_path / "log"}
    for steps in (3, 5, 9):
        trained(**more, max_num_steps=steps, checkpoint_every_n_steps=1)
    _, metrics = trained(publish_metrics_every_n_steps=2, max_num_data_epochs=3, max_num_steps=10)
    rows = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    records = {row["step"]: row for row in rows if "train/error" in row}
    assert [*records] == [2, 3, 4, 5, 6, 8, 9]  # The last step of each call is recorded too.
    assert all(row["train/error"] == pytest.approx(row["train/loss"], abs=1e-5) for row in records.values())
    sizes = [5, 7, 2] * 3  # Targets of each step.
    spans = zip([0, *records], records)
    counted = sum(records[end]["train/error"] * sum(sizes[start:end]) for start, end in spans)
    history = metrics["train_metrics_history"]
    assert counted == pytest.approx(sum(row["train_loss"] * 14 for row in history), rel=1e-5)
    assert not any("train_error" in list(row) for row in history)


def test_checkpoints_and_models_have_their_own_rules(tmp_path):
    more = {"checkpoint_manager": tmp_path, "checkpoint_every_n_steps": 2, "checkpoint_after_n_steps": 4}
    trained(**more, keep_last_n_checkpoints=1, keep_last_n_models=2, max_num_steps=9)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000009"]
    found = [path.name for path in sorted(tmp_path.glob("weights-*"))]
    assert found == ["weights-00000008.safetensors", "weights-00000009.safetensors"]


def test_a_second_call_continues_where_the_first_ended(tmp_path):
    trained(checkpoint_manager=str(tmp_path), max_num_steps=3)
    trainer, metrics = trained(checkpoint_manager=str(tmp_path), max_num_steps=3)
    assert metrics["step"] == 3
    assert trainer.train_unit.steps == []


@pytest.mark.parametrize("as_object", [False, True])
def test_an_early_stopper_gets_the_step_and_the_score(as_object):
    seen = []

    def early_stopper(step_nr, score):
        seen.append((step_nr, score))
        return step_nr >= 4

    given_one = SimpleNamespace(should_stop=early_stopper) if as_object else early_stopper
    made = validation("dev", model=(model := network()))
    more = {"validate_every_n_steps": 2, "early_stopper": given_one, "score_metric_descriptor": "score"}
    trainer, metrics = trained(model=model, **made, **more)
    assert isinstance(trainer, EarlyStoppingAddon)
    assert metrics["step"] == 4
    assert seen == [(row["step"], row["valid_score"]) for row in metrics["valid_metrics_history"]]


def test_a_unit_without_the_score_is_left_out_of_it(tmp_path):
    """The early stopper, the best and the checkpoints that are kept go by the mean of the units that have it."""

    class Counts(ScoreUnit):
        def __call__(self, batch):
            pass

    made, seen = validation("dev", "test", model=(model := network())), []
    made["valid_units"].append(Counts(model, "count"))
    made["valid_units"][-1].metric_bag = {}
    made["valid_data_readers"].append(Reader(batches((2,))))
    rules = {"checkpoint_manager": tmp_path, "checkpoint_every_n_steps": 2, "keep_best_n_checkpoints": 1}
    more = {"score_metric_name": "score", "lower_better": True, "validate_every_n_steps": 2, **rules}
    trainer, metrics = trained(model=model, **made, **more, early_stopper=lambda *given: bool(seen.append(given)))
    scores = {row["step"]: (row["valid/dev/score"] + row["valid/test/score"]) / 2
              for row in metrics["valid_metrics_history"]}  # fmt: skip
    assert dict(seen) == pytest.approx(scores)
    assert [*scores] == [2, 4, 6, 8]
    best = min(scores, key=scores.get)
    assert metrics["best_valid"]["score"] == pytest.approx(scores[best])
    assert trainer.best_path.name == f"step-{best:08d}"


def test_the_direction_of_a_score():
    descriptor = SimpleNamespace(name="score", higher_better=False)
    for more, mode in (
        ({"score_metric_name": "score"}, "max"),
        ({"score_metric_name": "score", "lower_better": True}, "min"),
        ({"score_metric_descriptor": descriptor}, "min"),
    ):
        made = validation("dev", model=(model := network()))
        assert from_arguments(**given(model=model, **made, **more)).options["monitor_mode"] == mode
    assert "lower_better" in from_arguments(**given(lower_better=True)).report
    report = from_arguments(**given(score_metric_descriptor="score")).report
    assert report["score_metric_descriptor"] == "score_metric_descriptor='score': there are no valid_units"


def test_a_profiler_is_told_each_step(tmp_path):
    class Counts:
        entered = steps = left = 0

        def __enter__(self):
            self.entered += 1

        def __exit__(self, *error):
            self.left += 1

        def step(self):
            self.steps += 1

    counts = Counts()
    trained(profiler=counts, max_num_steps=5)
    assert (counts.entered, counts.steps, counts.left) == (1, 5, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pass
    assert from_arguments(**given(profiler=profiler)).options["profiler"] is profiler
    assert ProfilerAddon in from_arguments(**given(profile=(3, 2), tb_dir=tmp_path)).add_ons
    assert "tb_dir" in from_arguments(**given(profile=(3, 2))).report["profile"]


def test_anomaly_detection_names_the_operation():
    class Bad(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (self.weight.sum() * 0).sqrt()  # Its derivative is infinite.

    with pytest.raises(NonFiniteError, match=r"in the backward, Function '.*Backward0' returned nan"):
        trained(model=Bad(3, 1), anomaly_detection=True)
    assert not torch.is_anomaly_enabled()


def test_names_of_units_are_unique():
    made = validation("dev", "dev", "", model=(model := network()))
    converted = from_arguments(**given(model=model, **made))
    assert [*converted.valid_loader] == ["dev", "dev-1", "2"]
    assert converted.valid_loader.keys() == converted.options["valid_units"].keys()


def test_options_and_a_task_of_the_user_replace_those_of_the_call():
    converted = from_arguments(**given())

    class Task(task_of(converted.args.unit)):
        def should_validate(self, is_due):
            return False

    trainer = converted.trainer(Task, device="cpu", seed=7, log_bar=False)
    assert isinstance(trainer, Task)
    assert trainer.seed == 7
    assert repr(converted).startswith("ConvertedArguments(add_ons=[GradientAccumulationAddon]")
    assert AMPAddon not in converted.add_ons
    assert JSONLLoggerAddon not in converted.add_ons
    assert StateManagerAddon not in converted.add_ons


def test_a_cadence_of_several():
    every = any_of(Every(steps=10), Every(epochs=2))
    assert repr(every) == "any_of(Every(steps=10), Every(epochs=2))"
    assert eval(repr(every)) == every
    assert every.steps == 10
    assert not every.due_at_epoch(3)
    trainer = PlainTask(nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD, log_bar=False)
    data = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
    found = trainer.plan(4, data, data, valid_every=any_of(Every(steps=5), Every(epochs=2)))
    assert found.validates_at == [5, 6, 10, 12]
    with pytest.raises(ConfigError, match=r"give one or more of Every\(steps=...\)"):
        any_of()


# ------------------------------------------------------------------------------------------------ what is refused


class Peculiar(Unit):
    """A unit that returns its loss alone."""

    def __call__(self, batch):
        return super().__call__(batch)[0]


class Held(Unit):
    """A unit of version 0.4, whose model is an object around the module."""

    @property
    def model(self):
        return SimpleNamespace(module=self._model)


def units(count):
    return lambda model: [ScoreUnit(model, str(index)) for index in range(count)]


MISTAKES = [
    ({"unit": None}, OptionError, r"needs unit, the train unit: unit\(batch\) -> \(loss, num_targets\); write unit="),
    ({"data_reader": None}, OptionError, r"needs data_reader, a DataReader, .*; write data_reader=\.\.\."),
    ({"optimizer": None}, OptionError, r"needs optimizer, a torch optimizer of unit\.model\.parameters\(\)"),
    ({"valid_every_n_steps": 3}, OptionError, r"'valid_every_n_steps' is not an argument of fairseq2's Trainer; did "
     r"you mean 'validate_every_n_steps'\?"),
    ({"unit": network()}, TaskError, r"unit is a Sequential; give an object with __call__"),
    ({"unit": Unit}, TaskError, "give an object with __call__"),
    ({"data_reader": DataLoader([1])}, ConfigError, r"data_reader is a DataLoader and has no __next__, reset, "),
    ({"data_reader": SimpleNamespace()}, ConfigError, r"has no __next__, reset, state_dict, load_state_dict; give a "
     r"DataReader$"),
    ({"max_num_steps": None}, ConfigError, r"would not end; write max_num_steps=1000, .* or max_num_data_epochs=1"),
    ({"max_num_steps": 0}, ConfigError, r"max_num_steps=0; it must be a whole number of at least 1"),
    ({"max_num_steps": 1e5}, ConfigError, r"max_num_steps=100000\.0; it must be a whole number"),
    ({"validate_every_n_steps": 0}, ConfigError, "validate_every_n_steps=0; it must be"),
    ({"max_gradient_norm": 0}, ConfigError, "max_gradient_norm=0 would leave no gradient; leave it out"),
    ({"valid_units": units(2)}, ConfigError, r"there are 2 valid_units and 0 valid_data_readers; give a "
     r"reader for each unit"),
    ({"valid_data_readers": [Reader([])]}, ConfigError, r"there are 0 valid_units and 1 valid_data_readers"),
    ({"valid_units": units(2), "valid_data_readers": [Reader([])]}, ConfigError, r"there are 2 "
     r"valid_units and 1 valid_data_readers; give a reader for each unit"),
    ({"valid_units": lambda model: ScoreUnit(model, "dev")}, ConfigError, r"valid_units is a ScoreUnit; give a list, "
     r"one entry for each: valid_units=\[\.\.\.\]"),
    ({"valid_units": [ScoreUnit(network(), "dev")], "valid_data_readers": [Reader([])]}, ConfigError, r"the model of "
     r"valid_units is not unit\.model; make both units of one model"),
    ({"valid_units": units(1), "valid_data_readers": [DataLoader([1])]}, ConfigError, r"valid_data_readers\[0\] is a "
     r"DataLoader"),
    ({"early_stopper": lambda step, score: True, "score_metric_name": "score"}, ConfigError, r"called after "
     r"validations; write valid_units"),
    ({"checkpoint_every_n_steps": 5}, ConfigError, r"checkpoint_every_n_steps=5 needs a folder; write "
     r"checkpoint_manager=Path\('runs/unit'\)"),
    ({"keep_last_n_checkpoints": 5}, ConfigError, r"keep_last_n_checkpoints=5 needs a folder"),
    ({"checkpoint_manager": object()}, ConfigError, r"does not tell its folder; write checkpoint_manager=Path"),
    ({"dtype": torch.float16}, ConfigError, r"write amp=True with the model in float32"),
    ({"dtype": torch.bfloat16}, ConfigError, r"its parameters are torch\.float32; write amp=True"),
    ({"unit": Held(network())}, TaskError, r"unit\.model is a SimpleNamespace around a module; let the property model"),
    ({"amp": "yes"}, ConfigError, r"amp='yes'; it must be True or False"),
    ({"dp_gang": FakeGang()}, ConfigError, r"root_gang is missing, .*; write root_gang="),
    ({"root_gang": FakeGang(), "dp_gang": FakeGang()}, ConfigError, r"have 1 and None ranks, .*; make them with "
     r"gangs = setup_parallel_gangs"),
    ({"root_gang": SimpleNamespace(rank=0, size=2, device="cpu", as_process_group=None)}, ConfigError,
     r"root_gang has 2 ranks, and 1 process was started; start them: torchrun --nproc_per_node 2 script\.py"),
    ({"gangs": object(), "root_gang": FakeGang()}, ConfigError, r"keep gangs, which has root, dp and tp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "kind", "match"), MISTAKES, ids=lambda value: "-".join(value)[:50] if isinstance(value, dict) else ""
)
def test_a_mistake_is_refused_with_what_to_write(more, kind, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = given()
    more = {name: value(arguments["unit"].model) if name == "valid_units" and callable(value) else value
            for name, value in more.items()}  # fmt: skip
    with pytest.raises(kind, match=match):
        from_arguments(**{**arguments, **more}).trainer(device="cpu", log_bar=False)
    assert not list(tmp_path.iterdir())


def test_mistakes_that_only_objects_show(tmp_path):
    arguments = given()
    made = {
        "valid_units": [ScoreUnit(arguments["unit"].model, "dev")],
        "valid_data_readers": [arguments["data_reader"]],
    }
    with pytest.raises(ConfigError, match=r"valid_data_readers\[0\] is data_reader itself, .*; make a second reader"):
        from_arguments(**arguments, **made)
    (tmp_path / "step_1000").mkdir()
    with pytest.raises(ConfigError, match=r"contains step_1000 of fairseq2, .*; load its weights .* a new folder"):
        from_arguments(**arguments, checkpoint_manager=tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer .*none of which is among the .* of the model; make it from"):
        from_arguments(**{**arguments, "optimizer": torch.optim.SGD(network().parameters())}).trainer()
    peculiar = Peculiar(arguments["unit"].model)
    with pytest.raises(StepError, match=r"Peculiar returned a Tensor; return \(loss, num_targets\)"):
        from_arguments(**{**arguments, "unit": peculiar}).trainer(device="cpu", log_bar=False).run(1, [batches()[0]])


class Lists(Reader):
    """A reader whose lists are what it was given, and that promises two batches in each, or nothing."""

    def __init__(self, lists, promises):
        super().__init__(lists)
        del self.num_accumulate
        if promises:
            self.num_accumulate = 2

    def __next__(self):
        if self.place >= len(self.batches):
            raise StopIteration
        self.place += 1
        return self.batches[self.place - 1]


@pytest.mark.parametrize(
    ("counts", "promises", "match"),
    [
        ((1, 2), True, "returned 2 batches, and its steps have 2; only the last list of an epoch may be shorter"),
        ((3,), True, "returned 3 batches, and its steps have 2; .* set num_accumulate on the reader"),
        ((2,), False, "returned 2 batches, and its steps have 1; .* set num_accumulate on the reader"),
        ((2, 0), True, "returned 0 batches, and its steps have 2; .* raise StopIteration at the end"),
        (None, True, "returned a Tensor; return the list of a step's batches"),
    ],
)
def test_a_reader_whose_lists_are_not_steps(counts, promises, match):
    """Steps would have other batches than those of its lists."""
    first = batches()[0]
    lists = [first[0][0]] if counts is None else [[first] * count for count in counts]
    with pytest.raises(LoaderError, match=rf"next\(\) of the Lists {match}"):
        trained(data_reader=Lists(lists, promises))


def test_a_call_trains_once():
    converted = from_arguments(**given())
    converted()
    with pytest.raises(ConfigError, match="has trained; to train on, call from_arguments again, or run one trainer"):
        converted()
    trainer = converted.trainer(log_bar=False)
    assert [trainer.run(1, converted.loader)["step"] for _ in range(2)] == [3, 6]
