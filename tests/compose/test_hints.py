"""Names of other trainers: those that scripts write every day are taken here, or answered with what to write."""

import ast
import copy
import difflib
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch

import zae
import zae.addons
import zae.addons.fairseq2
import zae.compose.hints as hints
from kit.mistakes import ADD_ONS, Task, trainer_of
from zae.compose.hints import HINTS, HOOKS
from zae.compose.options import own_options
from zae.parts import Precision, SingleProcess, StepWindow

FAIRSEQ2 = """unit data_reader optimizer checkpoint_manager root_gang dp_gang tp_gang dtype lr_scheduler max_num_steps
    max_num_data_epochs valid_units valid_data_readers validate_every_n_steps checkpoint_every_n_steps
    keep_last_n_checkpoints keep_best_n_checkpoints publish_metrics_every_n_steps tb_dir metrics_dir fp16_loss_scale
    max_gradient_norm amp anomaly_detection seed early_stopper score_metric_descriptor lower_better profiler"""
OMNIGENBENCH = """model train_dataset eval_dataset epochs batch_size autocast device optimizer lr_scheduler
    gradient_accumulation_steps max_grad_norm patience delta save_dir save_steps save_total_limit eval_steps seed
    optimization_metric training_args compute_metrics num_workers pin_memory prefetch_factor task_datasets
    task_weights"""
FORGATHER = """model args data_collator train_dataset eval_dataset processing_class model_init callbacks tokenizer
    optimizer_factory optimizer_cls_and_kwargs lr_scheduler_factory output_dir logging_dir num_train_epochs max_steps
    per_device_train_batch_size per_device_eval_batch_size logging_steps logging_strategy eval_steps eval_strategy
    save_steps save_strategy save_total_limit resume_from_checkpoint save_optimizer_state save_scheduler_state
    restore_optimizer_state restore_scheduler_state torch_compile torch_compile_backend torch_compile_mode
    dataloader_num_workers dataloader_pin_memory dataloader_drop_last learning_rate weight_decay adam_beta1 adam_beta2
    adam_epsilon warmup_steps lr_scheduler_type accelerator accelerator_args distributed_env loss_fn
    pipe_schedule_factory split_spec pipeline_chunks stages_per_rank schedule_class checkpoint_sequential
    pipeline_parallel_size"""
FORMER = """tokenizer evaluation_strategy warmup_ratio fp16_opt_level logging_dir group_by_length no_cuda
    half_precision gpus drop_last gradient_checkpointing"""
HOOKS_OF_THE_SEEDS = """_setup_training_components _prepare_batch _train_epoch _do_run _run_step _should_run_step
    _should_validate _should_checkpoint _next_batches _save_checkpoint _resolve_checkpoint_path
    _find_latest_checkpoint _validate_checkpoint"""
ATTRIBUTES_OF_THE_SEEDS = """train evaluate save_model add_callback pop_callback remove_callback unwrapped_model
    model_exists log save_metrics push_to_hub hyperparameter_search accelerator global_step is_main_process"""


TRANSFORMERS = """model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func
    compute_metrics callbacks optimizers output_dir do_train do_eval eval_strategy per_device_train_batch_size
    gradient_accumulation_steps learning_rate weight_decay max_grad_norm num_train_epochs max_steps lr_scheduler_type
    warmup_steps logging_dir logging_steps save_strategy save_steps save_total_limit seed bf16 fp16 tf32
    eval_steps dataloader_num_workers disable_tqdm remove_unused_columns label_names load_best_model_at_end
    metric_for_best_model greater_is_better fsdp deepspeed label_smoothing_factor optim report_to run_name
    ddp_find_unused_parameters dataloader_pin_memory resume_from_checkpoint gradient_checkpointing auto_find_batch_size
    torch_compile full_determinism"""
LIGHTNING = """accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
    max_steps max_time limit_train_batches limit_val_batches limit_test_batches overfit_batches val_check_interval
    check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing enable_progress_bar
    enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic benchmark
    use_distributed_sampler profiler detect_anomaly plugins sync_batchnorm default_root_dir"""
ACCELERATE = """device_placement split_batches mixed_precision gradient_accumulation_steps cpu deepspeed_plugin
    fsdp_plugin log_with project_dir step_scheduler_with_optimizer kwargs_handlers dynamo_backend"""
