"""The snippets of Forgather's reference of its trainers, word for word, on a tiny model.

``BaseTrainer`` and its kind are ``zae.Trainer`` with the add-ons that the messages name. Signatures whose arguments are
types, such as ``TrainerState(epoch: float = 0.0, ...)``, are no calls: their names are given values, and the fields of
the state and of the control are read. ``DistributedEnvironment`` is a class of Forgather.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kit import hf
from kit.snippets import run, said_by
from zae import Trainer
from zae.addons import AccelerateAddon, CallbackAddon, HuggingFaceAddon, PipelineAddon
from zae.errors import ConfigError

HERE = Trainer.add_on(HuggingFaceAddon)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(**more: Any) -> dict[str, Any]:
    return {"model": hf.make_model(), "train_dataset": hf.dataset(count=8), "torch": torch, "Trainer": HERE, **more}


def called(signature: str) -> list[str]:
    """The names of the arguments of a signature."""
    found = re.findall(r"^ +(\w+)(?=[:=,])", signature, re.MULTILINE)
    assert found != []
    return found


CALLBACKS = """
    trainer.add_callback(TBLogger(summary_writer))
    trainer.add_callback(ProgressCallback)  # Class will be instantiated
"""


class TBLogger(transformers.TrainerCallback):
    def __init__(self, summary_writer: Any) -> None:
        self.summary_writer = summary_writer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.summary_writer.append(logs)


def test_add_callback() -> None:
    given = names(TBLogger=TBLogger, summary_writer=[], ProgressCallback=transformers.ProgressCallback)
    trainer = HERE(given["model"], "cpu", train_dataset=given["train_dataset"], num_train_epochs=1)
    assert "add it with .add_on(CallbackAddon)" in said_by(CALLBACKS, {**given, "trainer": trainer})
    kind = HERE.add_on(CallbackAddon)
    trainer = kind(given["model"], "cpu", train_dataset=given["train_dataset"], num_train_epochs=1, log_bar=False)
    run(CALLBACKS, {**given, "trainer": trainer})
    trainer.train()
    assert given["summary_writer"] != []
    assert isinstance(trainer.pop_callback(TBLogger), TBLogger)
    trainer.remove_callback(transformers.ProgressCallback)
    assert trainer.callbacks == []


BASE = """
    BaseTrainer(
        model: PreTrainedModel | torch.nn.Module = None,
        args: Optional[dict | TrainingArguments] = None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,  # Tokenizer or processor
        model_init: Optional[Callable[[], PreTrainedModel]] = None,
        callbacks: List = None,
        tokenizer=None,  # Deprecated: use processing_class
    )
"""


def test_base_trainer() -> None:
    kind = HERE.add_on(CallbackAddon)
    values = {
        "model": hf.make_model(), "args": {"output_dir": "out", "use_cpu": True, "num_train_epochs": 1},
        "data_collator": transformers.default_data_collator, "train_dataset": hf.dataset(count=8),
        "eval_dataset": hf.dataset(count=4), "processing_class": hf.tokenizer(), "model_init": None, "callbacks": [],
        "tokenizer": None,
    }  # fmt: skip
    assert called(BASE) == [*values]
    message = said_by("Trainer(**values)", {"Trainer": Trainer, "values": values})
    assert "'args'; here it is an option of Trainer.add_on(HuggingFaceAddon)(model, args=...)" in message
    assert "'callbacks': it is an option of CallbackAddon; add it with .add_on(CallbackAddon)" in message
    trainer = kind(**values)
    assert trainer.train().global_step == 1
    assert set(trainer.evaluate()) >= {"eval_loss"}
    assert trainer.unwrap() is values["model"]
    assert trainer.model_exists(trainer.save_model("final"))
    with pytest.warns(DeprecationWarning, match="tokenizer= is now processing_class="):
        kind(**{**values, "processing_class": None, "tokenizer": hf.tokenizer()})


TRAINER = """
    Trainer(
        # Inherits all BaseTrainer parameters, plus:
        optimizer_factory: Optional[Callable] = None,
        optimizer_cls_and_kwargs: Optional[Tuple[Type[torch.optim.Optimizer], Dict[str, Any]]] = None,
        lr_scheduler_factory: Optional[Callable] = None,
        **kwargs
    )
