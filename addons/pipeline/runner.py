"""Run a step of a user through a schedule: the loop calls it for a batch, and each rank computes its stages."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zae import random_state
from zae.addons.pipeline.chain import Chain, Program, check_passed, fake_loss
from zae.addons.pipeline.forward_calls import bind, constants_in
from zae.addons.pipeline.micro_batches import fill_up, first_rows, take_apart
from zae.addons.pipeline.schedules import Arrangement
from zae.errors import ConfigError, StepError
from zae.values.walk import leading_dimension, tensors_in

__all__ = ["Place", "Runner", "StagedModel"]

_KEPT = 8  # Schedules for inputs of different shapes; each has buffers for what the stages exchange.
_FAILURES = ("failed to run forward", "Failed to run stage backward")  # Errors of torch around those of a stage.
_ONCE = (
    "A pipeline computes one call of the model for each batch: write outputs = self.model(inputs) once, with "
    "torch.cat([first, second]) for several inputs"
)

_PARTS = (
    "A rank has the modules and parameters of its own stages alone: call all of it, outputs = self.model(inputs), let "
    "its forward return what else the loss needs, and take the device from self.device"
)


class Place(NamedTuple):
    """Where a rank stands in the pipeline."""

    stages: tuple[int, ...]  # Its own.
    ranks: tuple[int, ...]  # Those of all stages, among all ranks.
    group: Any


class _ForwardCalled(BaseException):
    """Ends a step where it calls the model; not an Exception, which a step may catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


