"""Fit the saved state of an optimizer or a schedule to the present one, which is to load it, or refuse it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zae.errors import CheckpointMismatch
from zae.model.weights import fit_name
from zae.optim import parameters_of
from zae.optim.optimizer_state import wraps_others
from zae.schedulers.lengths import parts_of

__all__ = ["added_groups", "check_rates", "grow_lambdas", "in_present_order", "parameter_order"]

_RATES = ("lr", "initial_lr", "base_lrs", "_last_lr", "max_lr", "min_lr")
_MAX_SHOWN = 10


def added_groups(
    name: str, optimizer: Optimizer, state: Mapping[str, Any], named: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the groups that training has added, as a script does that unfreezes layer by layer."""
    if wraps_others(optimizer):
        return []
    count = len(optimizer.param_groups)
    present = {id(parameter) for parameter in parameters_of(optimizer)}
    added = []
    names_by_group = state["order"].get(name, ())
    for names, group in zip(names_by_group[count:], _groups_in(state["optimizer"][name])[count:]):
        parameters = [named.get(fit_name(key, named)) for key in names]
        if any(parameter is None or id(parameter) in present for parameter in parameters):
            return []  # It is refused, by its parameters.
        present.update(map(id, parameters))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "param_names" in group:
            settings["params"] = list(zip(group["param_names"], parameters))
        else:
            settings["params"] = parameters
        added.append(settings)
    return added


def _groups_in(state: Any) -> list[Any]:
    """Return the groups in the state of an optimizer; none where it has a form of its own."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return groups if isinstance(groups, list) else []


def in_present_order(
    name: str,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    names: Mapping[int, str],
    strict: bool,
    added: Sequence[Mapping[str, Any]],
) -> Any:
    """Return the saved state of an optimizer with its parameters in the present order."""
    saved_optimizer = state["optimizer"][name]
    if _has_own_form(optimizer, saved_optimizer):
        return saved_optimizer
    _check_groups(name, optimizer, saved_optimizer, [len(group["params"]) for group in added])
    for saved_group, present_group in zip(saved_optimizer["param_groups"], optimizer.param_groups):
        check_rates("optimizer", saved_group, present_group)
    present = parameter_order(optimizer, names)
    for group in added:
        parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
        present.append([names[id(parameter)] for parameter in parameters])
    present_names = dict.fromkeys([*names.values(), *itertools.chain(*present)])
    saved = []
    for keys in state["order"].get(name, ()):
        saved.append([fit_name(key, present_names) for key in keys])  # They may have the names of wrappers.
    if not saved or not present_names.keys() >= set(itertools.chain(*saved)):
        return saved_optimizer  # The names have changed: only the numbers are left.
    return _match_order(name, optimizer, saved_optimizer, saved, present, strict)


def parameter_order(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names, by id, of an optimizer's parameters by group; its own state has only their numbers."""
    outside = itertools.count()
    order = []
    for group in optimizer.param_groups:
        order.append([names.get(id(parameter)) or f"outside {next(outside)}" for parameter in group["params"]])
    return order


def _match_order(
    name: str, optimizer: Optimizer, state: Any, saved: list[list[str]], present: list[list[str]], strict: bool
) -> Any:
    """Return a state in the present order of the parameters.

    Those that a script takes out of a set have another order in each process: refused, such a run would never resume.
    """
    if saved == present:
        return state
    places: dict[str, Any] = {}
    for keys, group in zip(saved, state["param_groups"]):
        places |= zip(keys, group["params"])
    differ = sorted(places.keys() ^ set(itertools.chain(*present)))
    with_values = [place for place in places.values() if place in state["state"]]
    if not differ and (len(with_values) != 1 or len(places) == 1):
        numbers = {places[key]: number for number, key in enumerate(itertools.chain(*present))}
        groups = []
        for group, keys in zip(state["param_groups"], present):
            # torch's own list of names would be in the old order.
            settings = {key: value for key, value in group.items() if key != "param_names"}
            groups.append({**settings, "params": [numbers[places[key]] for key in keys]})
        values = {numbers.get(place, place): value for place, value in state["state"].items()}
        return {**state, "state": values, "param_groups": groups}
    if not strict:
        return state
    change = "with its parameters in another order"
    if differ:
        change = f"with other parameters ({', '.join(differ[:_MAX_SHOWN])})"
    raise CheckpointMismatch(
        f"optimizer {name} ({type(optimizer).__name__}) was saved {change}; build it as it was, or load only the "
        "weights: apply_weights(path)"
    )