METHODS = {
    "transformers": """train evaluate predict save_model log add_callback pop_callback remove_callback training_step
    compute_loss prediction_step create_optimizer create_scheduler get_train_dataloader get_eval_dataloader
    is_world_process_zero push_to_hub hyperparameter_search on_train_begin on_train_end on_epoch_begin on_epoch_end
    on_step_begin on_step_end on_evaluate on_log on_save on_predict on_optimizer_step""",
    "lightning": """fit test predict save_checkpoint global_step current_epoch is_global_zero callback_metrics
    training_step validation_step configure_optimizers manual_backward log_dict save_hyperparameters hparams freeze
    load_from_checkpoint train_dataloader val_dataloader on_train_epoch_start on_train_epoch_end on_train_batch_start
    on_validation_epoch_end toggle_optimizer all_gather to_onnx estimated_stepping_batches on_save_checkpoint""",
    "accelerate": """prepare backward accumulate clip_grad_norm_ gather gather_for_metrics reduce unwrap_model
    wait_for_everyone is_main_process print save_state load_state register_for_checkpointing autocast no_sync
    skip_first_batches init_trackers end_training num_processes process_index sync_gradients free_memory device""",
    "seeds": f"{HOOKS_OF_THE_SEEDS} {ATTRIBUTES_OF_THE_SEEDS}",
}
OPTIONS = {
    "transformers": TRANSFORMERS,
    "lightning": LIGHTNING,
    "accelerate": ACCELERATE,
    "fairseq2": FAIRSEQ2,
    "omnigenbench": OMNIGENBENCH,
    "forgather": FORGATHER,
    "former": FORMER,
}


@pytest.mark.parametrize("library", OPTIONS)
def test_each_option_of_another_trainer_is_taken_or_explained(library):
    names = OPTIONS[library].split()
    assert len(names) >= 11
    unknown, refused = [], 0
    for name in names:
        if name in own_options(zae.Trainer):
            continue
        with pytest.raises(zae.OptionError) as caught:
            trainer_of(**{name: 1})
        refused += 1
        if not re.match(
            rf"unknown argument '{name}' for Task(; here it is |: it is an option of )",
            str(caught.value),
        ):
            unknown.append(name)
    assert unknown == []
    assert refused > len(names) / 2


@pytest.mark.parametrize("library", METHODS)
def test_each_method_of_another_trainer_is_taken_or_explained(library):
    names, trainer, unknown, refused = METHODS[library].split(), trainer_of(), [], 0
    assert len(names) > 20
    for name in names:
        if name in dir(trainer) or any(name in dir(part) for part in PARTS.values()):
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(trainer, name)
        if not isinstance(caught.value, zae.MissingError):
            unknown.append(name)
        refused += name in HOOKS
    assert unknown == []
    assert refused >= (0 if library == "accelerate" else 8)


def test_the_events_of_transformers_have_other_arguments():
    with pytest.raises(zae.TaskError, match=r"write def on_step_end\(self, outputs\)"):

        class Events(Task):
            def on_step_end(self, args, state, control): ...


@pytest.mark.parametrize(("name", "wrong"), [("deepspeed", "seed"), ("drop_last", "keep_last")])
def test_no_guess_for_a_name_that_is_known(name, wrong):
    with pytest.raises(zae.OptionError) as caught:
        trainer_of(**{name: True})
    assert f"'{wrong}'" not in str(caught.value)
    assert difflib.get_close_matches(name, [wrong], cutoff=0.6)  # It was the guess.


def test_a_name_has_one_answer_and_is_not_one_of_ours():
    """No row of the table is written over by another one, and what has the same name here is not foreign."""
    source = ast.parse(Path(hints.__file__).read_text())
    for table in (node for node in ast.walk(source) if isinstance(node, ast.Dict)):
        remedies = [ast.literal_eval(key) for key in table.keys]
        names = " ".join(ast.literal_eval(value) for value in table.values).split()
        assert len(set(remedies)) == len(remedies)
        assert len(set(names)) == len(names)
    # As options of the constructor they are unknown, and something else has the name.
    arguments = {"n_epoch", "max_steps", "max_time", "overfit_batches", "optimizers"}
    assert HINTS.keys() & {*dir(zae.Trainer), *own_options(zae.Trainer)} <= arguments


def test_all_unknown_options_are_answered_at_once():
    with pytest.raises(zae.OptionError) as caught:
        trainer_of(accumulate_grad_batches=4, gradient_clp=1.0, save_path="runs")
    lines = str(caught.value).splitlines()
    assert lines[0] == "unknown arguments for Task:"
    assert [re.split("[:;]", line)[0] for line in lines[1:]] == [
        "  'accumulate_grad_batches'", "  'gradient_clp'", "  'save_path'",
    ]  # fmt: skip
    for line, remedy in zip(
        lines[1:], ("gradient_accumulation_steps", "'gradient_clip'", "StateManagerAddon"), strict=True
    ):
        assert remedy in line


def test_what_is_absent_stays_absent():
    trainer = trainer_of()
    for each in (trainer, zae.Trainer):
        there = dir(each)
        assert [name for name in HINTS if name not in there and hasattr(each, name)] == []
    trainer.callbacks = [1]
    assert trainer.callbacks == [1]


class Asking(Task):
    """Has a property that reads what is not there."""

    @property
    def scores(self):
        return self.scored.items()

    @property
    def broken(self):
        raise AttributeError("mine")


def test_a_propertys_own_error_stays_as_it_is():
    trainer = trainer_of(Asking)
    with pytest.raises(AttributeError, match=r"^'Asking' object has no attribute 'scored'$"):
        trainer.scores  # noqa: B018
    with pytest.raises(AttributeError, match=r"^mine$"):
        trainer.broken  # noqa: B018


