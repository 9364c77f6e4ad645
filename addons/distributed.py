"""What all engines that train on several devices share: ranks, data, agreement and state."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zae import random_state
from zae.addon import AddOnBase, Description, replaces
from zae.addons.data_shards import DataShardsAddon
from zae.arguments import Interval
from zae.checkpoint.group import Group
from zae.compose.introspect import add_ons_of, is_add_on, owners_of
from zae.data.loader_parts import LoaderParts
from zae.data.loader_state import restore_parts
from zae.data.sharding import shard
from zae.data.shards import Ranks
from zae.device import exchange_current
from zae.display.choose import draw_elsewhere, is_in_a_notebook
from zae.display.notebook import Output
from zae.distributed import launcher, shards
from zae.distributed.blocks import check_shapes
from zae.distributed.collectives import open_host_group
from zae.distributed.drift import DriftCheck, find_failed_rank
from zae.distributed.mesh import DIMENSIONS, Mesh, check_mesh
from zae.distributed.rank_process import is_spawned, note_failure, show
from zae.distributed.ranks import NotJoined, RanksEngine
from zae.distributed.spawn import parse_address, spawn
from zae.distributed.stop_flag import StopFlag
from zae.errors import ConfigError, DistributedError, TaskError
from zae.loop.addon_state import ENTRIES, is_in_mode
from zae.loop.rank_states import RankStates, between_epochs, derive_streams, engine_of, load_entries
from zae.model.weights import named_parameters
from zae.null_context import both
from zae.parts import SingleProcess, gather_dp
from zae.record import between_ranks
from zae.torch_private import count_devices
from zae.values.hashes import fingerprints
from zae.values.walk import is_sharded

__all__ = ["DistributedAddon"]


class DistributedAddon(DataShardsAddon, AddOnBase):
    """Run the loop on several ranks: the base of the add-ons that put an engine in.

    It starts the ranks or joins those of a launcher, gives each its share of the data, adds up what is recorded,
    decides together when to stop, and keeps the state of every rank. How the model is divided and how gradients come
    together is up to ``engine``, which ``build_engine`` makes when the ranks have joined; by default, each rank has a
    whole model, and gradients are averaged after the backward. docs/extending/engines.md is about engines of your own.

    An add-on has the slot ``"parallel"``, or that of a dimension, ``"parallel.data"``, ``"parallel.tensor"`` or
    ``"parallel.pipeline"``, and names in ``mesh_dimensions`` the dimensions of ``mesh`` along which its engine divides
    the work. What it changes of the loop itself keeps these promises; tests/engines holds them for each:

    - ``materialize(module)``, ``engine.wrap(module)`` and ``wrap_optimizers(optimizers)`` come in this order. After
      them each parameter of each optimizer is one of the present model. Nothing copies a module that is changed in
      place.
    - What ``should_step`` and ``optimizer_step`` return is equal on all ranks.
    - ``test_step`` and ``optimizer_step`` are those of the trainer. An engine with a schedule or a step of its own
      overrides ``gradients``, ``clip``, ``optimizer_step`` and ``zero_grad``.

    Parameters
    ----------
    init_method : str, optional
        Where spawned ranks meet: ``"tcp://localhost:12355"``, ``"env://"`` (``MASTER_ADDR``, ``MASTER_PORT``) or
        ``"file:///path"``. By default a free port of the loopback interface. Under a launcher, where it says.
    backend : str
        Of torch.distributed; "auto" is NCCL for CUDA tensors and gloo for those on the CPU.
    timeout : float
        Seconds after which a rank that does not answer is given up.
    mesh : dict of str to int, optional
        How many ranks divide the work along each dimension: ``{"replicate": 2, "shard": 4}``. One dimension that is
        left out gets the remaining ranks.

    Raises
    ------
    ConfigError
        An option cannot be meant.
    """

    layer = "parallel"
    slot = "parallel"
    mesh_dimensions: ClassVar[tuple[str, ...]] = ("replicate",)
    process_attributes = {"_outer_error": None, "_placed": False, "_replaced": {}}
    _rank_states: RankStates
    _between_runs: StreamsBetweenRuns
    _stop_flag: StopFlag
    _drift: DriftCheck

    replicated_options = {
        "mesh": "setup",
    }

    def __init__(
        self,
        *args: Any,
        init_method: str | None = None,
        backend: str = "auto",
        timeout: Annotated[float, Interval("[0.001, inf)")] = 600.0,
        mesh: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if init_method is not None:
            parse_address(init_method)
        known = {"auto", *dist.Backend.backend_list}
        # Also one for each kind of device, as in "cpu:gloo,cuda:nccl".
        if not known.issuperset(part.rpartition(":")[2].lower() for part in str(backend).split(",")):
            raise ConfigError(f"backend={backend!r}; it must be 'auto', 'gloo' or 'nccl', or another that torch knows")
        self.init_method = init_method
        self.backend = backend
        self.timeout = min(timeout, 1e9)  # The largest that torch takes.
        self.mesh = check_mesh(mesh, self._dimensions(), type(self).__name__)
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}  # Old and new parameters, until the optimizers know them.
        self.engine = NotJoined(self.mesh, self._dimensions())
        self._rank_states = RankStates()  # What each rank saved, until this one has loaded its own.
        self._placed = False
        self._between_runs = StreamsBetweenRuns()
        self._stop_flag = StopFlag()
        self._drift = DriftCheck()
        self._outer_error: BaseException | None = None  # One that was being handled as the run began.

    # ------------------------------------------------------------------------------------------- beginning and end

    @replaces
    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the loop on every rank; without a launcher, start the processes."""
        world = self._planned_world()
        if world == 1 or dist.is_initialized() or launcher.launched_world() is not None:
            return super().launch(function, *args)
        if not self._between_runs.are_continued(self.progress_checker):  # The script has drawn or seeded since.
            self._rank_states = RankStates()
            self.loader_position = self.loader_position.fresh()
        names = inspect.signature(function).parameters
        output = Output() if is_in_a_notebook() else None
        sent = {"trainer": self, "name": function.__name__, "is_shown": output is not None, **dict(zip(names, args))}
        options: dict[str, Any] = {"backend": self._backend(), "timeout": self.timeout, "init_method": self.init_method}
        result, state, rest = spawn(run_rank, sent, self.devices, show=output, **options)
        self._take_back(state, rest, args[0] if args else None)
        return result

    def _take_back(self, state: dict[str, Any], rest: Mapping[str, Any], loader: Any) -> None:
        """Restore the final state of rank 0 in the objects of the caller, and its random streams here."""
        self._take_attributes(rest)
        self.optimization.build(self.build_optimizer, self.build_scheduler)
        present = state["position"]["present"]
        random_state.restore({key: value for key, value in present["random"].items() if key in random_state.HOST})
        generators = random_state.generators_of(loader)
        if present["generators"] is not None and len(generators) == len(present["generators"]):
            random_state.restore_generators(loader, present["generators"])
        if present["parts"]:  # Random streams inside of the loader: the next ranks get them from here.
            sharded = shard(loader, True, Ranks(0, 2, list, bool))
            restore_parts(LoaderParts(sharded), present["parts"])
        if not state["progress"]["epoch_batch"]:
            # Between two epochs a loader continues its own generators, which another loader does not have.
            state["position"] = between_epochs(state["position"])
            for rank_state in state.get(engine_of(type(self)), {"ranks": []})["ranks"]:
                rank_state["position"] = between_epochs(rank_state["position"])
        self.load_state_dict(state)
        self._take_attributes(rest)
        self._between_runs.leave()

    def _take_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _planned_world(self) -> int:
        """Return how many ranks there are, or will be."""
        return launcher.planned_world(len(self.devices))

    def _backend(self) -> str:
        """Return the name of the backend; ranks can always communicate over the CPU too."""
        if self.backend not in ("auto", "nccl"):
            return self.backend
        kind = self.devices[0].type
        return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"

    def setup(self) -> None:
        """Join the other ranks, then set up on the device of this rank."""
        self._outer_error = sys.exc_info()[1]  # The other ranks have it too.
        if launcher.join(self._backend(), self.timeout, self.init_method):
            open_host_group(self.timeout)
            self.device = self._own_device(dist.get_world_size())
            self._take_engine(dist.get_world_size())
            self.engine.rendezvous("run" if self.current_run.is_call else "evaluate, inference or run_epoch")
            if self._is_parallel:  # Before any other exchange, which would wait for what a rank does differently.
                self._refuse_own_sync()
                between_ranks.check_begin(self, self.gather, has_whole_model=not self._placed)
            self._begin_streams()
            if self.engine.dp_world_size < self.world_size:  # Ranks with the same batches draw alike.
                streams = dict(self.gather((self.engine.dp_rank, random_state.capture()))[::-1])
                random_state.restore(streams[self.engine.dp_rank])  # Those of the first of them.
        super().setup()
        if self._is_parallel:
            self.engine.begin(self.unwrap(), self.parameters)
        if self._is_parallel and not self._placed:
            self._place()

    def _refuse_own_sync(self) -> None:
        """Refuse a task that decides when ranks average gradients: the engine, outside of it, does not hear of it."""
        cls = type(self)
        inside = cls.__mro__[cls.__mro__.index(DistributedAddon) :]
        for owner in owners_of(cls, "sync_context"):
            if owner in inside and not is_add_on(owner):
                raise TaskError(
                    f"{owner.__name__}.sync_context has no effect with {engine_of(cls)}, whose ranks average gradients "
                    "once in each step; remove it. To average less often, make a step of several batches with "
                    "GradientAccumulationAddon; local SGD, whose ranks step by themselves, has no counterpart"
                )

    def _take_engine(self, world: int) -> None:
        """Take the engine of the ranks that have joined, unless a run before this one did."""
        if world == 1:
            self.engine = NotJoined(self.mesh, self._dimensions())
        elif not self._is_parallel or self.world_size != world:
            self.engine = self.build_engine()

    def build_engine(self) -> SingleProcess:
        """Return the engine of the ranks, which have joined; an add-on returns its own one around that of ``super()``.

        Returns
        -------
        SingleProcess
            By default `zae.distributed.ranks.RanksEngine`, which knows the ranks, and leaves each with a whole model.
        """
        return RanksEngine(self._mesh(), self.timeout)

    def wrap_model(self, model: nn.Module) -> Any:
        """Let the engine wrap or divide the model."""
        inner = super().wrap_model(model)
        if not self._is_parallel:
            return inner
        before = dict(self.unwrap().named_parameters(remove_duplicate=False))
        wrapped = self.engine.wrap(inner, self.mode == "train")
        self._note_replaced(before, dict(self.unwrap().named_parameters(remove_duplicate=False)))
        return wrapped

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Average gradients in the backward of the last micro-batch at the earliest."""
        return both(super().sync_context(last), self.engine.sync_context(last))

    def normalize(self, num_targets: list[Any]) -> None:
        """Average the gradients over the shares of the data, and then divide them by the targets of all ranks.

        Every rank gets the buffers of rank 0 as well: all forwards of the step are over, and what follows, an average
        of weights for instance, finds equal ones.
        """
        if self._is_parallel:
            if self._leaves_out and not self.engine.needs_lockstep_forward:
                num_targets = self._complete_short_step(num_targets)
            self.engine.average_gradients(self.parameters)
            self.engine.sync_buffers(self.unwrap())
        super().normalize(num_targets)

    def _complete_short_step(self, num_targets: list[Any]) -> list[Any]:
        """Take part in a step in which some ranks have no samples; return the targets of this rank."""
        has_samples = bool(num_targets)
        if not has_samples:
            # Zeros, through backward(): a loss scale has to see one.
            self.backward(
                cast(
                    Tensor, sum((parameter * 0).sum().real for parameter in self.parameters if parameter.requires_grad)
                )
            )
            for parameter in self.parameters:
                parameter.grad = None
        # A rank without samples cannot know whether the steps count targets: the others tell.
        is_counted = any(self.gather(any(count is not None for count in num_targets)))
        return [0.0] if is_counted and not has_samples else num_targets

    def _dimensions(self) -> list[str]:
        """List the dimensions along which the add-ons of this trainer divide the work."""
        dimensions = [name for add_on in add_ons_of(type(self)) for name in getattr(add_on, "mesh_dimensions", ())]
        return [name for name in DIMENSIONS if name in dimensions]

    def _mesh(self) -> Mesh:
        """Return the arrangement of the ranks that there are, or will be."""
        return Mesh(self.mesh, self._dimensions(), self._planned_world())

    def _note_replaced(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Note the parameters that stand in for others of the same names.

        They get the attributes by which an optimizer's factory may choose its groups.
        """
        for name, old in before.items():
            new = after[name]
            if new is not old:
                vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
                self._replaced[id(old)] = (old, new)

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Let the optimizers hold the parameters that sharding has put in place of those they were made with."""
        if self._is_parallel:
            between_ranks.check_optimizers(optimizers, self.gather)
        super().wrap_optimizers(optimizers)
        self.optimization.tensors_to_clip = shards.local_gradients if self._is_parallel else list
        replaced = self._replaced
        self._replaced = {}
        if replaced:
            for optimizer in optimizers.values():
                shards.replace_parameters(optimizer, replaced)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to copy or pickle a model of which this rank has a part."""
        if divided := self._divided_model() if self._is_parallel else "":
            raise ConfigError(
                f"{divided} on {self.world_size} ranks: the trainer cannot be copied or pickled. Call save_state "
                "(StateManagerAddon) or save_model(path) on every rank, and load the file into a new trainer"
            )
        return super().__getstate__()

    def _divided_model(self) -> str:
        """Return what of the model lies in parts, in words; "" where each rank has all of it."""
        in_parts = any(map(is_sharded, self.unwrap().parameters()))
        return f"the parameters of {type(self.unwrap()).__name__} lie in parts" if in_parts else ""

    def describe(self) -> list[Description]:
        """Tell which ranks there are, or will be, and how they divide the work."""
        return [
            *super().describe(),
            Description("world_size", self._planned_size, where="ranks"),
            Description("dp_world_size", lambda plan: self._mesh().dp_world_size, where="ranks"),
            Description("mesh", lambda plan: self._mesh().sizes, where="ranks"),
        ]

    def _planned_size(self, plan: Any) -> int:
        """Return how many processes a planned run has, and refuse a model that they cannot train."""
        size = self._mesh().world
        if size > 1:
            self._check_model(self.model)
        return size

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model that the ranks cannot train, before they begin; the engine refuses it too as it wraps it."""
        check_shapes(model)

    def _place(self) -> None:
        """Load the part of this rank from a state that was loaded before its number was known."""
        self._placed = True
        if self._rank_states.ranks:
            rank_state = self._rank_states.ranks[self.engine.dp_rank]
            self._rank_states = RankStates()
            self.loader_position.load_state_dict(rank_state["position"])
            self.log_train.load_state_dict(rank_state["log_train"])
            load_entries(self, rank_state.get("add_ons"))
        elif self.loader_position.is_restored:
            self.loader_position.load_state_dict(derive_streams(self.loader_position.state_dict(), self.engine.dp_rank))

    def _own_device(self, world: int) -> torch.device:
        """Return the device of this rank."""
        local = launcher.local_rank()
        first = self.devices[0]
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if len(self.devices) not in (1, local_world, world):
            raise ConfigError(
                f"device is a list of {len(self.devices)}, and the launcher has started {world} ranks, "
                f"{local_world} on this machine; write --nproc_per_node {len(self.devices)}, or device='{first.type}': "
                "each rank then takes its own"
            )
        if len(self.devices) == local_world or first.type == "cpu":
            return self.devices[local % len(self.devices)]
        # A launcher that shows each rank one device, as srun can, shows it as the first.
        device = torch.device(first.type, 0 if count_devices(first.type) == 1 else local)
        exchange_current(device)
        return device

    def _begin_streams(self) -> None:
        """Let rank 0 draw what the script would, and every other rank numbers that follow from those of rank 0.

        A later run continues the streams of the one before, unless the script has drawn or seeded since.
        """
        if self.seed is not None and not self.progress_checker.is_seeded:
            random_state.seed_everything(self.seed)
            random_state.draw_as_rank(self.engine.dp_rank)
            self.progress_checker.is_seeded = True
            self._between_runs = StreamsBetweenRuns()
            return
        if is_spawned():  # They were derived as the process began.
            return
        before = self._between_runs
        self._between_runs = StreamsBetweenRuns()
        if all(self.gather(before.own is not None and before.are_continued(self.progress_checker))):
            assert before.own is not None
            random_state.restore(before.own)
            return
        # The ranks of a launcher may all have been seeded alike by the script: without this they would augment alike.
        random_state.restore(self.gather(random_state.capture() if self.rank == 0 else None)[0])
        random_state.draw_as_rank(self.rank)

    @contextmanager
    def _streams_to_save(self) -> Iterator[None]:
        """Between two runs, let a state have the streams that the next run continues, and not those of the script."""
        between = self._between_runs
        if between.own is None or not between.are_continued(self.progress_checker):
            yield
            return
        with random_state.isolated():
            random_state.restore(between.own)
            yield

    def teardown(self) -> None:
        """Leave nothing under way on the process group, and give the script the random streams of rank 0."""
        self._stop_flag.drop(is_failing=self._is_failing())
        super().teardown()
        if self._is_parallel and not is_spawned() and not self._is_failing():
            self._between_runs.give_back(self.rank, self.gather)

    def on_exception(self, error: BaseException) -> None:
        """Report at once that this rank fails, and look which other rank is the cause."""
        note_failure(error)
        if isinstance(error, Exception) and self._is_parallel:
            error.add_note(f"zae: in rank {self.rank} of {self.world_size}")
        super().on_exception(error)
        if self._is_parallel and isinstance(error, Exception) and (cause := find_failed_rank(error, self.timeout)):
            error.add_note(f"zae: {cause}")

    # -------------------------------------------------------------------------------------------------- the ranks

    def barrier(self) -> None:
        """Wait for every rank, unless an exception is being handled that the others may not have."""
        if not self._is_failing():
            super().barrier()

    # ------------------------------------------------------------------------------- what the ranks agree on

    def save_model(self, path: str | Path | None = None, **options: Any) -> Path:
        """Save the weights; where they lie in parts, all ranks call it, and raise the error of rank 0."""
        save = partial(super().save_model, path, **options)
        if self.engine.can_save_alone:
            return save()
        self.engine.rendezvous("save_model")
        return Group(self.rank, self.gather).together(save, Path(path or "the model"))[self.rank]

    @replaces
    def stop(self, reason: str = "stop() was called") -> None:
        """End the run on all ranks after the next step, whichever rank calls it; see `checkpoint`."""
        if not self._is_parallel:
            return super().stop(reason)
        self._stop_flag.reason = reason

    @replaces
    def request(self, action: str) -> None:
        """Ask for something on all ranks, whichever rank calls it; they agree on it as on `stop`."""
        if not self._is_parallel:
            return super().request(action)
        self._stop_flag.requests.add(action)

    def on_run_begin(self) -> None:
        """Reset the request to stop, and check that all ranks begin at the same place."""
        self._stop_flag.reason = None
        progress = self.progress_checker
        self._stop_flag.requests.clear()
        _check_places(self.gather((progress.epoch, progress.step, progress.epoch_batch)))
        if self._is_parallel:
            between_ranks.check_schedules(self.schedulers, self.gather)
        self._drift.agreed_at = progress.step
        super().on_run_begin()

    def on_validation_begin(self) -> None:
        """Note that the ranks meet at this step."""
        super().on_validation_begin()
        self._stop_flag.is_at_rendezvous = True

    def checkpoint(self) -> None:
        """Agree on whether to stop, and on what `request` was called with.

        After a step they agree on what was asked at the step before, so that no step waits for it. After a validation,
        an epoch and the last step of the run, where the ranks meet in any case, they agree on what is asked now.
        """
        if self._is_parallel:
            progress = self.progress_checker
            waits = not progress.epoch_batch or progress.step >= self.current_run.extent.last_step
            if waits:
                self._check_drift()
            reason, requests = self._stop_flag.agree(waits, self.gather)
            if reason is not None:
                super().stop(reason)
            for action in requests:
                super().request(action)
        super().checkpoint()

    def replicas(self) -> dict[str, Tensor]:
        """Return by name the tensors that each rank with that name must hold bitwise alike: the parameters.

        They are compared at the end of each epoch and whenever the state is saved. Buffers are not among them: those
        of a module may differ between ranks. A part of a sharded one has the name of that part.
        """
        tensors: dict[str, Tensor] = dict(named_parameters(self.unwrap()))
        known_ids = {id(tensor) for tensor in tensors.values()}
        others = (parameter for parameter in self.parameters if id(parameter) not in known_ids)
        tensors |= {f"parameter {index} outside of the model": tensor for index, tensor in enumerate(others)}
        return {shards.name_of_part(name, tensor): tensor for name, tensor in tensors.items()}

    def _check_drift(self) -> None:
        """Refuse to continue with ranks whose weights differ."""

        def hashes() -> dict[str, int]:
            replicas = self.replicas()
            return dict(zip(replicas, fingerprints(replicas.values())))

        self._drift.check(self.progress_checker.step, hashes, self.gather)

    def _is_failing(self) -> bool:
        """Return whether an exception of this run is being handled, so that the other ranks may not be here."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._outer_error

    # ----------------------------------------------------------------------------------------------------- state

    @property
    def _own_share(self) -> int:
        """The share whose position and log the trainer has: that of rank 0 before this process has joined others."""
        return self.engine.dp_rank if self._is_parallel else 0

    def state_dict(self) -> dict[str, Any]:
        """Add the position, random streams and log of each rank.

        All ranks call it.
        """
        asks = self._is_parallel and not self._is_failing() and not is_in_mode(self, ENTRIES)
        if asks:
            self.engine.rendezvous("state_dict")
            self._check_drift()
        with self._streams_to_save():
            state = super().state_dict()
        world = self._mesh().dp_world_size
        if world == 1:
            return state
        ranks = gather_dp(self.engine, RankStates.own_part(state)) if asks else self._rank_states.ranks
        return {**state, engine_of(type(self)): RankStates(world, ranks, self._own_share).as_entry()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the part of this rank; that of another number of ranks only where its position allows it."""
        name = engine_of(type(self), state)
        entry, rest = self.take(state, name, strict=False)
        if is_in_mode(self, ENTRIES):
            return super().load_state_dict(rest, strict)
        saved = RankStates.parse(name, entry)
        world = self._mesh().dp_world_size
        is_known = self._is_parallel
        super().load_state_dict(saved.state_for(self, rest, self._own_share, world, is_known=is_known), strict)
        saved.warn_of_others(type(self), self.rank, world)
        is_waiting = not is_known and self.loader_position.is_restored
        self._rank_states = saved.for_ranks(self, rest, world) if is_waiting else RankStates()
        self._placed = is_known


class StreamsBetweenRuns:
    """The random streams between two runs of ranks.

    The script draws as rank 0 then, on each rank: else it would divide its data in another way on each. The next run
    continues the streams of the one before, unless the script has drawn or seeded since.

    Attributes
    ----------
    own : dict, optional
        Those of this rank at the end of the last run, under a launcher; spawned ranks have ended.
    """

    def __init__(self) -> None:
        self.own: dict[str, Any] | None = None
        self._of_script: tuple[bytes, bytes, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "own": None}  # They are those of this process.

    def leave(self) -> None:
        """Note what the script is given as a run ends."""
        self._of_script = random_state.comparable()

    def give_back(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        """Keep the streams of this rank, and give the script those of rank 0; all ranks call it."""
        self.own = random_state.capture()
        random_state.restore(gather(self.own if rank == 0 else None)[0])
        self.leave()

    def are_continued(self, progress: Any) -> bool:
        """Return whether the next run continues them: within an epoch, or if the script has not drawn since."""
        return bool(progress.epoch_batch) or self._of_script in (None, random_state.comparable())


def run_rank(trainer: Any, name: str, is_shown: bool, **arguments: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Run a trainer that was sent to this rank; return what the one in the parent process takes over."""
    if is_shown:  # The notebook is in the parent.
        draw_elsewhere(show)
    result = getattr(trainer, name)(*arguments.values())
    rest = {name: getattr(trainer, name) for name in ("log_test", "grad_norm", "progress_checker")}
    return result, RankStates.read_state(trainer, in_parts=False), rest


def _check_places(places: list[tuple[int, int, int]]) -> None:
    """Refuse to begin a run with processes that are at different epochs, steps or batches."""
    if len(set(places)) > 1:
        stand = ", ".join(f"rank {rank} at step {place[1]}" for rank, place in enumerate(places))
        raise DistributedError(
            f"the processes do not continue from the same state: {stand}. All of them must load the same checkpoint: "
            "let save_path (or resume) name a folder that all machines share"
        )