def _has_own_form(optimizer: Optimizer, state: Any) -> bool:
    """Return whether an optimizer, mostly a wrapper of another one, has a state that only it can read."""
    is_own = type(optimizer).state_dict is not Optimizer.state_dict
    return is_own and isinstance(state, Mapping) and not {"state", "param_groups"} <= state.keys()


def _check_groups(name: str, optimizer: Optimizer, state: Any, added: Sequence[int]) -> None:
    """Refuse an optimizer's state that belongs to other parameters, before anything is loaded.

    ``added`` has the sizes of the groups that the optimizer will have besides.
    """
    entries = state.get("state") if isinstance(state, Mapping) and "param_groups" in state else None
    # What belongs to no parameter has a name, and any value: MADGRAD counts its steps in state["k"].
    of_parameters = [None]
    if isinstance(entries, Mapping):
        of_parameters = [value for key, value in entries.items() if type(key) is int]
    if not all(isinstance(of_parameter, Mapping) for of_parameter in of_parameters):
        raise CheckpointMismatch(f"the state of optimizer {name} is not one of a torch optimizer")
    saved = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups] + [*added]
    if saved != present:
        has_grown = saved[: len(present)] == present
        raise CheckpointMismatch(
            f"optimizer {name} ({type(optimizer).__name__}) has parameter groups of {present} parameters, but the "
            f"state was saved with {saved}; build it as it was"
            + (
                " (a group that training has added: in load_state_dict() of your class, before super())"
                if has_grown
                else ""
            )
            + ", or load only the weights: apply_weights(path)"
        )
    for group, saved_group in zip(optimizer.param_groups, state["param_groups"]):
        # Another version of torch may add settings; where each lacks some of the other, the classes differ.
        missing = sorted(set(optimizer.defaults) - set(saved_group))
        surplus = sorted(set(saved_group) - set(group))
        if missing and surplus:
            raise CheckpointMismatch(
                f"the state of optimizer {name} was saved by another class than {type(optimizer).__name__}: it has no "
                f"{', '.join(missing)}, but {', '.join(surplus)}. Build the optimizer as it was, or load only the "
                "weights: apply_weights(path)"
            )


def check_rates(part: str, saved: Any, present: Any) -> None:
    """Refuse values that are not finite numbers where an optimizer or a scheduler has a number."""
    for name in (saved.keys() & present.keys()) - {"params"}:  # A parameter may be lazy.
        value = saved[name]
        pairs: Iterable[tuple[Any, Any]] = [(value, present[name])]
        if isinstance(present[name], (list, tuple)) and isinstance(value, (list, tuple)):
            pairs = zip(value, present[name])
        for old, new in pairs:
            if _is_number(new) and not _is_number(old):
                raise _refusal(part, name, value, "a number")
            if name in _RATES and _is_number(old) and not (math.isfinite(float(old)) and float(old) >= 0):
                raise _refusal(part, name, value, "a rate")


def _is_number(value: object) -> bool:
    """Return whether a value is a number, or a tensor with one."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _refusal(part: str, name: str, value: object, kind: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the state of the {part} has {name}={value!r:.60}, which is not {kind}; load another checkpoint"
    )


def grow_lambdas(scheduler: Any) -> None:
    """Give a schedule of functions, and those within it, one for each group of its optimizer, if it has only one."""
    for part in [scheduler, *parts_of(scheduler)]:
        functions = getattr(part, "lr_lambdas", None)
        if isinstance(functions, list) and functions and all(function is functions[0] for function in functions):
            missing = len(part.optimizer.param_groups) - len(functions)
            part.lr_lambdas = functions + functions[:1] * missing  # Another list: on an error the old one is put back.