def test_an_object_without_its_init_is_copied_and_pickled():
    bare = object.__new__(Asking)
    with pytest.raises(AttributeError):
        bare.history  # noqa: B018
    trainer = trainer_of(Asking, optimizer=torch.optim.SGD)
    for made in (copy.copy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert made.progress_checker.step == 0
    assert not hasattr(bare, "__deepcopy__")
    with pytest.raises(AttributeError):
        copy.deepcopy(bare)


def test_every_answer_is_given_and_leads_to_names_that_exist():
    """Each word of an answer before ``=`` or ``(`` is an option, a method or an add-on that zae has."""
    known = set(dir(zae.Trainer)) | set(own_options(zae.Trainer)) | set(zae.__all__) | {"Task", "steps"}
    known |= {n for a in ADD_ONS for c in a.__mro__ for n in (a.__name__, *own_options(c), *vars(c))}
    known |= {
        "epochs",
        "unit",
        *zae.addons.fairseq2.__all__,
        *inspect.signature(zae.Trainer.run).parameters,
        *vars(trainer_of()),
        "super",
        "print",
        "AdamW",
        "lr",
        "warmup",
        "args",
        "after",
    }
    answers = {*HINTS.values()}
    words = re.compile(r"(?<![.\w])[a-z]\w+(?==|\()|\b\w+Addon\b|^\w+(?= \(\w+Addon\)|$)")
    assert {here: set(words.findall(here)) - known for here in answers if set(words.findall(here)) - known} == {}
    trainer = trainer_of()
    for name, here in HINTS.items():
        if name in dir(trainer) or any(name in dir(part) for part in PARTS.values()):
            continue
        with pytest.raises(zae.MissingError) as caught:
            getattr(trainer, name)
        assert str(caught.value) == f"Task has no attribute {name!r}; here it is {here}"


PARTS = {"engine": SingleProcess, "precision_part": Precision, "step_window": StepWindow}


# ------------------------------------------------------------------------------------- the options of the class itself


OF_HUGGINGFACE = {
    "epochs": "num_train_epochs, or n_epoch of run(n_epoch, loader)",
    "max_epochs": "num_train_epochs, or",
    "batch_size": "per_device_train_batch_size or per_device_eval_batch_size, or",
    "train_batch_size": "per_device_train_batch_size, or",
    "lr": "learning_rate, or optimizer=lambda parameters: AdamW(parameters, lr=...)",
    "max_gradient_norm": "max_grad_norm, or gradient_clip",
    "gradient_clip_val": "gradient_clip (the largest norm)",
    "collate_fn": "data_collator or processing_class",
    "num_workers": "dataloader_num_workers, or",
    "evaluation_strategy": "eval_strategy, or",
    "warmup_ratio": "warmup_steps, or",
    "loss_fn": "compute_loss_func, or",
    "save_dir": "output_dir, or save_path (StateManagerAddon)",
    "training_args": "an option of Trainer.add_on(HuggingFaceAddon)(model, args=...)",
    "train_dataloader": "loader of run(n_epoch, loader)",
    "shuffle": "a DataLoader with its own shuffle",
}


def test_an_option_of_the_class_itself_comes_first():
    """All unknown ones at once: the class has `num_train_epochs`, and `epochs` is not sent elsewhere."""
    task = zae.Trainer.add_on("HuggingFaceAddon")
    with pytest.raises(zae.OptionError) as caught:
        task(torch.nn.Linear(2, 1), **dict.fromkeys(OF_HUGGINGFACE, 1))
    first, *lines = str(caught.value).splitlines()
    assert first == "unknown arguments for Trainer[HuggingFaceAddon]:"
    for line, (name, here) in zip(lines, OF_HUGGINGFACE.items(), strict=True):
        assert line.startswith(f"  '{name}'; here it is {here}"), line
    saving = task.add_on("StateManagerAddon")
    with pytest.raises(zae.OptionError, match=r"'save_folder' .*; here it is save_path \(StateManagerAddon\)"):
        saving(torch.nn.Linear(2, 1), save_folder="runs", save_path="runs")


def test_the_options_of_a_class_with_steps_are_explained_where_there_are_none():
    """Three of five documents begin with ``Trainer(model, train_dataset=...)``."""
    model = torch.nn.Linear(2, 1)
    options = {"train_dataset": [1], "epochs": 10, "autocast": "fp16"}
    with pytest.raises(zae.OptionError) as caught:
        zae.Trainer(model=model, **options, device="cpu")
    remedies = ("or the same option of HuggingFaceAddon", "here it is n_epoch of run", "here it is precision=")
    for name, remedy in zip(options, remedies, strict=True):
        assert re.search(f"'{name}'; .*{remedy}", str(caught.value))
    with pytest.raises(zae.OptionError, match=r"'unit'; here it is task_of\(unit\)"):
        zae.Trainer(unit=model, data_reader=[1])
    with pytest.raises(zae.TaskError) as caught:
        zae.Trainer(model, optimizer=torch.optim.SGD)
    assert "HuggingFaceAddon" not in str(caught.value)