class StagedModel:
    """What a step calls as ``self.model``: it has the attributes of the model."""

    def __init__(self, module: nn.Module) -> None:
        vars(self).update(module=module, answer=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.answer is None:
            raise ConfigError(
                "self.model was called outside of train_step, test_step and predict_step, and no rank has all of it; "
                "call evaluate or predict with a loader, or load the weights into another model: save_model(path)"
            )
        return self.answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["module"], name, value)

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(f"a step uses modules within self.model. {_PARTS}")

    def __getitem__(self, key: Any) -> Any:
        raise ConfigError(f"a step uses self.model[{key!r}]. {_PARTS}")

    @contextmanager
    def answering(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Let a function answer the calls within the block."""
        before = vars(self)["answer"]
        vars(self)["answer"] = answer
        try:
            yield
        finally:
            vars(self)["answer"] = before


class _Stage(nn.Module):
    """What torch takes for the module of a stage: it is called with the number of a micro-batch."""

    def __init__(self, runner: Runner, index: int, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        vars(self).update(
            _runner=runner, _index=index, _own=[parameter for parameter in parameters if parameter.requires_grad]
        )
        self.is_known = False  # Whether torch knows the shapes that it returns.

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        is_trial = not self.is_known
        self.is_known = True
        number: int = vars(self)["_index"]
        return vars(self)["_runner"].compute(number, int(index), received if number else (), is_trial)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(vars(self)["_own"])


class _Job(NamedTuple):
    """What is computed for one batch."""

    trains: bool
    programs: Mapping[int, Program]
    feed: Sequence[Mapping[str, Any]]
    answer: Callable[[int, Any], Tensor]
    seed: bytes


class Runner:
    """The pipeline of one rank.

    Parameters
    ----------
    chain : Chain
        The stages.
    model : StagedModel
        What steps call.
    place : Place
        The stages of this rank.
    arrangement : Arrangement
        How they take turns, and into how many parts a batch is divided.
    device : torch.device
        Of this rank.
    context : callable
        Returns the context in which steps and stages compute: autocast, for instance.
    """

    def __init__(
        self,
        chain: Chain,
        model: StagedModel,
        place: Place,
        arrangement: Arrangement,
        device: torch.device,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.place = place
        self._chain = chain
        self.model = model
        self._schedule = arrangement.schedule
        self._count = arrangement.micro_batches
        self._device = device
        self._context = context
        self._stages = len(place.ranks)
        self._engines: OrderedDict[Any, Any] = OrderedDict()
        self._job: _Job | None = None
        self._outputs: dict[int, Any] = {}

    @property
    def is_running(self) -> bool:
        """Whether a batch is being computed."""
        return self.model.answer is not None or self._job is not None

    def run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        finish: Callable[[Any, Any, int, int], Tensor | None],
        trains: bool,
        number: int,
    ) -> None:
        """Compute one batch, and its gradients.

        Parameters
        ----------
        step : callable
            The step of the user, called with a micro-batch.
        batch : object
            The same on all ranks of the pipeline, on the device.
        finish : callable
            Called on the rank with the last stage with what the step returned, the micro-batch, and the numbers of
            rows of it and of the batch; returns the loss to differentiate, if ``trains``.
        trains : bool
            Whether there is a backward.
        number : int
            Of the batch in the run: stages draw other random numbers for each.
        """
        rows = leading_dimension(batch)
        parts, sizes, size = take_apart(batch, rows, self._count)
        seed = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + str(number).encode()).digest()
        rewinds = list[Callable[[], None]]()
        feed = list[dict[str, Any]]()
        for part, count in zip(parts, sizes):
            if count:
                rewinds.append(random_state.rewind())
                feed.append(self._inputs_of(step, part, trains))
                _check_constants(feed[-1], feed[0])
            if trains:  # Torch's schedules have as many micro-batches, of one shape, in each step.
                feed[-1:] = [fill_up(feed[-1], feed[0], count, size)] if count else [feed[-1], feed[0]]

        def answer(index: int, values: Any) -> Tensor:
            count = sizes[index]
            if not count:
                return fake_loss(values) * 0
            if trains and count < size:
                values = first_rows(values, size, count)
            with random_state.isolated():
                rewinds[index]()
                out = self._answered(step, parts[index], values)
            loss = finish(out, parts[index], count, rows or 0)
            return torch.zeros(()) if loss is None else loss

        self._compute(_Job(trains, self._chain.programs(feed[0], self.place.stages), feed, answer, seed))

    def share(self, value: Any) -> Any:
        """Return the value of the rank with the last stage, on all ranks of the pipeline."""
        box = [value]
        # What the loss is computed of is on one rank alone, which sends it to the others of its pipeline.
        dist.broadcast_object_list(box, src=self.place.ranks[-1], group=self.place.group)
        return box[0]

    # ------------------------------------------------------------------------------------------ the step of the user

    def _inputs_of(self, step: Callable[[Any], Any], part: Any, trains: bool) -> dict[str, Any]:
        """Return what the step calls the model with."""

        def catch(*args: Any, **kwargs: Any) -> Any:
            raise _ForwardCalled(args, kwargs)

        owner = getattr(step, "__self__", step)
        before = {key: number for key, number in vars(owner).items() if type(number) in (int, float)}
        try:
            with self.model.answering(catch), self._context(), self._explaining_parts():
                step(part)
        except _ForwardCalled as called:
            args, kwargs = called.call
        else:
            raise StepError(f"the step has not called self.model. {_ONCE}")
        if counted := [key for key, number in before.items() if getattr(owner, key) != number]:
            raise StepError(
                f"the step changes self.{counted[0]} before it calls self.model, and a pipeline runs this part for "
                "each micro-batch, on each rank; do it in on_step_end, or use self.progress_checker.step"
            )
        arguments = bind(self.model.module, args, kwargs)
        if trains and any(tensor.requires_grad for tensor in tensors_in(arguments)):
            raise ConfigError(
                "the inputs of self.model require a gradient: the step computes them with parameters, which a pipeline "
                "does not differentiate before its first stage; do that in the forward of the model"
            )
        return arguments

    def _answered(self, step: Callable[[Any], Any], part: Any, values: Any) -> Any:
        """Return what the step returns where the model has returned these values."""
        calls = 0

        def answer(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise StepError(f"the step has called self.model {calls} times. {_ONCE}")
            return values

        with self.model.answering(answer), self._context(), self._explaining_parts():
            out = step(part)
        if not calls:
            raise StepError(f"the step has not called self.model. {_ONCE}")
        if any(tensor.is_meta for tensor in tensors_in(out)):
            raise ConfigError(f"a step computes with parameters of self.model. {_PARTS}")
        return out

    @contextmanager
    def _explaining_parts(self) -> Iterator[None]:
        """Say of a step that computes with parameters of other ranks what to write instead."""
        try:
            yield
        except Exception as error:
            if "meta" not in str(error) or isinstance(error, ConfigError):
                raise
            raise ConfigError(f"a step computes with modules or parameters of self.model. {_PARTS}") from error

    # ------------------------------------------------------------------------------------------------- the schedule

    def _compute(self, job: _Job) -> None:
        """Run the schedule for a batch; an error of a stage is raised as it was, with its cause."""
        self._job = job
        failure: BaseException | None = None
        try:
            if job.trains:
                engine = self._engine(job)
                index = torch.arange(self._count)
                target = index if self._stages - 1 in self.place.stages else None
                first = (index,) if 0 in self.place.stages else ()
                engine.step(*first, target=target, return_outputs=False, index=index)
            else:
                self._forward()
        except Exception as error:
            is_of_torch = any(text in str(error) for text in _FAILURES)
            failure = error.__cause__ if error.__cause__ and is_of_torch else error
        finally:
            self._job = None
            self._outputs.clear()
        if failure is not None:
            raise failure

    def _forward(self) -> None:
        """Compute one stage after the other for all micro-batches, without a backward.

        The schedules of torch do so too, but not where two stages in a row are on one rank (torch 2.13).
        """
        place = self.place
        outputs = dict[tuple[int, int], Any]()
        sends = list[tuple[Any, Tensor]]()

        def send(tensor: Tensor, target: int) -> None:  # No rank waits here, so that none waits for another.
            sends.append((dist.isend(tensor, dst=target, group=place.group), tensor))

        assert self._job is not None
        shapes = [_shapes(entry) for entry in self._job.feed]
        is_new = [index == 0 or shape != shapes[index - 1] for index, shape in enumerate(shapes)]
        for stage in place.stages:
            kinds: list[Any] = []
            for index in range(len(shapes)):
                received: Sequence[Tensor] = ()
                if stage - 1 in place.stages:
                    received = outputs.pop((stage - 1, index))
                elif stage:
                    source = place.ranks[stage - 1]
                    if is_new[index]:
                        kinds = self._receive_kinds(source)
                    received = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in kinds]
                    for tensor in received:  # What the stage before has computed for this micro-batch.
                        dist.recv(tensor, src=source, group=place.group)
                values = self.compute(stage, index, received, False)
                if stage == self._stages - 1:
                    self._loss(index)
                elif stage + 1 in place.stages:
                    outputs[stage, index] = values
                else:
                    target = place.ranks[stage + 1]
                    values = [value.contiguous() for value in values]
                    if is_new[index]:
                        sent = [(list(value.shape), str(value.dtype).removeprefix("torch.")) for value in values]
                        text = bytearray(json.dumps(sent).encode())
                        send(torch.tensor([len(text)], device=self._device), target)
                        send(torch.frombuffer(text, dtype=torch.uint8).to(self._device), target)
                    for value in values:
                        send(value, target)
        for work, _ in sends:
            work.wait()

    def _receive_kinds(self, source: int) -> list[Any]:
        """Return the shapes and types of what the stage before sends."""
        # The stage before sends a text with the shapes and types, after its length.
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, src=source, group=self.place.group)
        text = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(text, src=source, group=self.place.group)
        kinds = json.loads(text.cpu().numpy().tobytes())
        return [(tuple(shape), getattr(torch, dtype)) for shape, dtype in kinds]

    def _engine(self, job: _Job) -> Any:
        """Return the schedule for inputs of these shapes; torch finds out those between the stages by a trial."""
        shapes = _shapes(job.feed[0])
        constants = tuple(constants_in(job.feed[0]).items())
        key = self.model.module.training, shapes, constants
        if key not in self._engines:
            from torch.distributed.pipelining import PipelineStage

            stages = [
                PipelineStage(
                    _Stage(self, stage, self._chain.parameters([stage])),
                    *(stage, self._stages, self._device),
                    group=self.place.group,
                )
                for stage in self.place.stages
            ]
            trials = [True]  # Torch calls the loss function once before it trains.

            def loss(output: Any, target: Tensor) -> Tensor:
                if trials:
                    trials.clear()
                    return fake_loss(self._outputs.pop(int(target)))
                return self._loss(int(target))

            self._engines[key] = self._schedule.make(stages, self._count, loss)
            if len(self._engines) > _KEPT:
                self._engines.popitem(last=False)
        self._engines.move_to_end(key)
        return self._engines[key]

    def _loss(self, index: int) -> Tensor:
        assert self._job is not None
        return self._job.answer(index, self._outputs.pop(index))

    def compute(self, stage: int, index: int, received: Sequence[Tensor], is_trial: bool) -> Any:
        """Compute one stage for a micro-batch."""
        job = self._job
        assert job is not None
        for tensor in received:
            if tensor.requires_grad:
                tensor.register_hook(Tensor.contiguous)  # Gloo sends no others.
        with self._context(), self._stream(job, stage, index), _unchanged(self._buffers(stage), is_trial):
            values = job.programs[stage](job.feed[index], received)
        if stage < self._stages - 1:
            return check_passed(values, stage)
        self._outputs[index] = values
        return torch.zeros(1, device=self._device)  # The loss depends on what was kept.

    def _buffers(self, stage: int) -> list[Tensor]:
        return [value for value in self._chain.names[stage].values() if not isinstance(value, nn.Parameter)]

    @contextmanager
    def _stream(self, job: _Job, stage: int, index: int) -> Iterator[None]:
        """Draw from a stream of this stage and micro-batch; the streams of the ranks stay alike."""
        if not job.trains:
            yield
            return
        seed = hashlib.sha256(job.seed + f"{stage} {index}".encode()).digest()
        with random_state.isolated():
            random_state.seed_everything(int.from_bytes(seed[:8], "little"))
            yield


def _shapes(values: Any) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(values))


def _check_constants(values: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Refuse numbers that differ between the calls of the model: a stage computes with those of the first."""
    constants = constants_in(values)
    others = constants_in(first)
    if constants != others:
        name = next(name for name in {**constants, **others} if constants.get(name) != others.get(name))
        raise ConfigError(
            f"self.model was called with {name}={values[name]!r:.40} for one micro-batch, and {first[name]!r:.40} for "
            "another: give it as a tensor with one row for each sample, or compute it in the forward of the model"
        )


@contextmanager
def _unchanged(buffers: Sequence[Tensor], is_trial: bool) -> Iterator[None]:
    """Restore buffers after a trial."""
    copies = [buffer.detach().clone() for buffer in buffers] if is_trial else []
    yield
    with torch.no_grad():
        for buffer, before in zip(buffers, copies):
            if not torch.equal(buffer, before):  # A backward may need a buffer as it is.
                buffer.copy_(before)
