"""Names of other trainers, and what they are called here; read only for the text of an error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

__all__ = [
    "ABSENT_NAMES",
    "FOREIGN_ARGUMENTS",
    "FOREIGN_HOOKS",
    "FOREIGN_METHODS",
    "FOREIGN_OPTIONS",
    "METHODS_OF_ADD_ONS",
    "foreign_argument",
    "foreign_hook",
    "foreign_method",
    "foreign_option",
]


def _by_name(names_by_cure: Mapping[str, str]) -> dict[str, str]:
    """Map each foreign name to what to write here, from a table of the opposite direction."""
    return {name: here for here, names in names_by_cure.items() for name in names.split()}


FOREIGN_OPTIONS = _by_name(
    {
        "gradient_accumulation_steps (GradientAccumulationAddon)": "accumulate_grad_batches gradient_accumulation "
        "accumulation_steps grad_accum",
        "gradient_clip (the largest norm)": "gradient_clip_val max_grad_norm max_gradient_norm clip_grad_norm",
        "run(n_epoch, loader)": "max_epochs num_train_epochs epochs num_epochs n_epochs train_dataloader "
        "train_dataloaders",
        "the first argument of run(n_epoch, loader), not of the constructor": "n_epoch",
        "run(n_epoch, loader), or run(None, loader, max_steps=...)": "max_duration",
        "run(n_epoch, loader), with a loader over that dataset": "train_dataset",
        "run(n_epoch, loader, valid_loader)": "eval_dataset eval_dataloader val_dataloaders",
        "run(n_epoch, loader, valid_loader, rehearse=True)": "fast_dev_run",
        "run(n_epoch, loader, limit_batches=(..., None))": "limit_train_batches",
        "run(n_epoch, loader, valid_loader, limit_batches=(None, ...))": "limit_val_batches",
        "run(n_epoch, loader, overfit_batches=...), not of the constructor": "overfit_batches",
        "run(n_epoch, loader, max_time=...), not of the constructor": "max_time",
        "run(n_epoch, loader, max_steps=...), not of the constructor": "max_steps",
        "run(None, loader, max_steps=...)": "max_num_steps",
        "run(n_epoch, loader, max_steps=...)": "max_num_data_epochs",
        "run(..., valid_every=Every(steps=...) or Every(epochs=...))": "eval_steps eval_strategy evaluation_strategy "
        "val_check_interval check_val_every_n_epoch validate_every_n_steps eval_interval",
        "precision='bf16', 'fp16' or 'fp32' (AMPAddon)": "amp autocast mixed_precision fp16_opt_level",
        "precision='fp16' (AMPAddon)": "fp16",
        "precision='bf16' (AMPAddon)": "bf16",
        "loss_scale=(initial, smallest) (AMPAddon)": "fp16_loss_scale",
        "save_every=Every(steps=...) or Every(epochs=...) (StateManagerAddon)": "save_steps save_strategy "
        "save_interval checkpoint_every_n_steps",
        "save_path (StateManagerAddon)": "output_dir save_dir save_folder default_root_dir",
        "keep_last (StateManagerAddon)": "save_total_limit keep_last_n_checkpoints",
        "keep_best (StateManagerAddon)": "keep_best_n_checkpoints save_top_k",
        "resume='auto', True or a path (StateManagerAddon)": "resume_from_checkpoint ckpt_path",
        "trainer.restore_best() after run (StateManagerAddon)": "load_best_model_at_end",
        "monitor": "metric_for_best_model optimization_metric",
        "monitor_mode='max' or 'min'": "greater_is_better",
        "monitor_mode='min' or 'max'": "lower_better",
        "patience (EarlyStoppingAddon)": "early_stopping_patience",
        "delta (EarlyStoppingAddon)": "min_delta",
        "log_every=Every(steps=...) or Every(epochs=...)": "logging_steps logging_strategy log_every_n_steps "
        "publish_metrics_every_n_steps",
        "log_bar": "enable_progress_bar progress_bar",
        "log_bar=False": "disable_tqdm",
        "log_dir (TensorBoardLoggerAddon)": "logging_dir tb_dir",
        "jsonl_path (JSONLLoggerAddon)": "metrics_dir",
        "a logger add-on, for instance JSONLLoggerAddon": "logger",
        "a logger add-on, for instance WandBLoggerAddon": "report_to",
        "device": "accelerator",
        "device, one or a list (a list needs MultiGPUAddon)": "devices gpus",
        "an add-on, for instance MultiGPUAddon": "strategy",
        "add-ons: Task.add_on(...)": "callbacks",
        "scheduler": "lr_scheduler lr_schedulers",
        "scheduler=lambda optimizer: ...": "lr_scheduler_factory",
        "optimizer, one or a list or a dict of several, and scheduler": "optimizers",
        "optimizer=lambda parameters: ...": "optimizer_factory",
        "the optimizer's own lr": "learning_rate lr",
        "the optimizer's own weight_decay": "weight_decay",
        "the DataLoader's own batch_size": "batch_size",
        "decay (EMAAddon)": "ema_decay",
        "keyword arguments, one for each option": "args",
        "model, which may be a function that returns one": "model_init",
    }
)
"""Option names of other trainers, and what to write here."""

FOREIGN_ARGUMENTS = _by_name(
    {
        "n_epoch": "epochs max_epochs num_epochs n_epochs num_train_epochs nb_epochs nb_epoch max_epoch epoch",
        "loader": "train_loader train_dataloader train_dataloaders dataloader data_loader train_data data",
        "valid_loader": "val_loader val_dataloader val_dataloaders valid_dataloader validation_loader validation_data "
        "eval_loader eval_dataloader val_data valid_data test_loader test_dataloader",
        "max_steps": "steps num_steps total_steps max_num_steps max_iters",
        "valid_every": "val_every eval_every validate_every val_check_interval eval_interval",
        "max_time": "time_limit max_seconds timeout",
        "steps_per_epoch": "epoch_length",
    }
)
"""Names of other trainers for the arguments of ``run``."""

FOREIGN_HOOKS = _by_name(
    {
        "train_step(batch)": "training_step",
        "test_step(batch)": "validation_step valid_step val_step eval_step",
        "train_step(batch), which returns {'loss': ...}": "compute_loss training_loss",
        "the constructor's optimizer and scheduler": "configure_optimizers",
        "on_run_begin()": "on_train_start on_train_begin on_fit_start",
        "on_run_end()": "on_train_end",
        "on_epoch_begin()": "on_train_epoch_start on_epoch_start",
        "on_epoch_end()": "on_train_epoch_end",
        "on_validation_begin()": "on_validation_start",
        "on_validation_end(metrics)": "on_evaluate",
        "metric_on_epoch_end()": "on_validation_epoch_end validation_epoch_end training_epoch_end",
        "zero_grad()": "optimizer_zero_grad",
        "clip()": "configure_gradient_clipping",
        "state_dict()": "on_save_checkpoint",
        "load_state_dict(state)": "on_load_checkpoint",
    }
)
"""Hook names of other trainers, and the seam to override here."""

FOREIGN_METHODS = _by_name(
    {
        "run(n_epoch, loader, valid_loader)": "fit train",
        "run_epoch(loader)": "train_epoch",
        "evaluate(loader)": "test eval",
        "predict([batch])": "predict_batch",
        "save_model(path) for the weights, or StateManagerAddon for the whole state": "save",
        "apply_weights(path) for the weights, or StateManagerAddon for the whole state": "load",
        "save_state() (StateManagerAddon)": "save_checkpoint",
        "load_state(path) (StateManagerAddon)": "load_checkpoint",
        "apply_weights(path)": "load_from_checkpoint",
        "unwrap().save_pretrained(path)": "save_pretrained",
        "log(metrics, step)": "log_dict log_metrics",
        "what train_step returns as 'loss', which is differentiated for you": "manual_backward",
        "progress_checker.step": "global_step step",
        "progress_checker.epoch": "current_epoch epoch",
        "metrics": "callback_metrics",
        "scheduler": "lr_scheduler",
    }
)
"""Attributes of other trainers, and what to write here."""

METHODS_OF_ADD_ONS = _by_name(
    {
        "EMAAddon": "save_average",
        "StateManagerAddon": "save_state load_state restore_best last_path best_path",
    }
)
"""What a trainer has with an add-on only."""

ABSENT_NAMES = FOREIGN_METHODS.keys() | METHODS_OF_ADD_ONS.keys()


def foreign_argument(name: str) -> str:
    """Return the argument of ``run`` for the name of another trainer; empty if the name is unknown."""
    return FOREIGN_ARGUMENTS.get(name, "")


def foreign_option(name: str) -> str:
    """Explain the option of another trainer; empty if the name is unknown."""
    return f"here it is {FOREIGN_OPTIONS[name]}" if name in FOREIGN_OPTIONS else ""


def foreign_method(name: str) -> str:
    """Explain the method or attribute of another trainer, or of an add-on that is not there."""
    owner = METHODS_OF_ADD_ONS.get(name)
    return (
        f": it belongs to {owner}; add it with .add_on({owner})" if owner else f"; here it is {FOREIGN_METHODS[name]}"
    )


def foreign_hook(name: str) -> str:
    """Explain a hook of another trainer, which may be misspelt; empty if it is unknown."""
    near = difflib.get_close_matches(name, FOREIGN_HOOKS, n=1, cutoff=0.9)
    if not near:
        return ""
    meant = "here it is" if near[0] == name else f"did you mean {near[0]!r}? Here that is"
    return f"{meant} {FOREIGN_HOOKS[near[0]]}"