"""
OPTIMIZER = """
    def optimizer_factory(named_parameters):
        return torch.optim.AdamW(
            named_parameters(),
            lr=1e-3,
            weight_decay=0.01
        )

    trainer = Trainer(
        optimizer_factory=optimizer_factory,
        # ...
    )
"""
SCHEDULER = """
    def lr_scheduler_factory(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer,
            T_max=1000
        )

    trainer = Trainer(
        lr_scheduler_factory=lr_scheduler_factory,
        # ...
    )
"""
MORE = ("# ...", 'model=model, train_dataset=train_dataset, device="cpu", num_train_epochs=3')


def test_optimizer_factory() -> None:
    assert "here it is optimizer, a function" in said_by(OPTIMIZER, names(), MORE)
    trainer = run(OPTIMIZER, names(), MORE, ("optimizer_factory=", "optimizer="))["trainer"]
    trainer.train()
    assert trainer.optimizers["0"].param_groups[0]["weight_decay"] == 0.01


def test_lr_scheduler_factory() -> None:
    assert "here it is scheduler=lambda optimizer: ..." in said_by(SCHEDULER, names(), MORE)
    trainer = run(SCHEDULER, names(), MORE, ("lr_scheduler_factory=lr", "scheduler=lr"))["trainer"]
    trainer.train()
    assert trainer.schedulers["0"].last_epoch == 3  # Each optimizer step, and there is one in an epoch.


def test_optimizer_class_and_its_arguments() -> None:
    assert "optimizer_cls_and_kwargs" in called(TRAINER)
    pair = torch.optim.AdamW, {"lr": 1e-3}
    trainer = HERE(hf.make_model(), "cpu", train_dataset=hf.rows(), num_train_epochs=1, optimizer_cls_and_kwargs=pair)
    trainer.train()
    assert trainer.optimizers["0"].param_groups[0]["initial_lr"] == 1e-3


ARGUMENTS = """
    TrainingArguments(
        output_dir: str = "tmp_trainer",
        logging_dir: str = None,  # Auto-generated if None

        # Training configuration
        num_train_epochs: int = 1,
        max_steps: int = -1,  # -1 means use epochs
        per_device_train_batch_size: int = 16,
        per_device_eval_batch_size: int = 16,

        # Logging and evaluation
        logging_steps: int = 500,
        logging_strategy: str = "steps",  # "steps" | "epoch" | "no"
        eval_steps: int = 500,
        eval_strategy: str = "no",  # "steps" | "epoch" | "no"

        # Saving and checkpoints
        save_steps: int = 500,
        save_strategy: str = "steps",  # "steps" | "epoch" | "no"
        save_total_limit: int = 2,
        resume_from_checkpoint: bool | str = False,

        # Checkpoint state management
        save_optimizer_state: bool = False,
        save_scheduler_state: bool = False,
        restore_optimizer_state: bool = True,
        restore_scheduler_state: bool = True,

        # Performance
        torch_compile: bool = False,
        torch_compile_backend: str = "inductor",
        torch_compile_mode: str = None,

        # Data loading
        dataloader_num_workers: int = 0,
        dataloader_pin_memory: bool = True,
        dataloader_drop_last: bool = False,

        # Optimization (HF compatibility)
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        warmup_steps: int = 0,
        lr_scheduler_type: str = "linear",
    )
"""
OWN = ("save_optimizer_state", "save_scheduler_state", "restore_optimizer_state", "restore_scheduler_state")


def test_training_arguments() -> None:
    """Its own toggles are named together; without them, and without the backend of no compilation, it trains."""
    text = re.sub(r": [\w| ]+ =", "=", ARGUMENTS).replace("TrainingArguments(", "args = dict(use_cpu=True,")
    args = run(text, {})["args"]
    with pytest.raises(ConfigError) as caught:
        HERE(hf.make_model(), args=args, train_dataset=hf.dataset())
    assert all(repr(name) in str(caught.value) for name in OWN)
    kept = {name: value for name, value in args.items() if name not in (*OWN, "torch_compile_backend", "logging_dir")}
    assert HERE(hf.make_model(), args=kept, train_dataset=hf.dataset()).train().global_step == 2


ACCELERATE = """
    AccelTrainer(
        # Inherits all BaseTrainer parameters, plus:
        accelerator: Optional[Accelerator] = None,
        **kwargs
    )
