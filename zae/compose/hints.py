"""What users of other trainers write, and what to write here: one table, which errors import when they are raised.

It has the names that scripts of these trainers use every day: of options, arguments, attributes and methods. Any other
unknown name gets the list of what there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zae.errors import MissingError

__all__ = ["HINTS", "HOOKS", "hint", "missing_attribute"]


def _by_name(names_by_remedy: Mapping[str, str]) -> dict[str, str]:
    """Map each name to what to write here, from a table of the opposite direction."""
    return {name: remedy for remedy, names in names_by_remedy.items() for name in names.split()}


HOOKS = _by_name(
    {
        # Steps.
        "train_step(batch)": "training_step",
        "test_step(batch)": "validation_step",
        "train_step(batch), which returns {'loss': ...}, or a method of a class that derives from "
        "Trainer.add_on(HuggingFaceAddon)": "compute_loss",
        "test_step(batch), which is called for each batch": "on_validation_batch_start on_validation_batch_end "
        "on_test_batch_start on_test_batch_end on_prediction_step",
        "run_epoch(loader), or train_step(batch) for what is done with one batch": "_train_epoch _inner_training_loop",
        "run_batch(batch), or train_step(batch) for its loss": "_run_step",
        "run(n_epoch, loader)": "_do_run",
        # Optimizers and schedulers.
        "the constructor's optimizer and scheduler": "configure_optimizers create_optimizer_and_scheduler",
        "backward(loss)": "on_before_backward on_after_backward",
        "zero_grad()": "optimizer_zero_grad on_before_zero_grad",
        "clip()": "configure_gradient_clipping on_before_optimizer_step on_pre_optimizer_step",
        "optimizer_step()": "on_optimizer_step",
        "scheduler_step(when)": "lr_scheduler_step",
        "micro_step(batch, count)": "on_substep_end",
        # Events.
        "on_run_begin()": "on_train_start on_train_begin on_fit_start on_init_end",
        "on_run_end()": "on_train_end on_fit_end",
        "on_epoch_begin()": "on_train_epoch_start on_epoch_start",
        "on_epoch_end()": "on_train_epoch_end",
        "on_step_begin(batch)": "on_train_batch_start on_batch_start on_batch_begin",
        "on_step_end(outputs)": "on_train_batch_end on_batch_end",
        "on_validation_begin()": "on_validation_start on_validation_epoch_start on_sanity_check_start",
        "on_validation_end(metrics)": "on_evaluate on_sanity_check_end",
        "log(metrics, step)": "on_log",
        "code before and after evaluate(loader)": "on_test_start on_test_end on_test_epoch_start on_test_epoch_end",
        "code before and after predict(loader)": "on_predict_start on_predict_end on_predict",
        "metric_on_epoch_end()": "on_validation_epoch_end validation_epoch_end training_epoch_end test_epoch_end",
        "add-ons: Task.add_on(...)": "configure_callbacks",
        # Data.
        "loader of run(n_epoch, loader)": "_get_train_sampler",
        "to_device(batch)": "transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer _prepare_batch "
        "_prepare_inputs",
        "batches(loader), or micro_batches(batch) for one accumulation window": "_next_batches",
        # Model, set-up and state.
        "the constructor's model, or a function that returns it": "configure_sharded_model",
        "setup(), with super().setup() first": "_setup_training_components",
        "wrap_model(model)": "_wrap_model",
        "state_dict()": "on_save_checkpoint",
        "load_state_dict(state)": "on_load_checkpoint",
        "should_stop, a property": "_should_run_step",
        "should_validate(is_due)": "_should_validate",
        "should_checkpoint(is_due) (StateManagerAddon)": "_should_checkpoint",
        "checkpoint(), which calls super().checkpoint() when it may save": "_save_checkpoint _maybe_log_save_evaluate",
        "resume='auto' (StateManagerAddon), which verifies each checkpoint and takes the newest valid one": ""
        "_resolve_checkpoint_path _find_latest_checkpoint _validate_checkpoint",
    }
)
"""Methods that other trainers call by themselves, and zae does not: a class that defines one is warned."""

HINTS = HOOKS | _by_name(
    {
        # The model and what computes its loss.
        "model, which may be a function that returns one": "model_init",
        "train_step(batch), which computes the loss": "label_smoothing_factor label_smoothing label_names",
        "task_of(unit)(unit, ...), or from_arguments(unit=unit, ...), of zae.addons.fairseq2": "unit",
        "an option of from_arguments(unit=unit, ...) of zae.addons.fairseq2": "valid_units",
        "metric_on_epoch_end()": "batch_eval_metrics include_for_metrics",
        "metric_on_epoch_end(), or the option of HuggingFaceAddon": "compute_metrics",
        "dtype='bf16' (AMPAddon)": "dtype torch_dtype",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), before the trainer is made": "sync_batchnorm",
        "GradientCheckpointingAddon": "gradient_checkpointing gradient_checkpointing_kwargs checkpoint_sequential "
        "activation_checkpointing",
        "CompileAddon": "torch_compile dynamo_backend compile",
        "compile_mode (CompileAddon)": "torch_compile_mode",
        "compile_backend (CompileAddon)": "torch_compile_backend",
        # Loaders.
        "run(n_epoch, loader), with a loader over that dataset": "train_dataset task_datasets",
        "valid_loader of run(n_epoch, loader, valid_loader)": "eval_dataset eval_dataloader val_dataloaders "
        "val_dataloader valid_dataloader valid_data_readers get_eval_dataloader val_loader validation_loader "
        "validation_data eval_loader val_data valid_data test_loader valid val validation",
        "n_epoch of run(n_epoch, loader)": "max_epochs num_train_epochs epochs num_epochs n_epochs nb_epochs max_epoch",
        "loader of run(n_epoch, loader)": "train_dataloader train_dataloaders data_reader train_loader dataloader "
        "data_loader train_data get_train_dataloader",
        "run(n_epoch, loader), which trains": "do_train",
        "a DataLoader with its own batch_size": "batch_size train_batch_size "
        "per_device_train_batch_size per_device_eval_batch_size",
        "a DataLoader with its own num_workers": "num_workers dataloader_num_workers",
        "a DataLoader with its own pin_memory": "pin_memory dataloader_pin_memory",
        "a DataLoader with its own drop_last": "drop_last dataloader_drop_last",
        "a DataLoader with its own prefetch_factor": "prefetch_factor dataloader_prefetch_factor",
        "a DataLoader with its own persistent_workers": "persistent_workers dataloader_persistent_workers",
        "a DataLoader with its own collate_fn": "data_collator collate_fn processing_class tokenizer",
        "a DataLoader with its own shuffle": "shuffle",
        "a DataLoader with its own generator": "data_seed",
        "a DataLoader with its own sampler": "train_sampling_strategy group_by_length length_column_name",
        "train_step(batch), which weighs the losses of its tasks": "task_weights",
        "train_step(batch), which gets every column": "remove_unused_columns",
        "evaluate(loader) or predict(loader)": "limit_test_batches limit_predict_batches do_eval do_predict",
        # How long a run is, and what it does when.
        "the first argument of run(n_epoch, loader)": "n_epoch",
        "run(1, loader, valid_loader, limit_batches=1)": "fast_dev_run",
        "run(n_epoch, loader, limit_batches=(..., None))": "limit_train_batches",
        "run(n_epoch, loader, valid_loader, limit_batches=(None, ...))": "limit_val_batches",
        "overfit_batches of run(n_epoch, loader)": "overfit_batches",
        "max_time of run(n_epoch, loader)": "max_time time_limit max_seconds",
        "max_steps of run(n_epoch, loader)": "max_steps max_num_steps num_steps steps total_steps max_iters",
        "steps_per_epoch of run(n_epoch, loader)": "epoch_length",
        "run(n_epoch, loader, max_steps=...)": "max_num_data_epochs",
        "valid_every of run(n_epoch, loader, valid_loader), Every(steps=...) or Every(epochs=...)": "eval_steps "
        "eval_strategy evaluation_strategy val_check_interval check_val_every_n_epoch validate_every_n_steps "
        "eval_interval val_every eval_every validate_every valid_every val_interval",
        "run(..., valid_every=Every(epochs=1, after=...))": "eval_delay",
        "evaluate(loader) before run(n_epoch, loader)": "eval_on_start num_sanity_val_steps",
        # Precision.
        "precision='bf16', 'fp16' or 'fp32' (AMPAddon); forward_context() is the context of a step": "amp use_amp "
        "autocast mixed_precision fp16_opt_level half_precision",
        "precision='fp16' (AMPAddon)": "fp16 fp16_full_eval",
        "precision='bf16' (AMPAddon)": "bf16 bf16_full_eval",
        "loss_scale=(initial, smallest) (AMPAddon)": "fp16_loss_scale",
        "torch.set_float32_matmul_precision('high')": "tf32",
        # Optimizer and scheduler.
        "gradient_accumulation_steps (GradientAccumulationAddon)": "accumulate_grad_batches gradient_accumulation "
        "accumulation_steps grad_accum accumulate grad_accum_steps",
        "gradient_clip (the largest norm)": "gradient_clip_val max_grad_norm max_gradient_norm clip_grad_norm "
        "clip_grad grad_clip",
        "clip(), a method to override": "gradient_clip_algorithm",
        "scheduler": "lr_scheduler lr_schedulers",
        "scheduler=lambda optimizer: ..., with scheduler_step_on_batch=True": "lr_scheduler_factory",
        "scheduler, for instance zae.schedulers.cosine(warmup=0.05)": "lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps warmup_ratio warmup",
        "scheduler_step_on_batch": "step_scheduler_with_optimizer",
        "optimizer, one or a list or a dict of several, and scheduler": "optimizers",
        "optimizer, a function of the parameters, or of named_parameters": "optimizer_factory",
        "optimizer=lambda parameters: AdamW(parameters, lr=...)": "optimizer_cls_and_kwargs learning_rate lr",
        "optimizer=lambda parameters: AdamW(parameters, lr=...), with all of its arguments": "optim_args",
        "optimizer, for instance torch.optim.AdamW or a function of the parameters": "optim optim_target_modules",
        "the optimizer's own weight_decay": "weight_decay",
        "the optimizer's own betas": "adam_beta1 adam_beta2",
        "the optimizer's own eps": "adam_epsilon",
        # Checkpoints.
        "save_every=Every(steps=...) or Every(epochs=...) (StateManagerAddon)": "save_steps save_strategy "
        "save_interval checkpoint_every_n_steps checkpoint_every save_freq",
        "save_path (StateManagerAddon)": "output_dir save_dir save_folder default_root_dir project_dir "
        "checkpoint_dir checkpoint_path ckpt_dir",
        "keep_last (StateManagerAddon)": "save_total_limit keep_last_n_checkpoints",
        "keep_best (StateManagerAddon)": "keep_best_n_checkpoints save_top_k save_best save_best_only",
        "StateManagerAddon": "enable_checkpointing checkpoint_manager save_optimizer_state save_scheduler_state "
        "checkpointing",
        "resume='auto', True or a path (StateManagerAddon)": "resume_from_checkpoint ckpt_path",
        "trainer.restore_best() after run (StateManagerAddon)": "load_best_model_at_end",
        "save_weights_every (StateManagerAddon), or save_model(path) for one file": "save_only_model",
        "start_from=path, with the parts in start_with (StateManagerAddon)": "restore_optimizer_state "
        "restore_scheduler_state",
        "EMAAddon": "ema use_ema",
        "decay (EMAAddon)": "ema_decay",
        # The best epoch.
        "monitor": "metric_for_best_model optimization_metric score_metric_descriptor",
        "monitor_mode='max' or 'min'": "greater_is_better",
        "monitor_mode='min' or 'max'": "lower_better",
        "patience (EarlyStoppingAddon)": "early_stopping_patience early_stopping",
        # Logs.
        "log_every=Every(steps=...) or Every(epochs=...)": "logging_steps logging_strategy log_every_n_steps "
        "publish_metrics_every_n_steps log_interval",
        "log_bar": "enable_progress_bar progress_bar verbose",
        "log_bar='lines'": "disable_tqdm",
        "log_dir (TensorBoardLoggerAddon)": "logging_dir tb_dir log_dir tensorboard",
        "jsonl_path (JSONLLoggerAddon)": "metrics_dir",
        "a logger add-on, for instance JSONLLoggerAddon": "logger loggers init_trackers end_training",
        "a logger add-on, for instance WandBLoggerAddon": "report_to log_with",
        "web_logger={'wandb': {...}} (WandBLoggerAddon)": "run_name project wandb_project wandb",
        "print(model), or torchinfo.summary(model)": "enable_model_summary",
        "on_nonfinite": "logging_nan_inf_filter",
        # Devices and processes.
        "device; or accelerator (AccelerateAddon), an object of Hugging Face Accelerate": "accelerator",
        "accelerator_args (AccelerateAddon)": "accelerator_args kwargs_handlers accelerator_config",
        "device='cpu'": "use_cpu cpu no_cuda",
        "device, one or a list (a list needs MultiGPUAddon)": "devices gpus n_gpus num_gpus",
        "device; the model and the batches are moved there": "device_placement",
        "an add-on, for instance MultiGPUAddon": "strategy use_distributed_sampler split_batches",
        "device, a list with one entry for each rank, or torchrun, which says who the ranks are": "distributed_env",
        "MultiGPUAddon, and torchrun on each machine": "num_nodes local_rank",
        "find_unused_parameters (MultiGPUAddon)": "ddp_find_unused_parameters",
        "backend (MultiGPUAddon)": "ddp_backend",
        "timeout (MultiGPUAddon)": "ddp_timeout",
        "FSDPAddon": "fsdp fsdp_config fsdp_plugin",
        "deepspeed_config (DeepSpeedAddon)": "deepspeed deepspeed_plugin ds_config",
        "mesh (FSDPAddon, TensorParallelAddon)": "root_gang dp_gang gangs device_mesh",
        "tensor_plan (TensorParallelAddon)": "tp_gang",
        "split (PipelineAddon)": "split_spec",
        "pipeline_microbatches (PipelineAddon)": "pipeline_chunks",
        "pipeline_schedule (PipelineAddon)": "schedule_class pipe_schedule_factory",
        "mesh={'pipeline': ...} (PipelineAddon)": "pipeline_parallel_size",
        "zae.find_batch_size(...)": "auto_find_batch_size",
        # Reproducibility and debugging.
        "seed": "seed_everything random_seed manual_seed",
        "seed, and torch.use_deterministic_algorithms(True)": "deterministic full_determinism",
        "torch.backends.cudnn.benchmark = True": "benchmark",
        "AnomalyAddon": "detect_anomaly anomaly_detection",
        "ProfilerAddon(profile_dir=...)": "profiler",
        # Extensions.
        "add-ons: Task.add_on(...)": "plugins",
        "an option of Trainer.add_on(HuggingFaceAddon)(model, args=...), or from_arguments(args).trainer(Task, model) "
        "of zae.addons.huggingface.transformers": "args training_args",
        # Calls.
        "run(n_epoch, loader, valid_loader)": "fit",
        "run(n_epoch, loader, valid_loader), or train() of HuggingFaceAddon": "train",
        "evaluate(loader)": "test eval",
        "stop(reason)": "set_trigger",
        "the model itself: self.model(inputs)": "forward",
        "the loop itself: train_step, test_step and loaders are all that it needs": "prepare prepare_model "
        "lightning_module trainer fabric",
        # Weights and checkpoints.
        "save_model(path) for the weights, or StateManagerAddon for the whole state": "save",
        "apply_weights(path) for the weights, or StateManagerAddon for the whole state": "load",
        "save_state() (StateManagerAddon)": "save_checkpoint",
        "load_state(path) (StateManagerAddon)": "load_checkpoint",
        "apply_weights(path)": "load_from_checkpoint load_model load_weights",
        "unwrap().save_pretrained(path)": "save_pretrained",
        "unwrap()": "unwrap_model unwrapped_model",
        "last_path (StateManagerAddon)": "checkpoint_callback",
        "state_attributes of an add-on, or state_dict()": "register_for_checkpointing",
        "is_main": "should_save is_main_process is_global_zero is_world_process_zero is_local_process_zero "
        "is_local_main_process on_main_process main_process_first should_log",
        # Progress and metrics.
        "log(metrics, step)": "log_dict",
        "print() where is_main is true": "print",
        "progress_checker.step": "global_step step set_step_nr",
        "progress_checker.epoch": "current_epoch epoch",
        "progress_checker": "state control",
        "metrics": "callback_metrics logged_metrics progress_bar_metrics",
        "metrics['stop_reason']": "interrupted",
        "mode": "training evaluating testing validating predicting sanity_checking",
        "scheduler=lambda optimizer, total_steps: ...": "estimated_stepping_batches",
        "steps_per_epoch(loader)": "num_training_batches is_last_batch",
        "the length of the loader": "num_val_batches num_test_batches",
        "the loader's own batch_size": "valid_batch_size",
        # Gradients, optimizers and schedulers.
        "what train_step returns as 'loss', which is differentiated for you": "manual_backward",
        "clip()": "clip_gradients clip_grad_norm_ clip_grad_value_",
        "gradient_accumulation_steps (GradientAccumulationAddon), by GradientAccumulationAddon": "sync_gradients "
        "gradient_accumulation_steps",
        "sync_context(is_last)": "no_sync",
        "a dict of optimizers, and of losses by the same names": "toggle_optimizer untoggle_optimizer",
        "unwrap().requires_grad_(False)": "freeze",
        "unwrap().requires_grad_(True)": "unfreeze",
        # Devices and processes.
        "device": "cuda to",
        "dtype='bf16' (AMPAddon), or model.to(dtype), before the trainer is made": "float half double type",
        "gather(value)": "all_gather",
        "predict(loader), which gathers the samples of all ranks in their order": "gather_for_metrics",
        "barrier()": "wait_for_everyone",
        "rank": "global_rank process_index",
        "rank of the launcher: os.environ['LOCAL_RANK']": "local_process_index node_rank",
        "world_size": "num_processes num_devices",
        "min_epochs (EarlyStoppingAddon)": "min_epochs",
        "precision (AMPAddon)": "precision scaler amp_dtype",
        "the loader, whose share of each rank is taken for you": "split_between_processes even_batches "
        "dispatch_batches",
        "the loader, whose position is kept and restored": "skip_first_batches",
        # Add-ons.
        "hyperparameters (a logger add-on)": "hparams save_hyperparameters",
        "torch.profiler.profile(), around run": "profile",
        "teardown(), which run calls": "clear free_memory end",
        # Export.
        "torch.onnx.export(trainer.unwrap(), ...)": "to_onnx",
        "torch.jit.script(trainer.unwrap())": "to_torchscript",
        "Trainer.add_on(HuggingFaceAddon), or zae.search.search(objective, ...)": "hyperparameter_search",
        # Methods that they call, and that are natural names of a helper.
        "test_step(batch)": "valid_step val_step eval_step evaluation_step prediction_step "
        "preprocess_logits_for_metrics prediction_loss_only",
        "train_step(batch), which returns {'loss': ...}": "training_loss compute_loss_func loss_fn criterion loss_func "
        "loss_function",
        "the constructor's optimizer": "create_optimizer",
        "the constructor's scheduler": "create_scheduler",
        "code before and after evaluate(loader)": "evaluation_loop",
        "loader of evaluate(loader)": "test_dataloader get_test_dataloader",
        "loader of predict(loader)": "predict_dataloader",
        "code before run(n_epoch, loader)": "prepare_data",
        "batches(loader)": "get_batch_samples",
        "the constructor's model, or a function that returns it": "configure_model",
        # What a trainer has with an add-on only.
        "part of CallbackAddon; add it with .add_on(CallbackAddon)": "add_callback pop_callback remove_callback",
        "part of HuggingFaceAddon; add it with .add_on(HuggingFaceAddon)": "log_metrics model_exists push_to_hub "
        "save_metrics",
        "part of EMAAddon; add it with .add_on(EMAAddon)": "save_average",
        "part of StateManagerAddon; add it with .add_on(StateManagerAddon)": "save_state load_state restore_best "
        "last_path best_path",
    }
)


def hint(name: str) -> str:
    """Say what to write instead of a name of another trainer; empty where it is unknown."""
    return f"here it is {HINTS[name]}" if name in HINTS else ""


def missing_attribute(owner: Any, name: str, is_class: bool = False) -> AttributeError:
    """Return the error for a name that nothing has; Python's own where nothing is known of it."""
    kind = owner if is_class else type(owner)
    if remedy := HINTS.get(name):
        return MissingError(f"{kind.__name__} has no attribute {name!r}; here it is {remedy}")
    description = f"type object {kind.__name__!r}" if is_class else f"{kind.__name__!r} object"
    return AttributeError(f"{description} has no attribute {name!r}", name=name, obj=owner)
