"""Methods that other trainers call by themselves, and what to write here.

Nothing here is refused: a class may define any name, and is warned of these when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HELPERS", "HOOKS", "by_remedy", "foreign_hook"]


def by_remedy(names_by_remedy: Mapping[str, str]) -> dict[str, str]:
    """Map each foreign name to what to write here, from a table of the opposite direction."""
    return {name: here for here, names in names_by_remedy.items() for name in names.split()}


HOOKS = by_remedy(
    {
        # Steps.
        "train_step(batch)": "training_step",
        "test_step(batch)": "validation_step valid_step val_step eval_step evaluation_step prediction_step",
        "train_step(batch), which returns {'loss': ...}": "training_loss",
        "train_step(batch), which returns {'loss': ...}, or a method of a class that derives from "
        "Trainer.add_on(HuggingFaceAddon)": "compute_loss",
        "test_step(batch), which is called for each batch": "on_validation_batch_start on_validation_batch_end "
        "on_test_batch_start on_test_batch_end on_prediction_step",
        "run_epoch(loader), or train_step(batch) for what is done with one batch": "_train_epoch _inner_training_loop",
        "run_batch(batch), or train_step(batch) for its loss": "_run_step",
        "run(n_epoch, loader)": "_do_run",
        # Optimizers and schedulers.
        "the constructor's optimizer and scheduler": "configure_optimizers create_optimizer_and_scheduler",
        "the constructor's optimizer": "create_optimizer",
        "the constructor's scheduler": "create_scheduler",
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
        "code before and after evaluate(loader)": "on_test_start on_test_end on_test_epoch_start on_test_epoch_end "
        "evaluation_loop",
        "code before and after predict(loader)": "on_predict_start on_predict_end on_predict",
        "metric_on_epoch_end()": "on_validation_epoch_end validation_epoch_end training_epoch_end test_epoch_end",
        "metric_on_epoch_end(), or the option of HuggingFaceAddon": "compute_metrics",
        "add-ons: Task.add_on(...)": "configure_callbacks",
        # Parts of a trainer, and what tells of them.
        "a method of the engine, which an add-on puts in: self.engine = MyEngine(self.engine)": "gradient_norm "
        "average_gradients sync_buffers optimizer_state load_optimizer_state",
        "should_step(outputs)": "may_step",
        "steps_per_epoch(loader)": "steps_in",
        "describe()": "plan_lines plan_ranks plan_memory",
        # Data.
        "the loader of run(n_epoch, loader)": "train_dataloader get_train_dataloader _get_train_sampler",
        "the valid_loader of run(n_epoch, loader, valid_loader)": "val_dataloader valid_dataloader get_eval_dataloader",
        "the loader of evaluate(loader)": "test_dataloader get_test_dataloader",
        "the loader of predict(loader)": "predict_dataloader",
        "code before run(n_epoch, loader)": "prepare_data",
        "to_device(batch)": "transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer _prepare_batch "
        "_prepare_inputs",
        "batches(loader), or micro_batches(batch) for one accumulation window": "_next_batches get_batch_samples",
        # Model, set-up and state.
        "the constructor's model, or a function that returns it": "configure_model configure_sharded_model",
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
"""Methods that other trainers call by themselves, and zae does not."""

HELPERS = by_remedy(
    {
        "": "compute_metrics training_loss val_step valid_step eval_step evaluation_step prediction_step "
        "evaluation_loop train_dataloader val_dataloader valid_dataloader test_dataloader predict_dataloader "
        "get_train_dataloader get_eval_dataloader get_test_dataloader prepare_data configure_model create_optimizer "
        "create_scheduler get_batch_samples"
    }
)
"""Names in `HOOKS` that are natural for a helper: a class that defines such a name is not warned of."""


def foreign_hook(name: str) -> str:
    """Explain a method that another trainer calls by itself; empty if it is unknown, or a natural name of a helper."""
    return f"here it is {HOOKS[name]}" if name in HOOKS and name not in HELPERS else ""
