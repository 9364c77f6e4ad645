"""Names of other trainers, and what they are called here; read only for the text of an error."""

from __future__ import annotations

import difflib

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

_ACCUMULATION = "gradient_accumulation_steps (GradientAccumulationAddon)"
_SAVE = "save_every=Every(steps=...) or Every(epochs=...) (StateManagerAddon)"
_LOG = "log_every=Every(steps=...) or Every(epochs=...)"
_VALID = "run(..., valid_every=Every(steps=...) or Every(epochs=...))"
_PRECISION = "precision='bf16', 'fp16' or 'fp32' (AMPAddon)"

FOREIGN_OPTIONS: dict[str, tuple[str, str]] = {
    # name: (where it comes from, what it is called here)
    "accumulate_grad_batches": ("Lightning", _ACCUMULATION),
    "gradient_accumulation": ("a common name", _ACCUMULATION),
    "accumulation_steps": ("a common name", _ACCUMULATION),
    "grad_accum": ("Composer", _ACCUMULATION),
    "gradient_clip_val": ("Lightning", "gradient_clip (the largest norm)"),
    "max_grad_norm": ("Transformers", "gradient_clip (the largest norm)"),
    "max_gradient_norm": ("fairseq2", "gradient_clip (the largest norm)"),
    "clip_grad_norm": ("a common name", "gradient_clip (the largest norm)"),
    "track_grad_norm": ("Lightning", "gradient_clip=math.inf, which logs the gradient norm and does not clip"),
    "max_epochs": ("Lightning", "run(n_epoch, loader)"),
    "num_train_epochs": ("Transformers", "run(n_epoch, loader)"),
    "epochs": ("a common name", "run(n_epoch, loader)"),
    "num_epochs": ("a common name", "run(n_epoch, loader)"),
    "n_epochs": ("a common name", "run(n_epoch, loader)"),
    "n_epoch": ("zae", "the first argument of run(n_epoch, loader), not of the constructor"),
    "max_duration": ("Composer", "run(n_epoch, loader), or run(None, loader, max_steps=...)"),
    "limit_train_batches": ("Lightning", "run(n_epoch, loader, limit_batches=(..., None))"),
    "limit_val_batches": ("Lightning", "run(n_epoch, loader, valid_loader, limit_batches=(None, ...))"),
    "fast_dev_run": ("Lightning", "run(n_epoch, loader, valid_loader, rehearse=True)"),
    "overfit_batches": ("zae", "run(n_epoch, loader, overfit_batches=...), not of the constructor"),
    "max_time": ("zae", "run(n_epoch, loader, max_time=...), not of the constructor"),
    "max_num_steps": ("fairseq2", "run(None, loader, max_steps=...)"),
    "max_steps": ("zae", "run(n_epoch, loader, max_steps=...), not of the constructor"),
    "max_num_data_epochs": ("fairseq2", "run(n_epoch, loader, max_steps=...)"),
    "fp16": ("Transformers", "precision='fp16' (AMPAddon)"),
    "bf16": ("Transformers", "precision='bf16' (AMPAddon)"),
    "amp": ("fairseq2", _PRECISION),
    "autocast": ("OmniGenBench", _PRECISION),
    "mixed_precision": ("Accelerate", _PRECISION),
    "fp16_opt_level": ("Apex", _PRECISION),
    "fp16_loss_scale": ("fairseq2", "loss_scale=(initial, smallest) (AMPAddon)"),
    "save_total_limit": ("Transformers", "keep_last (StateManagerAddon)"),
    "keep_last_n_checkpoints": ("fairseq2", "keep_last (StateManagerAddon)"),
    "keep_best_n_checkpoints": ("fairseq2", "keep_best (StateManagerAddon)"),
    "save_top_k": ("Lightning", "keep_best (StateManagerAddon)"),
    "save_steps": ("Transformers", _SAVE),
    "save_strategy": ("Transformers", _SAVE),
    "save_interval": ("Composer", _SAVE),
    "checkpoint_every_n_steps": ("fairseq2", _SAVE),
    "output_dir": ("Transformers", "save_path (StateManagerAddon)"),
    "save_dir": ("OmniGenBench", "save_path (StateManagerAddon)"),
    "save_folder": ("Composer", "save_path (StateManagerAddon)"),
    "default_root_dir": ("Lightning", "save_path (StateManagerAddon)"),
    "resume_from_checkpoint": ("Transformers", "resume='auto', True or a path (StateManagerAddon)"),
    "ckpt_path": ("Lightning", "resume='auto', True or a path (StateManagerAddon)"),
    "load_best_model_at_end": ("Transformers", "trainer.restore_best() after run (StateManagerAddon)"),
    "metric_for_best_model": ("Transformers", "monitor"),
    "greater_is_better": ("Transformers", "monitor_mode='max' or 'min'"),
    "lower_better": ("fairseq2", "monitor_mode='min' or 'max'"),
    "optimization_metric": ("OmniGenBench", "monitor"),
    "early_stopping_patience": ("Transformers", "patience (EarlyStoppingAddon)"),
    "min_delta": ("Lightning", "delta (EarlyStoppingAddon)"),
    "logging_steps": ("Transformers", _LOG),
    "logging_strategy": ("Transformers", _LOG),
    "log_every_n_steps": ("Lightning", _LOG),
    "publish_metrics_every_n_steps": ("fairseq2", _LOG),
    "eval_steps": ("Transformers", _VALID),
    "eval_strategy": ("Transformers", _VALID),
    "evaluation_strategy": ("Transformers", _VALID),
    "val_check_interval": ("Lightning", _VALID),
    "check_val_every_n_epoch": ("Lightning", _VALID),
    "validate_every_n_steps": ("fairseq2", _VALID),
    "eval_interval": ("Composer", _VALID),
    "enable_progress_bar": ("Lightning", "log_bar"),
    "progress_bar": ("Composer", "log_bar"),
    "disable_tqdm": ("Transformers", "log_bar=False"),
    "logging_dir": ("Transformers", "log_dir (TensorBoardLoggerAddon)"),
    "tb_dir": ("fairseq2", "log_dir (TensorBoardLoggerAddon)"),
    "metrics_dir": ("fairseq2", "jsonl_path (JSONLLoggerAddon)"),
    "logger": ("Lightning", "a logger add-on, for instance JSONLLoggerAddon"),
    "report_to": ("Transformers", "a logger add-on, for instance WandBLoggerAddon"),
    "accelerator": ("Lightning", "device"),
    "devices": ("Lightning", "device, one or a list (a list needs MultiGPUAddon)"),
    "gpus": ("Lightning", "device, one or a list (a list needs MultiGPUAddon)"),
    "strategy": ("Lightning", "an add-on, for instance MultiGPUAddon"),
    "callbacks": ("Lightning", "add-ons: Task.add_on(...)"),
    "lr_scheduler": ("Transformers", "scheduler"),
    "lr_schedulers": ("Composer", "scheduler"),
    "optimizers": ("Transformers", "optimizer, one or a list or a dict of several, and scheduler"),
    "optimizer_factory": ("Forgather", "optimizer=lambda parameters: ..."),
    "lr_scheduler_factory": ("Forgather", "scheduler=lambda optimizer: ..."),
    "learning_rate": ("Transformers", "the optimizer's own lr"),
    "lr": ("a common name", "the optimizer's own lr"),
    "weight_decay": ("Transformers", "the optimizer's own weight_decay"),
    "batch_size": ("a common name", "the DataLoader's own batch_size"),
    "ema_decay": ("a common name", "decay (EMAAddon)"),
    "train_dataset": ("Transformers", "run(n_epoch, loader), with a loader over that dataset"),
    "eval_dataset": ("Transformers", "run(n_epoch, loader, valid_loader)"),
    "train_dataloader": ("Composer", "run(n_epoch, loader)"),
    "train_dataloaders": ("Lightning", "run(n_epoch, loader)"),
    "eval_dataloader": ("Composer", "run(n_epoch, loader, valid_loader)"),
    "val_dataloaders": ("Lightning", "run(n_epoch, loader, valid_loader)"),
    "args": ("Transformers", "keyword arguments, one for each option"),
    "model_init": ("Transformers", "model, which may be a function that returns one"),
}
"""Option names of other trainers, their origin, and what to write here."""

