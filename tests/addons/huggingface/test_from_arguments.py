"""TrainingArguments become a trainer: every argument is converted, reported or refused; the weights are equal."""

from __future__ import annotations

import dataclasses
import json
import os
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

from kit import hf
from zae import Every, Trainer
from zae.addons import AMPAddon, GradientAccumulationAddon, StateManagerAddon, TensorBoardLoggerAddon
from zae.addons.huggingface.arguments import HUGGINGFACE, REFUSED, REPORTED
from zae.addons.huggingface.transformers import CONVERTED, from_arguments
from zae.errors import ConfigError

FIELDS = {each.name: each for each in dataclasses.fields(TrainingArguments)}
# A value that is not the default, and the arguments that it needs beside it.
VALUES = {
    "output_dir": "elsewhere", "num_train_epochs": 2.0, "max_steps": 7, "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": ({"num_cycles": 2}, {"lr_scheduler_type": "cosine_with_restarts"}), "warmup_steps": 3,
    "optim": "sgd", "optim_args": ("momentum=0.9", {"optim": "sgd"}), "optim_target_modules": "all-linear",
    "bf16_full_eval": True, "tf32": False, "activation_checkpointing": True, "gradient_checkpointing": True,
    "activation_checkpointing_kwargs": ({"use_reentrant": False}, {"activation_checkpointing": True}),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False}, {"gradient_checkpointing": True}),
    "torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": "default",
    "liger_kernel_config": {"rope": True}, "torch_empty_cache_steps": 5, "logging_strategy": "epoch",
    "include_num_input_tokens_seen": "all", "log_level": "info", "log_level_replica": "info",
    "report_to": ["tensorboard"], "run_name": "mine", "project": "mine", "trackio_space_id": "me/it",
    "trackio_bucket_id": "me/it", "trackio_static_space_id": "me/it", "eval_strategy": "epoch",
    "eval_steps": (3, {"eval_strategy": "steps"}), "eval_delay": (2, {"eval_strategy": "epoch"}),
    "eval_accumulation_steps": 2, "include_for_metrics": ["inputs"], "save_strategy": "epoch", "save_total_limit": 3,
    "hub_token": "secret", "hub_private_repo": True, "hub_model_id": "me/it", "hub_strategy": "end",
    "hub_revision": "other", "load_best_model_at_end": (True, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
    "metric_for_best_model": "eval_accuracy", "greater_is_better": True, "resume_from_checkpoint": "there",
    "data_seed": 3, "use_cpu": False, "accelerator_config": {"split_batches": True},
    "parallelism_config": None, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": (
        3, {"dataloader_num_workers": 1}), "dataloader_multiprocessing_context": "fork",
    "label_names": ["target"], "train_sampling_strategy": "sequential", "length_column_name": "len",
    "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 3, "ddp_broadcast_buffers": True,
    "ddp_static_graph": True, "ddp_backend": None, "fsdp": None, "fsdp_config": None, "deepspeed": None,
    "debug": "underflow_overflow", "bf16": True, "fp16": True, "neftune_noise_alpha": 5.0, "local_rank": -1,
    "disable_tqdm": True,
}  # fmt: skip
# Not tried by setting them: accelerate would start a group of processes, or an engine, as it reads them; and the CPU
# has no pinned memory.
UNTRIED = {
    "parallelism_config",
    "ddp_backend",
    "fsdp",
    "fsdp_config",
    "deepspeed",
    "local_rank",
    "use_cpu",
    "dataloader_pin_memory",
}


class Task(Trainer):
    """One loss for both."""

    def train_step(self, batch):
        return {"loss": self.model(**batch)["loss"]}

    test_step = train_step


