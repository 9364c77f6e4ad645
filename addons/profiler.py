"""Profile some steps of a run by torch.profiler: a trace for each rank, and the most expensive operations."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from zae.addon import AddOnBase, Description
from zae.arguments import Count, CountOrZero, check_argument
from zae.arguments.paths import check_folder
from zae.checkpoint.hashed_files import reason
from zae.errors import ConfigError
from zae.loop.step_output import StepOutput
from zae.torch_private import is_profiling

__all__ = ["ProfilerAddon"]

_log = logging.getLogger("zae")


class ProfilerAddon(AddOnBase):
    """Profile some steps of each call of ``run``, and write a trace and a table of the most expensive operations.

    A trace is a file ``rank0-step00000005.pt.trace.json``, for the step that it ends with: for Perfetto
    (https://ui.perfetto.dev), ``chrome://tracing``, and TensorBoard with the plugin torch-tb-profiler. The table of the
    same name ends with ``.txt``; the last one is ``trainer.profile_table``, and the log has it at the level INFO. Each
    rank writes its own files; a file is there as a whole, or not. Where one cannot be written there is a warning, and
    training continues. Weights are bitwise the same with and without the profiler; after the last of the profiled
    steps, it is gone.

    Parameters
    ----------
    profile_dir : str or Path
        The folder of the files; it is created.
    profile_schedule : sequence of int
        Steps to wait, to warm up, to record, and how often: ``(wait, warmup, active, repeat)``.
    profile_rows : int
        The number of operations in the table.
    profile_shapes : bool
        Whether the shapes of inputs are recorded, which makes these steps slower.
    profile_memory : bool
        Whether allocations are recorded, which makes these steps slower.
    profile_stack : bool
        Whether source lines are recorded, which makes these steps slower.

    Raises
    ------
    ConfigError
        An option has an invalid value, or the folder cannot be written.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from zae.addons import ProfilerAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))] * 8
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = PlainTask.add_on(ProfilerAddon)(
    ...         model, "cpu", optimizer=torch.optim.SGD, profile_dir=folder, profile_schedule=(1, 1, 2, 1))
    ...     _ = trainer.run(1, batches)
    ...     print(*sorted(path.name for path in Path(folder).iterdir()))
    rank0-step00000004.pt.trace.json rank0-step00000004.txt
    """

    layer = "observe"
    profile_table: str
    process_attributes = {"_profiler": None, "_cycles_left": 0}
    _profiled: int

    def __init__(
        self,
        *args: Any,
        profile_dir: str | Path,
        profile_schedule: Sequence[int] = (2, 1, 3, 1),
        profile_rows: Count = 10,
        profile_shapes: bool = False,
        profile_memory: bool = False,
        profile_stack: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.profile_dir = check_folder(profile_dir, "profile_dir").absolute()
        steps: Any = profile_schedule
        if not isinstance(steps, (tuple, list)) or len(steps) != 4:
            raise ConfigError(
                f"profile_schedule={steps!r}; write (wait, warmup, active, repeat), for instance (2, 1, 3, 1)"
            )
        kinds = {"wait": CountOrZero, "warmup": Count, "active": Count, "repeat": Count}
        self.profile_schedule: tuple[int, ...] = tuple(
            check_argument(f"{name} of profile_schedule", value, kind)
            for (name, kind), value in zip(kinds.items(), steps)
        )
        self.profile_rows = profile_rows
        self.profile_shapes = profile_shapes
        self.profile_memory = profile_memory
        self.profile_stack = profile_stack
        self.profile_table = ""
        self._profiler: Any = None
        # Steps of this cycle; cycles of this run.
        self._profiled = 0
        self._cycles_left = 0

    def on_run_begin(self) -> None:
        """Start the profiler."""
        super().on_run_begin()
        if self.mode != "train":
            return
        self._profiled = 0
        self._cycles_left = self.profile_schedule[3]
        if not self.profile_schedule[0]:
            self._begin_cycle()

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Begin a cycle when its wait is over; tell its profiler that a step has ended; after the last one, stop it."""
        super().on_step_end(outputs)
        if not self._cycles_left:
            return
        wait, warmup, active, _ = self.profile_schedule
        self._profiled += 1
        if self._profiler is not None:
            self._profiler.step()
            if self._profiled == wait + warmup + active:
                self._stop_profiler()
                self._profiled = 0
                self._cycles_left = self._cycles_left - 1
        if self._profiled == wait and self._cycles_left:
            self._begin_cycle()

    def _begin_cycle(self) -> None:
        """Start a profiler for the steps to warm up and to record."""
        _, warmup, active, _ = self.profile_schedule
        first = self.progress_checker.step
        plan = schedule(wait=0, warmup=warmup, active=active, repeat=1)
        activities = [ProfilerActivity.CPU] if self.device.type == "cpu" else supported_activities()
        profiler = profile(
            activities=activities,
            schedule=lambda step: plan(max(step - first, 0)),
            on_trace_ready=self._write_profile,
            record_shapes=self.profile_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.profile_stack,
        )
        profiler.step_num = first
        try:
            if is_profiling():  # torch would end that profiler, and leave it empty.
                raise RuntimeError("another profiler runs in this process")
            profiler.start()
        except RuntimeError as error:
            self._cycles_left = 0
            _log.warning(
                "ProfilerAddon does nothing from step %d on: torch.profiler cannot start (%s)", first + 1, error
            )
            return
        self._profiler = profiler

    def teardown(self) -> None:
        """Stop the profiler, where the run ends before it has recorded all."""
        try:
            self._stop_profiler()
        finally:
            super().teardown()

    def describe(self) -> list[Description]:
        """Tell which steps are profiled."""
        return [*super().describe(), Description("the profiler records", self._profiled_steps, where="on_step_end")]

    def _profiled_steps(self, plan: Any) -> str:
        """Return which steps of a planned run are recorded."""
        wait, warmup, active, repeat = self.profile_schedule
        ends = [plan.first_step - 1 + (wait + warmup + active) * (index + 1) for index in range(repeat)]
        last = max(ends) if plan.last_step is None else plan.last_step  # It may be in a window.
        spans = [f"{end - active + 1} to {min(end, last)}" for end in ends if end - active < last]
        if not spans:
            return f"nothing, as profile_schedule={self.profile_schedule} needs {wait + warmup + 1} steps or more"
        return f"steps {', '.join(spans)}"

    def _stop_profiler(self) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is not None:
            profiler.stop()

    def _write_profile(self, profiler: Any) -> None:
        """Write the trace and the table of the steps that were recorded."""
        if self._profiled <= sum(self.profile_schedule[:2]):  # The run has ended before the first step to record.
            return
        if not (events := profiler.key_averages()):
            _log.warning(
                "the profile up to step %d is empty: another profiler was started within the run, and torch has one "
                "at a time",
                self.progress_checker.step,
            )
            return
        key = "self_cpu_time_total" if self.device.type == "cpu" else "self_device_time_total"
        self.profile_table = events.table(sort_by=key, row_limit=self.profile_rows)
        step = self.progress_checker.step
        if self.is_main:
            _log.info("the most expensive operations up to step %d:\n%s", step, self.profile_table)
        trace = self.profile_dir / f"rank{self.rank}-step{step:08d}.pt.trace.json"
        table = self.profile_dir / f"rank{self.rank}-step{step:08d}.txt"
        try:
            self.profile_dir.mkdir(parents=True, exist_ok=True)
            for path, write in ((trace, profiler.export_chrome_trace), (table, self._write_table)):
                partial = path.with_name(f".{path.name}")
                try:
                    write(str(partial))
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            problem = reason(error) if isinstance(error, OSError) else str(error)
            _log.warning("the profile %s cannot be written: %s; training continues", trace, problem)

    def _write_table(self, path: str) -> None:
        Path(path).write_text(self.profile_table + "\n", encoding="utf-8")