"""
ACCELERATE_ARGUMENTS = """
    AccelTrainingArguments(
        # All TrainingArguments options, plus:
        accelerator_args: dict = None,  # Accelerator configuration
    )
"""


@pytest.mark.parametrize("text", [ACCELERATE, ACCELERATE_ARGUMENTS])
def test_accelerate(text: str) -> None:
    kind = HERE.add_on(AccelerateAddon)
    trainer = kind(hf.make_model(), "cpu", train_dataset=hf.rows(), num_train_epochs=1, **dict.fromkeys(called(text)))
    assert trainer.train().global_step > 0


PIPELINE = """
    PipelineTrainer(
        # Inherits all BaseTrainer parameters, plus:
        distributed_env: DistributedEnvironment,
        loss_fn: Callable,
        pipe_schedule_factory: Callable = None,
        **kwargs
    )
"""
PIPELINE_ARGUMENTS = """
    PipelineTrainingArguments(
        # All TrainingArguments options, plus:

        # Pipeline configuration
        split_spec: dict,              # Model partitioning specification
        pipeline_chunks: int = 1,      # Number of pipeline micro-batches
        stages_per_rank: int = 1,      # Pipeline stages per rank

        # Scheduling
        schedule_class: str = "ScheduleGPipe",  # Pipeline schedule

        # Memory management
        checkpoint_sequential: bool = False,     # Sequential checkpointing

        # Distributed settings
        pipeline_parallel_size: int = None,     # Auto-detected if None
    )
"""
HERE_IT_IS = {
    "distributed_env": "device, a list with one entry for each rank, or torchrun",
    "loss_fn": "train_step(batch), which returns {'loss': ...}",
    "pipe_schedule_factory": "pipeline_schedule (PipelineAddon)",
    "split_spec": "split (PipelineAddon)",
    "pipeline_chunks": "pipeline_microbatches (PipelineAddon)",
    "schedule_class": "pipeline_schedule (PipelineAddon)",
    "checkpoint_sequential": "GradientCheckpointingAddon",
    "pipeline_parallel_size": "mesh={'pipeline': ...} (PipelineAddon)",
}


class Stages(Trainer.add_on(PipelineAddon)):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.mark.parametrize("text", [PIPELINE, PIPELINE_ARGUMENTS])
def test_pipeline(text: str) -> None:
    """Each name with the option of PipelineAddon; tests/engines/test_pipeline.py trains with these options."""
    given = dict.fromkeys(called(text))
    said = said_by("Stages(model, **given)", {"Stages": Stages, "model": torch.nn.Linear(2, 1), "given": given})
    for name in given.keys() - {"stages_per_rank"}:
        assert f"'{name}'; here it is {HERE_IT_IS[name]}" in said


STATE = """
    TrainerState(
        epoch: float = 0.0,
        global_step: int = 0,
        max_steps: int,
        logging_steps: int,
        eval_steps: int,
        save_steps: int,
        train_batch_size: int,
        num_train_epochs: int,
        log_history: List[Dict[str, float]] = [],
        is_local_process_zero: bool = True,
        is_world_process_zero: bool = True,
    )
"""
CONTROL = """
    TrainerControl(
        should_training_stop: bool = False,
        should_epoch_stop: bool = False,
        should_save: bool = False,
        should_evaluate: bool = False,
        should_log: bool = False,
    )
"""


def test_state_and_control() -> None:
    seen: list[tuple[Any, Any]] = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            read = [
                {name: getattr(each, name) for name in called(text)}
                for each, text in ((state, STATE), (control, CONTROL))
            ]
            seen.append((SimpleNamespace(**read[0]), SimpleNamespace(**read[1])))

    kind = HERE.add_on(CallbackAddon)
    kind(hf.make_model(), "cpu", train_dataset=hf.rows(count=16), num_train_epochs=2, callbacks=[Looks()]).train()
    state, control = seen[2]
    assert (state.epoch, state.global_step, state.max_steps, state.num_train_epochs) == (1.5, 3, 4, 2)
    assert (state.train_batch_size, state.is_world_process_zero) == (8, True)
    assert control.should_training_stop is control.should_epoch_stop is control.should_save is False
