"""A plugin of pytest: what the tests of the project train on "cpu" is trained on the emulated device.

`python -m pytest -p device.mapped FILES`, in a process that has the device and with ZAE_EMULATED_LENIENT=1: a test may
mix tensors of the host with those of the device, as one that is written for the CPU does, and zae may not. Where there
is no emulation, the device is a real GPU.
`test_mapped.py` says which files are worth it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from zae import device as devices

DEVICE = torch.device(os.environ.get("ZAE_EMULATED_DEVICE", "cuda"), 0)

LEFT_OUT: dict[str, str] = {
    # Several ranks: on_device/test_ranks.py and its neighbours have them.
    "ranks": """
        a_number_of_ranks_ a_signal_to_ another_number_of_ranks any_number_of_ranks engines_train_to_the_same
        each_rank_gets_ its_loader_is_the_share_of_its_rank of_two_ranks one_rank_has_saved_alone rank_0_decides_
        ranks_plan_ shards_are_refused shards_of_two_types_are_refused two_ranks_
    """,
    # They fork: a child of a process that has used CUDA cannot use it. On_device/test_resume.py kills processes.
    "forks": """
        a_batch_that_does_not_fit_is_computed_in_parts a_closed_terminal_ a_second_signal_ a_signal_in_a_validation
        a_worker_dies finish_the_step_and_save is_killed many_samples_take_no_memory was_killed
    """,
    # They say "cpu", or what is said of a CPU alone.
    "words": """
        a_list_is_a_preference_ a_run_that_has_failed_comes_to_its_step an_add_on_that_draws_passes_the_kit
        an_exception_saves_apart declared_attributes_are_saved names_the_batch_and_the_place slow_bf16_
        slow_bfloat16_ the_batch_of_an_evaluation_is_named the_forward_is_in_autocast the_innermost_call_is_named
        what_cannot_be_described_ where_it_stands_aside_
    """,
    # Their task, model, add-on or optimizer makes tensors on the host, or arrays of NumPy of those on the device.
    "host": """
        [an_array an_array_ a_closure_that_leaves_ a_copy_of_a_trainer_goes_on a_loop_that_is_not_an_epoch
        a_metric_that_is_not_a a_module_of_the_task_that_
        a_network_that_is_frozen_for_a_while a_resumed_run_logs_the_same a_trainer_without_add_ons_takes_a_state
        an_engine_may_return_plain_pairs an_evaluation_moves_no_generator backward_passes_its_arguments_on
        batches_whose_samples_are_not_known batches_without_samples generators_ less_is_kept_for_the_backward
        streams_of_the_task_ the_norm_is_logged_and what_is_right_is_not_refused who_counts_is_not_told
    """,
    # They compare with a loop by hand on the CPU, whose stream draws other dropout than the device's.
    "by hand": """
        a_fused_optimizer_is_not_called_ a_step_evaluates_as_often_ classes_are_factories_ evaluation_and_files_have_
        steps_and_epochs_without_run the_average_is_that_of_torch the_weights_are_those_of_the_loop_by_hand
        training_is_left_as_it_is
    """,
    # NaN is found in its step; on an accelerator it is looked for every 64 steps (on_device/test_static_outputs.py).
    "later": """
        a_gradient_norm_that_is_not_finite a_gradient_that_is_not_finite a_mean_over_no_target raise_before_the_step
        names_the_statistics_ warn_takes_the_step
    """,
    # Their optimizer copies weights as it is made, which `load_state_dict` before the first run does on the host; or
    # they look at the order in memory of a broadcast tensor, which torch makes contiguous as it moves it.
    "moved": "step[Wrapping step[Lookahead step[WrappedTwice step[Basis a_buffer_that_is_a_broadcast in_memory[buffers",
    # They measure the memory of the host, or count the tensors of the process.
    "memory": "a_load_holds_a_state_once nothing_keeps_a_graph",
    # Sparse and complex tensors, which the emulation does not have.
    "emulation": """
        a_norm_of_sparse_gradients every_optimizer_of_torch_resumes parameters_are_converted_but_those
        the_average_of_tensors_of_many_kinds
    """,
}
"""Parts of the names of tests that cannot hold on the device, by reason."""

_parse_entry = devices._parse_entry


def parse_entry(entry: object, where: str) -> torch.device:
    """Return the emulated device for the CPU, and any other device as it is."""
    found = _parse_entry(entry, where)
    return DEVICE if found.type == "cpu" else found


def on_the_host(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Compare tensors of two devices on the host: a test compares what it trained itself with what a trainer did."""

    @wraps(compare)
    def compare_anywhere(one: Any, other: Any, *args: Any, **options: Any) -> bool:
        if one.device != other.device:
            one, other = one.cpu(), other.cpu()
        return compare(one, other, *args, **options)

    return compare_anywhere


devices._parse_entry = parse_entry
torch.equal = on_the_host(torch.equal)
torch.allclose = on_the_host(torch.allclose)

if DEVICE.type == "sim":  # Refused on a device that torch has no name for: on_device/test_moved_model.py says how.
    LEFT_OUT["lazy, hooks of parameters"] = """
        a_buffer_without_a_copy_is_named a_fault_in_a_window_is_found a_flip_is_found_before_the_optimizer_steps
        parameters_without_shapes_
    """


# They compare with what the host computes, whose kernels round in another way than those of a real GPU, or mix tensors
# of both, which the emulation allows.
if "ZAE_EMULATED_DEVICE" not in os.environ:
    LEFT_OUT["a real GPU"] = """
        a_batch_that_does_not_tell_its_samples a_file_has_what_memory_has a_flip_is_found_before_the_optimizer_steps
        a_generator_follows_seed_ a_validation_says_it_too an_error_of_predict_step_names_it
        an_optimizer_s_own_zero_grad_ bf16_needs_no_scale_ by_default_it_is_test_step_ evaluate_by_itself
        gradients_of_one_window_ inference_returns_what_ no_gradient_is_recorded numbers_that_ranks_share_
        run_in_mode_test tensors_of_all_samples_ the_average_of_the_weights_predicts the_closure_of_the_page_
        what_would_train_something_else_
    """


def cannot_hold(item: Any) -> bool:
    """Return whether a test needs what a device does not have; a parameter `world` is a number of ranks."""
    parts = [part for parts in LEFT_OUT.values() for part in parts.split()]
    name = item.name.replace(" ", "_")
    return "world" in item.fixturenames or any(part in name for part in parts)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what cannot hold on a device."""
    left_out = [item for item in items if cannot_hold(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