class Net(nn.Module):
    """A model with the interface of Transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x, labels):
        output = self.head(self.norm(self.inner(x)).tanh())
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def shown(converted):
    """What a set of arguments has come to, as text."""
    given = {
        name: str(value) for name, value in vars(converted).items() if name not in ("args", "report", "total_steps")
    }
    return json.dumps(given, sort_keys=True)


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(3, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(22)
    ]


def test_every_argument_of_the_installed_version_has_an_entry():
    """None is in two tables, and no table names one that is gone."""
    tables = [set(CONVERTED), set(HUGGINGFACE), set(REPORTED), set(REFUSED)]
    assert sum(map(len, tables)) == len(set.union(*tables))
    known = {each.name for each in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert set.union(*tables) == known


@pytest.mark.sample(count=12)
@pytest.mark.parametrize("name", sorted(set(FIELDS) - UNTRIED))
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_no_argument_is_dropped_in_silence(name, monkeypatch):
    """Each one, set to another value, is seen in what was converted, in the report or in an error: issue 19.2."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    default = FIELDS[name].default
    value, more = default, {}
    if name in VALUES:
        value = VALUES[name]
        value, more = value if isinstance(value, tuple) else (value, {})
    elif isinstance(default, bool):
        value = not default
    else:
        value = default + 1 if isinstance(default, int) else default / 2 or 0.5
    base = {"output_dir": "out", "use_cpu": True, **more}
    before = from_arguments(base)
    given = {**base, name: value}
    if name in REFUSED:
        with pytest.raises(ConfigError, match=rf"^{name}=.* is not supported; "):
            from_arguments(given)
        return
    after = from_arguments(given)
    told = after.report.get(name, "")
    assert shown(before) != shown(after) or told.startswith((f"{name}=", f"{name} has ")), name
    assert name not in before.report
    if name in REPORTED:
        assert REPORTED[name] in told
    assert "secret" not in str(after.report)