FOREIGN_ARGUMENTS = {
    "n_epoch": "epochs max_epochs num_epochs n_epochs num_train_epochs nb_epochs nb_epoch max_epoch epoch",
    "loader": "train_loader train_dataloader train_dataloaders dataloader data_loader train_data data",
    "valid_loader": "val_loader val_dataloader val_dataloaders valid_dataloader validation_loader validation_data "
    "eval_loader eval_dataloader val_data valid_data test_loader test_dataloader",
    "max_steps": "steps num_steps total_steps max_num_steps max_iters",
    "valid_every": "val_every eval_every validate_every val_check_interval eval_interval",
    "max_time": "time_limit max_seconds timeout",
    "steps_per_epoch": "epoch_length",
}
"""Names of other trainers for each argument of ``run``."""

FOREIGN_HOOKS: dict[str, tuple[str, str]] = {
    "training_step": ("Lightning", "train_step(batch)"),
    "validation_step": ("Lightning", "test_step(batch)"),
    "valid_step": ("a common name", "test_step(batch)"),
    "val_step": ("a common name", "test_step(batch)"),
    "eval_step": ("a common name", "test_step(batch)"),
    "configure_optimizers": ("Lightning", "the constructor's optimizer and scheduler"),
    "on_train_start": ("Lightning", "on_run_begin()"),
    "on_train_begin": ("Transformers", "on_run_begin()"),
    "on_train_end": ("Lightning", "on_run_end()"),
    "on_fit_start": ("Lightning", "on_run_begin()"),
    "on_train_epoch_start": ("Lightning", "on_epoch_begin()"),
    "on_train_epoch_end": ("Lightning", "on_epoch_end()"),
    "on_epoch_start": ("a common name", "on_epoch_begin()"),
    "on_validation_epoch_end": ("Lightning", "metric_on_epoch_end()"),
    "on_validation_start": ("Lightning", "on_validation_begin()"),
    "on_evaluate": ("Transformers", "on_validation_end(metrics)"),
    "validation_epoch_end": ("Lightning", "metric_on_epoch_end()"),
    "training_epoch_end": ("Lightning", "metric_on_epoch_end()"),
    "optimizer_zero_grad": ("Lightning", "zero_grad()"),
    "configure_gradient_clipping": ("Lightning", "clip()"),
    "on_save_checkpoint": ("Lightning", "state_dict()"),
    "on_load_checkpoint": ("Lightning", "load_state_dict(state)"),
    "compute_loss": ("Transformers", "train_step(batch), which returns {'loss': ...}"),
    "training_loss": ("a common name", "train_step(batch), which returns {'loss': ...}"),
}
"""Hook names of other trainers, their origin, and the seam to override here."""

