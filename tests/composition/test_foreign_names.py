"""Names of other trainers: each is taken here, or answered with what to write.

They are read from the installed packages, so that a name of their next version fails here until it is decided; those of
fairseq2, OmniGenBench and Forgather are the ones of their documentation.
"""

import copy
import dataclasses
import difflib
import inspect
import pickle
import re

import pytest
import torch

import zae
import zae.addons
import zae.interop.fairseq2
from kit.mistakes import ADD_ONS, Task, trainer_of
from zae.composition import foreign_names
from zae.composition.options import own_options

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


def _parameters(cls):
    return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]


def _public(cls, package):
    """Return what a class of a package defines for its users, and not its constants."""
    names = {name for c in cls.__mro__ if c.__module__.startswith(package) for name in vars(c)}
    return sorted(name for name in names if name[0] != "_" and not name.isupper())


def option_names(library):
    if library == "transformers":
        from transformers import Trainer, TrainingArguments

        return [*_parameters(Trainer), *(field.name for field in dataclasses.fields(TrainingArguments))]
    if library == "lightning":
        from lightning.pytorch import Trainer

        return _parameters(Trainer)
    if library == "accelerate":
        from accelerate import Accelerator

        return _parameters(Accelerator)
    return {"fairseq2": FAIRSEQ2, "omnigenbench": OMNIGENBENCH, "forgather": FORGATHER, "former": FORMER}[
        library
    ].split()


def method_names(library):
    if library == "transformers":
        from transformers import Trainer, TrainerCallback

        return [*_public(Trainer, "transformers"), *_public(TrainerCallback, "transformers")]
    if library == "lightning":
        from lightning.pytorch import Callback, LightningModule, Trainer

        hooks = [name for name in _public(Callback, "lightning") if name != "state_key"]
        return [*_public(Trainer, "lightning"), *_public(LightningModule, "lightning"), *hooks]
    if library == "accelerate":
        from accelerate import Accelerator

        return _public(Accelerator, "accelerate")
    return [*HOOKS_OF_THE_SEEDS.split(), *ATTRIBUTES_OF_THE_SEEDS.split()]


@pytest.mark.parametrize(
    "library", ["transformers", "lightning", "accelerate", "fairseq2", "omnigenbench", "forgather", "former"]
)
def test_each_option_of_another_trainer_is_taken_or_explained(library):
    names = option_names(library)
    assert len(names) >= 11
    unknown, refused = [], 0
    for name in names:
        if name in own_options(zae.Trainer):
            continue
        with pytest.raises(zae.OptionError) as caught:
            trainer_of(**{name: 1})
        refused += 1
        if not re.match(
            rf"unknown argument '{name}' for Task(; here it is |; zae has no counterpart: |: it is an option of )",
            str(caught.value),
        ):
            unknown.append(name)
    assert unknown == []
    assert refused > len(names) / 2


@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate", "seeds"])
def test_each_method_of_another_trainer_is_taken_or_explained(library):
    names, trainer, unknown, refused = method_names(library), trainer_of(), [], 0
    assert len(names) > 20
    for name in names:
        if name in dir(trainer):
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(trainer, name)
        if not isinstance(caught.value, zae.MissingError):
            unknown.append(name)
        refused += name in foreign_names.HOOKS
    assert unknown == []
    assert refused >= (0 if library == "accelerate" else 10)


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
    """The tables do not say two things of one name, and what has the same name here is not foreign."""
    tables = {name: vars(foreign_names)[name] for name in ("OPTIONS", "HOOKS", "ATTRIBUTES", "WITHOUT_COUNTERPART")}
    for first, second in (("HOOKS", "ATTRIBUTES"), *((t, "WITHOUT_COUNTERPART") for t in list(tables)[:3])):
        assert tables[first].keys() & tables[second].keys() == set()
    ours = set(dir(zae.Trainer))
    assert foreign_names.HOOKS.keys() & ours == foreign_names.ATTRIBUTES.keys() & ours == set()
    # As options of the constructor they are unknown, and something else has the name.
    arguments = {"n_epoch", "max_steps", "max_time", "overfit_batches", "optimizers"}
    options = {name for a in ADD_ONS for cls in a.__mro__ for name in own_options(cls)}
    assert {n for n in foreign_names.OPTIONS if n in ours | set(own_options(zae.Trainer))} <= arguments
    assert options & set(foreign_names.WITHOUT_COUNTERPART) == set()


def test_all_unknown_options_are_answered_at_once():
    with pytest.raises(zae.OptionError) as caught:
        trainer_of(accumulate_grad_batches=4, gradient_clp=1.0, save_path="runs")
    lines = str(caught.value).splitlines()
    assert lines[0] == "unknown arguments for Task:"
    assert [re.split("[:;]", line)[0] for line in lines[1:]] == [
        "  'accumulate_grad_batches'", "  'gradient_clp'", "  'save_path'",
    ]  # fmt: skip
    for line, cure in zip(
        lines[1:], ("gradient_accumulation_steps", "'gradient_clip'", "StateManagerAddon"), strict=True
    ):
        assert cure in line


def test_what_is_absent_stays_absent():
    trainer = trainer_of()
    tables = (foreign_names.OPTIONS, foreign_names.HOOKS, foreign_names.ATTRIBUTES, foreign_names.WITHOUT_COUNTERPART)
    for each in (trainer, zae.Trainer):
        there = dir(each)
        assert [name for table in tables for name in table if name not in there and hasattr(each, name)] == []
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
        *zae.interop.fairseq2.__all__,
        *inspect.signature(zae.Trainer.run).parameters,
        *vars(trainer_of()),
        "super",
        "print",
        "AdamW",
        "lr",
        "warmup",
    }
    answers = {*foreign_names.OPTIONS.values(), *foreign_names.HOOKS.values(), *foreign_names.ATTRIBUTES.values()}
    words = re.compile(r"(?<![.\w])[a-z]\w+(?==|\()|\b\w+Addon\b|^\w+(?= \(\w+Addon\)|$)")
    assert {here: set(words.findall(here)) - known for here in answers if set(words.findall(here)) - known} == {}
    trainer = trainer_of()
    for name, here in foreign_names.ATTRIBUTES.items():
        with pytest.raises(zae.MissingError) as caught:
            getattr(trainer, name)
        assert str(caught.value) == f"Task has no attribute {name!r}; here it is {here}"