def test_the_defaults_have_an_empty_report(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    converted = from_arguments(args)
    assert converted.report == {}
    assert str(converted.report) == "every argument has an effect, or its default"
    assert converted.add_ons == [StateManagerAddon]
    assert converted.options == {
        "optimizer": converted.options["optimizer"], "scheduler": converted.options["scheduler"], "device": "cpu",
        "scheduler_step_on_batch": True, "gradient_clip": 1.0, "seed": 42, "log_bar": True,
        "log_every": converted.options["log_every"],
        "save_path": str(tmp_path), "save_every": Every(steps=500), "keep_last": None, "keep_best": 0,
    }  # fmt: skip
    assert converted.run["n_epoch"] == 3
    assert converted.loader == {"batch_size": 8, "num_workers": 0, "pin_memory": False, "drop_last": False}
    assert repr(converted.options["scheduler"]) == "zae.addons.huggingface.optimizers.schedule('linear')"


class Seen(TrainerCallback):
    """The global steps at which Transformers logs, evaluates and saves, and the rates."""

    def __init__(self):
        self.logs, self.evaluations, self.saves = [], [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs.append((state.global_step, logs["learning_rate"]))

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluations.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self.saves.append(state.global_step)


def trained_by_transformers(args, samples):
    model, seen = Net(), Seen()

    class Sequential(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = Sequential(model, args, train_dataset=samples, eval_dataset=samples[:6], callbacks=[seen])
    trainer.train()
    return model, seen


def trained_here(args, samples, folder):
    converted = from_arguments(args)
    converted.options.update({"save_path": folder} if "save_path" in converted.options else {})

    class Watched(Task):
        logs, evaluations, saves = [], [], []

        def log(self, metrics, step):
            super().log(metrics, step)
            if "train/loss" in metrics:
                self.logs.append((step, metrics["lr"]))

        def on_validation_end(self, metrics):
            super().on_validation_end(metrics)
            self.evaluations.append(self.progress_checker.step)

    if StateManagerAddon in converted.add_ons:

        class Watched(Watched):
            def on_save(self, path):
                super().on_save(path)
                self.saves.append(self.progress_checker.step)

    trainer = converted.trainer(Watched, Net, log_bar=False)
    loader = DataLoader(samples, **converted.loader)
    metrics = converted.train(trainer, loader, DataLoader(samples[:6], **converted.valid_loader))
    return trainer, metrics


CASES = {
    "plain": {"num_train_epochs": 2},
    "accumulation": {"num_train_epochs": 2, "gradient_accumulation_steps": 2},
    "max_steps": {"max_steps": 8},
    "part of an epoch": {"num_train_epochs": 1.5},
    "warm-up and cosine": {"num_train_epochs": 2, "lr_scheduler_type": "cosine", "warmup_steps": 0.3},
    "decay and momentum": {"num_train_epochs": 2, "weight_decay": 0.1, "optim_args": "momentum=0.9"},
    "no clip": {"num_train_epochs": 2, "max_grad_norm": 0.0, "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": 3},
    "by steps": {"num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps",
                 "save_steps": 4, "logging_steps": 2, "logging_first_step": True, "eval_delay": 4},
    "by shares": {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps",
                  "save_steps": 0.5, "logging_steps": 0.2},
    "by epochs": {"num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch", "eval_delay": 2,
                  "logging_strategy": "epoch"},
    "no logs": {"num_train_epochs": 1, "logging_strategy": "no"},
}  # fmt: skip


@pytest.mark.sample(count=5)
@pytest.mark.parametrize("case", CASES)
def test_the_weights_and_cadences_are_those_of_transformers(case, samples, tmp_path):
    """SGD in float32 to 1e-6, and the steps of logs with their rates, evaluations and saves."""
    given = {
        "output_dir": str(tmp_path / "theirs"), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 0.2, "optim": "sgd", "use_cpu": True, "logging_steps": 3, "save_strategy": "no",
        "disable_tqdm": True, **CASES[case],
    }  # fmt: skip
    args = TrainingArguments(**given)
    theirs, seen = trained_by_transformers(args, samples)
    trainer, metrics = trained_here(args, samples, tmp_path / "ours")
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(theirs.parameters(), trainer.unwrap().parameters()))
    assert worst <= 1e-6
    assert trainer.evaluations == seen.evaluations
    assert [step for step, _ in trainer.logs] == [step for step, _ in seen.logs]
    assert sorted(set(trainer.saves)) == seen.saves  # The end is saved again, with the epoch closed.
    assert not all(map(torch.equal, theirs.parameters(), Net().parameters()))
    assert metrics["step"] == given.get("max_steps", metrics["step"])


# --------------------------------------------------------------------------------------------- with HuggingFaceAddon


def test_arguments_train_datasets_as_transformers_does(tmp_path):
    """The same order of samples, schedule and clipping: the weights of transformers.Trainer after two epochs."""
    given = {
        "output_dir": str(tmp_path / "theirs"), "per_device_train_batch_size": 4, "num_train_epochs": 2,
        "learning_rate": 0.2, "optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 0.2, "save_strategy": "no",
        "gradient_accumulation_steps": 2, "use_cpu": True, "seed": 5, "disable_tqdm": True, "weight_decay": 0.01,
        "label_smoothing_factor": 0.1, "eval_strategy": "epoch", "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    theirs, data = hf.make_model(), hf.dataset()
    other = transformers.Trainer(theirs, TrainingArguments(**given), train_dataset=data, eval_dataset=data)
    other.train()
    converted = from_arguments(given)
    assert converted.add_ons == [GradientAccumulationAddon]
    assert converted.report == {
        "label_smoothing_factor": "label_smoothing_factor=0.1: an option of HuggingFaceAddon; without it, the loss is "
        "what train_step returns"
    }
    task = Trainer.add_on("HuggingFaceAddon")
    for way in ("converted", "trainer"):
        trainer = converted.trainer(task, hf.make_model(), train_dataset=data, eval_dataset=data)
        assert converted.report == {}, "the class has HuggingFaceAddon"
        converted.train(trainer) if way == "converted" else trainer.train()
        worst = max(
            float((a - b).detach().abs().max()) for a, b in zip(theirs.parameters(), trainer.unwrap().parameters())
        )
        assert worst <= 1e-6, way
        ours = [row["valid_loss"] for row in trainer.metrics["valid_metrics_history"]]
        expected = [row["eval_loss"] for row in other.state.log_history if "eval_loss" in row]
        assert ours == pytest.approx(expected, abs=1e-6)


# -------------------------------------------------------------------------------------------------------- what is made


@mock.patch.dict(os.environ)  # As Transformers, full_determinism sets variables.
def test_the_model_is_changed_as_the_arguments_say(samples):
    """Cache, checkpointing of activations and noise; a function that makes the model too."""
    given = {
        "use_cpu": True, "save_strategy": "no", "activation_checkpointing": True, "neftune_noise_alpha": 5.0,
        "activation_checkpointing_kwargs": {"use_reentrant": False}, "full_determinism": True,
    }  # fmt: skip
    converted = from_arguments(given)
    try:
        for model in (hf.make_model("causal"), lambda: hf.make_model("causal")):
            trained = converted.trainer(Task, model).unwrap()
            assert trained.is_gradient_checkpointing
            assert trained.get_input_embeddings().neftune_noise_alpha == 5.0
            assert trained.config.use_cache is False
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in (("activation_checkpointing", True), ("neftune_noise_alpha", 5.0)):
        with pytest.raises(ConfigError, match=f"{name}={value} needs a model of Transformers, and Net has no"):
            from_arguments({"use_cpu": True, name: value}).trainer(Task, Net())


def test_the_best_weights_are_loaded_at_the_end(samples, tmp_path):
    """The best checkpoint is kept beside the last ones, and its weights are those of Transformers."""
    given = {
        "per_device_train_batch_size": 4, "num_train_epochs": 4, "learning_rate": 1.5, "optim": "sgd", "use_cpu": True,
        "lr_scheduler_type": "constant", "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(str(tmp_path / "theirs"), **given)
    theirs, _ = trained_by_transformers(args, samples)
    converted = from_arguments(args)
    assert (converted.options["monitor"], converted.options["monitor_mode"]) == ("loss", "min")
    trainer, metrics = trained_here(args, samples, tmp_path / "ours")
    scores = [row["valid_loss"] for row in metrics["valid_metrics_history"]]
    best = scores.index(min(scores))
    assert best < 3
    assert sorted(path.name for path in (tmp_path / "ours").glob("step-*")) == [
        f"step-{6 * (best + 1):08d}", "step-00000024",
    ]  # fmt: skip
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(theirs.parameters(), trainer.unwrap().parameters()))
    assert worst <= 1e-6
    told = from_arguments({**given, "output_dir": "x"}).report["load_best_model_at_end"]
    assert told.endswith("after trainer.run(), call trainer.restore_best()")


@pytest.mark.parametrize("add_ons", [(), ("HuggingFaceAddon",)])
def test_a_second_call_of_train_begins_anew(add_ons, samples, tmp_path):
    """As long as the first, evaluated at the same steps of it, and at the same learning rates."""
    given = {"output_dir": str(tmp_path), "use_cpu": True, "num_train_epochs": 2, "logging_steps": 1}
    given |= {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no"}
    converted = from_arguments(given)
    trainer = converted.trainer(Task.add_on(*add_ons), Net(), log_bar=False)
    loader = DataLoader(samples, batch_size=4)
    for _ in range(2):
        converted.train(trainer, loader, loader)
    rates = [row["lr"] for row in trainer.log_history if "lr" in row]
    half = len(rates) // 2
    assert half == 12
    assert rates[:half] == rates[half:]
    assert rates[0] > rates[half - 1]
    assert [row["step"] for row in trainer.history.valid] == [4, 8, 12, 16, 20, 24]


def test_a_run_resumes(samples, tmp_path):
    given = {"output_dir": str(tmp_path / "run"), "use_cpu": True, "optim": "sgd", "save_strategy": "epoch"}
    loader = DataLoader(samples, batch_size=4)
    first = from_arguments({**given, "num_train_epochs": 1})
    first.train(first.trainer(Task, Net, log_bar=False), loader)
    again = from_arguments({**given, "num_train_epochs": 2, "resume_from_checkpoint": "True"})
    assert again.options["resume"] is True
    trainer = again.trainer(Task, Net, log_bar=False)
    assert again.train(trainer, loader)["step"] == 12
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a checkpoint of Transformers, which has another state; load its weights"):
        from_arguments({**given, "resume_from_checkpoint": str(tmp_path / "checkpoint-3")})


def test_loggers(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "cats")
    given = {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "no", "run_name": "first"}
    converted = from_arguments({**given, "report_to": ["tensorboard", "wandb", "mlflow", "trackio", "comet_ml"]})
    assert [each.__name__ for each in converted.add_ons] == [
        "WandBLoggerAddon", "MLflowLoggerAddon", "TrackioLoggerAddon", "TensorBoardLoggerAddon",
    ]  # fmt: skip
    assert converted.options["web_logger"] == {
        "wandb": {"project": "cats", "name": "first"},
        "mlflow": {"experiment_name": "Default", "run_name": "first"},
        "trackio": {"project": "huggingface", "name": "first"},
    }
    assert converted.options["log_dir"] == str(tmp_path / "runs")
    assert "there is no logger for comet_ml; " in converted.report["report_to"]
    with pytest.warns(FutureWarning, match="logging_dir='logs' is of an older Transformers; write log_dir"):
        converted = from_arguments({**given, "report_to": "tensorboard", "logging_dir": "logs"})
    assert (converted.add_ons, converted.options["log_dir"]) == ([TensorBoardLoggerAddon], "logs")
    assert converted.report["run_name"] == "run_name='first': it is for report_to='wandb' and other services"
    with pytest.warns(FutureWarning):
        converted = from_arguments({**given, "logging_dir": "logs"})
    assert converted.report["logging_dir"] == "logging_dir='logs': it is for report_to='tensorboard'"


def test_devices_and_processes(monkeypatch, tmp_path):
    """What TrainingArguments says of the machine: a GPU, several of them, and several processes."""
    args = TrainingArguments(str(tmp_path), ddp_find_unused_parameters=True, save_strategy="no")
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda", 0))
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    converted = from_arguments(args)
    assert converted.options["device"] == "cuda:0"
    assert converted.loader["pin_memory"] is True
    assert converted.report["n_gpu"].startswith("n_gpu=2: DataParallel is not used; ")
    assert converted.report["ddp_find_unused_parameters"] == "ddp_find_unused_parameters=True: there is one process"
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)
    converted = from_arguments(args)
    assert [each.__name__ for each in converted.add_ons] == ["MultiGPUAddon"]
    assert {name: converted.options[name] for name in ("device", "timeout", "find_unused_parameters")} == {
        "device": "auto", "timeout": 1800.0, "find_unused_parameters": True,
    }  # fmt: skip
    assert converted.report == {}
    args.fsdp = True
    args.fsdp_config = {
        "transformer_layer_cls_to_wrap": ["BertLayer"], "cpu_offload": True, "activation_checkpointing": True,
        "version": 2, "state_dict_type": "FULL",
    }  # fmt: skip
    converted = from_arguments(args)
    assert [each.__name__ for each in converted.add_ons] == ["FSDPAddon", "GradientCheckpointingAddon"]
    assert (converted.options["fsdp_blocks"], converted.options["cpu_offload"]) == (["BertLayer"], True)
    assert converted.options["checkpoint_modules"] == ["BertLayer"]
    assert converted.report == {
        "fsdp_config": "fsdp_config has {'version': 2, 'state_dict_type': 'FULL'}: FSDPAddon has no such options",
        "ddp_find_unused_parameters": "ddp_find_unused_parameters=True: FSDPAddon has no such option",
    }
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match=r"deepspeed={.*} is not supported; write Task.add_on\(DeepSpeedAddon\)"):
        from_arguments(args)


def test_arguments_of_an_own_class_and_of_a_parser(tmp_path):
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        margin: float = 0.5

    assert from_arguments(Mine(str(tmp_path), use_cpu=True)).report == {}
    told = from_arguments(Mine(str(tmp_path), use_cpu=True, margin=0.7)).report
    assert told == {"margin": "margin=0.7: it is for your own code"}
    line = ["--output_dir", str(tmp_path), "--learning_rate", "1e-3", "--use_cpu", "--bf16"]
    (parsed,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    converted = from_arguments(parsed)
    assert converted.add_ons == [StateManagerAddon, AMPAddon]
    assert converted.options["optimizer"].args.learning_rate == 1e-3
    with pytest.raises(ConfigError, match=r"logging_steps=0.1 is a share of the run, whose steps are not known here"):
        from_arguments({"use_cpu": True, "logging_steps": 0.1})
    told = from_arguments({"use_cpu": True, "eval_strategy": "steps", "eval_steps": 0.1}).report
    assert told["eval_steps"].startswith("eval_steps=0.1 is a share of the run: converted.train(")
    converted = from_arguments({"use_cpu": True, "eval_strategy": "steps", "eval_steps": 0.1}, total_steps=50)
    assert str(converted.run["valid_every"]) == "EveryAnd(steps=5, after=0, also=(50,))"


# ------------------------------------------------------------------------------------------------------ the documents


def test_the_arguments_of_omnigenbench(samples, tmp_path):
    """Document 000: the arguments of HFTrainer as they are written there."""
    with pytest.warns(FutureWarning) as caught:
        converted = from_arguments(
            {
                "output_dir": str(tmp_path / "results"), "num_train_epochs": 10, "per_device_train_batch_size": 32,
                "per_device_eval_batch_size": 64, "learning_rate": 5e-5, "weight_decay": 0.01, "warmup_steps": 500,
                "evaluation_strategy": "steps", "eval_steps": 500, "save_strategy": "steps", "save_steps": 500,
                "save_total_limit": 3, "load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy",
                "logging_dir": str(tmp_path / "logs"), "logging_steps": 100, "report_to": ["tensorboard", "wandb"],
                "fp16": True, "seed": 42, "use_cpu": True,
            }
        )  # fmt: skip
    assert [str(each.message) for each in caught] == [
        "evaluation_strategy is of an older Transformers; write eval_strategy='steps'",
        f"logging_dir={str(tmp_path / 'logs')!r} is of an older Transformers; write log_dir, an option of "
        "TensorBoardLoggerAddon",
    ]
    assert {each.__name__ for each in converted.add_ons} == {
        "StateManagerAddon", "AMPAddon", "WandBLoggerAddon", "TensorBoardLoggerAddon",
    }  # fmt: skip
    expected = {
        "save_every": Every(steps=500), "keep_last": 3, "keep_best": 1, "monitor": "accuracy", "monitor_mode": "max",
        "precision": "fp16", "seed": 42, "gradient_clip": 1.0, "log_dir": str(tmp_path / "logs"),
    }  # fmt: skip
    assert {name: converted.options[name] for name in expected} == expected
    assert (converted.run["n_epoch"], converted.run["valid_every"].steps, converted.options["log_every"].steps) == (
        10,
        500,
        100,
    )
    assert (converted.loader["batch_size"], converted.valid_loader["batch_size"]) == (32, 64)
    assert set(converted.report) == {"eval_strategy", "load_best_model_at_end"}


def test_the_arguments_of_forgather(samples, tmp_path):
    """Document 002: a dict of its arguments; those of its own are refused by name."""
    given = {
        "output_dir": str(tmp_path), "num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16, "logging_steps": 500, "logging_strategy": "steps", "eval_steps": 500,
        "eval_strategy": "no", "save_steps": 500, "save_strategy": "steps", "save_total_limit": 2,
        "resume_from_checkpoint": False, "torch_compile": False, "torch_compile_backend": None,
        "torch_compile_mode": None, "dataloader_num_workers": 0, "dataloader_pin_memory": True,
        "dataloader_drop_last": False, "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_epsilon": 1e-8, "warmup_steps": 0, "lr_scheduler_type": "linear", "use_cpu": True,
    }  # fmt: skip
    converted = from_arguments(given)
    assert converted.report == {}
    trainer = converted.trainer(Task, Net, log_bar=False)
    assert converted.train(trainer, DataLoader(samples, **converted.loader))["step"] == 2
    own = {
        "save_optimizer_state": "here it is StateManagerAddon",
        "save_scheduler_state": "here it is StateManagerAddon",
        "restore_optimizer_state": r"here it is start_from=path, with the parts in start_with",
        "restore_scheduler_state": r"here it is start_from=path, with the parts in start_with",
        "accelerator_args": r"here it is accelerator_args \(AccelerateAddon\)",
        "split_spec": r"here it is split \(PipelineAddon\)",
        "checkpoint_sequential": "here it is GradientCheckpointingAddon",
    }
    for name, remedy in own.items():
        said = f"args has '{name}', which is not an argument of TrainingArguments; {remedy}"
        with pytest.raises(ConfigError, match=said):
            from_arguments({**given, name: True})
    with pytest.raises(ConfigError) as caught:
        from_arguments({**given, **dict.fromkeys(own, True)})
    assert all(repr(name) in str(caught.value) for name in own)


@pytest.mark.filterwarnings("ignore:.*older Transformers:FutureWarning", "ignore:.*no effect:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("given", "add_ons"),
    [
        ({"num_train_epochs": 3, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 64,
          "learning_rate": 2e-5, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
         {"StateManagerAddon"}),
        ({"fp16": True, "fp16_opt_level": "O1"}, {"StateManagerAddon", "AMPAddon"}),
        ({"bf16": True}, {"StateManagerAddon", "AMPAddon"}),
        ({"gradient_checkpointing": True}, {"StateManagerAddon"}),
        ({"torch_compile": True, "torch_compile_backend": "inductor"}, {"StateManagerAddon", "CompileAddon"}),
        ({"optim": "adamw_hf", "warmup_ratio": 0.1}, {"StateManagerAddon"}),
    ],
)  # fmt: skip
def test_the_arguments_of_the_tutorial(given, add_ons, tmp_path):
    """Document 004: each snippet that makes TrainingArguments."""
    converted = from_arguments({"output_dir": str(tmp_path / "results"), "use_cpu": True, **given})
    assert {each.__name__ for each in converted.add_ons} == add_ons
    trainer = converted.trainer(Task, hf.make_model(), log_bar=False)
    assert trainer.monitor == "loss"
    assert set(converted.report) <= {"load_best_model_at_end"}


def test_without_tqdm_a_run_shows_plain_lines(samples, capsys):
    """As in Transformers, which prints what it logs; the bar is left out, and not what it shows."""
    given = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "num_train_epochs": 1}
    for is_disabled in (True, False):
        converted = from_arguments({**given, "disable_tqdm": is_disabled})
        assert converted.options["log_bar"] == ("lines" if is_disabled else True)
    converted = from_arguments({**given, "disable_tqdm": True})
    converted.train(converted.trainer(Task, Net), DataLoader(samples, 8))
    shown = capsys.readouterr()
    assert "loss" in shown.out + shown.err
    assert "\r" not in shown.out + shown.err