FOREIGN_METHODS: dict[str, tuple[str, str]] = {
    "fit": ("Lightning", "run(n_epoch, loader, valid_loader)"),
    "train": ("Transformers", "run(n_epoch, loader, valid_loader)"),
    "train_epoch": ("a common name", "run_epoch(loader)"),
    "test": ("Lightning", "evaluate(loader)"),
    "eval": ("Composer", "evaluate(loader)"),
    "predict_batch": ("a common name", "predict([batch])"),
    "save": ("a common name", "save_model(path) for the weights, or StateManagerAddon for the whole state"),
    "load": ("a common name", "apply_weights(path) for the weights, or StateManagerAddon for the whole state"),
    "save_checkpoint": ("Lightning", "save_state() (StateManagerAddon)"),
    "load_checkpoint": ("a common name", "load_state(path) (StateManagerAddon)"),
    "load_from_checkpoint": ("Lightning", "apply_weights(path)"),
    "save_pretrained": ("Transformers", "unwrap().save_pretrained(path)"),
    "log_dict": ("Lightning", "log(metrics, step)"),
    "log_metrics": ("Transformers", "log(metrics, step)"),
    "manual_backward": ("Lightning", "what train_step returns as 'loss', which is differentiated for you"),
    "global_step": ("Lightning", "progress_checker.step"),
    "current_epoch": ("Lightning", "progress_checker.epoch"),
    "epoch": ("a common name", "progress_checker.epoch"),
    "step": ("a common name", "progress_checker.step"),
    "callback_metrics": ("Lightning", "metrics"),
    "lr_scheduler": ("Transformers", "scheduler"),
}
"""Attributes of other trainers, their origin, and what to write here."""

METHODS_OF_ADD_ONS = {
    "save_average": "EMAAddon",
    "save_state": "StateManagerAddon",
    "load_state": "StateManagerAddon",
    "restore_best": "StateManagerAddon",
    "last_path": "StateManagerAddon",
    "best_path": "StateManagerAddon",
}
"""What a trainer has with an add-on only."""

ABSENT_NAMES = FOREIGN_METHODS.keys() | METHODS_OF_ADD_ONS.keys()


def foreign_argument(name: str) -> str:
    """Return the argument of ``run`` for the name of another trainer; empty if the name is unknown."""
    return next((here for here, names in FOREIGN_ARGUMENTS.items() if name in names.split()), "")


def foreign_option(name: str) -> str:
    """Explain the option of another trainer; empty if the name is unknown."""
    return _explain(FOREIGN_OPTIONS, name)


def foreign_method(name: str) -> str:
    """Explain the method or attribute of another trainer, or of an add-on that is not there."""
    owner = METHODS_OF_ADD_ONS.get(name)
    return f": it belongs to {owner}; add it with .add_on({owner})" if owner else f"; {_explain(FOREIGN_METHODS, name)}"


def _explain(table: dict[str, tuple[str, str]], name: str) -> str:
    if name not in table:
        return ""
    origin, here = table[name]
    return f"it is {here}" if origin == "zae" else f"it is {_owner(origin)} for {here}"


def foreign_hook(name: str) -> str:
    """Explain a hook of another trainer, which may be misspelt; empty if it is unknown."""
    near = difflib.get_close_matches(name, FOREIGN_HOOKS, n=1, cutoff=0.9)
    if not near:
        return ""
    origin, here = FOREIGN_HOOKS[near[0]]
    spelt = "it" if near[0] == name else f"did you mean {near[0]!r}? That"
    return f"{spelt} is {_owner(origin)} for {here}"


def _owner(origin: str) -> str:
    if origin.startswith("a "):
        return origin
    return f"{origin}' name" if origin.endswith("s") else f"{origin}'s name"
