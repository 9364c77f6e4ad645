"""A composed class as an object: name, signature, help, pickling, the cache, and add-ons found by name."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import itertools
import multiprocessing
import pickle
import pydoc
import weakref

import pytest
import torch

from kit.lines import LOCAL, TRACED, InnerAddon, OuterAddon, Task, WrappingAddon, batches, make, weights
from kit.scripts import Script
from zae import AddOnBase, AddOnConflict, AddOnError, AddOnRequirement, OptionError, Trainer
from zae.addons import AMPAddon, EMAAddon, StateManagerAddon

# ----------------------------------------------------------------------------------- what the class says of itself


def test_name_and_repr():
    made = Task.add_on(AMPAddon, StateManagerAddon)
    assert made.__name__ == made.__qualname__ == "Task[StateManagerAddon, AMPAddon]"
    assert repr(made) == f"<class '{Task.__module__}.Task[StateManagerAddon, AMPAddon]'>"
    trainer = make(Task.add_on(AMPAddon))
    assert repr(trainer) == "Task[AMPAddon](model=Linear, device=cpu, mode=train, epoch=0, step=0)"


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(LOCAL, 2)), ids=lambda pair: "-".join(a.__name__ for a in pair)
)
def test_the_signature_is_what_is_accepted(pair, tmp_path):
    """``inspect.signature`` of every pair: each option is taken, and nothing else is."""
    made = Task.add_on(*pair)
    parameters = inspect.signature(made).parameters
    own = {n for a in pair for n, p in inspect.signature(a.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY}
    core = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert set(parameters) == own | core
    assert list(parameters)[:5] == ["model", "device", "mode", "optimizer", "scheduler"]
    values = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    values |= {"model": torch.nn.Linear(3, 1), "device": "cpu", "mode": "test"}
    if "save_path" in parameters:
        values["save_path"] = tmp_path / "run"
    assert set(values) == set(parameters)
    made(**values)
    with pytest.raises(OptionError, match=r"unknown argument 'nonsense_zzz'"):
        made(**values, nonsense_zzz=1)


def test_help_lists_the_add_ons():
    made = Task.add_on(AMPAddon, StateManagerAddon)
    text = pydoc.render_doc(made, renderer=pydoc.plaintext)
    for add_on in (AMPAddon, StateManagerAddon):
        line = f"- {add_on.__name__}: {inspect.getdoc(add_on).splitlines()[0]}"
        assert line in made.__doc__
        assert line in text
    assert "Fit a line." in made.__doc__
    assert "precision: str | Sequence[str] = 'auto'" in text.replace("'str | Sequence[str]'", "str | Sequence[str]")
    assert "save_path" in text.split("\n\n")[1]


def test_a_class_without_a_docstring_has_one_line_all_the_same():
    class Bare(Trainer):
        pass

    class BareAddon(AddOnBase):
        pass

    assert Bare.add_on(BareAddon).__doc__.splitlines()[0] == "Bare with add-ons, outermost first:"


# ---------------------------------------------------------------------------------------------------- pickling


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_classes_and_instances_pickle(protocol):
    for made in (Task, Task.add_on(AMPAddon, EMAAddon), Task.add_on(*TRACED, WrappingAddon)):
        assert pickle.loads(pickle.dumps(made, protocol)) is made
    trainer = make(Task.add_on(InnerAddon, EMAAddon, WrappingAddon))
    trainer.run(1, batches())
    again = pickle.loads(pickle.dumps(trainer, protocol))
    assert type(again) is type(trainer)
    assert torch.equal(weights(again), weights(trainer))
    assert again.progress_checker == trainer.progress_checker
    again.run(1, batches())
    trainer.run(1, batches())
    assert torch.equal(weights(again), weights(trainer))


def test_deepcopy():
    made = Task.add_on(*TRACED)
    assert copy.deepcopy(made) is made
    assert copy.copy(made) is made
    trainer = make(made)
    again = copy.deepcopy(trainer)
    trainer.run(1, batches())
    assert not torch.equal(weights(again), weights(trainer))
    again.run(1, batches())
    assert torch.equal(weights(again), weights(trainer))


def _in_another_process(trainer, cls, queue):
    trainer.run(1, batches())
    queue.put(
        (type(trainer) is cls, cls is Task.add_on(InnerAddon, EMAAddon, WrappingAddon), weights(trainer).tolist())
    )


@pytest.mark.exhaustive
def test_a_composed_trainer_travels_to_a_spawned_process():
    cls = Task.add_on(InnerAddon, EMAAddon, WrappingAddon)
    trainer, twin = make(cls), make(cls)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(trainer, cls, queue))
    process.start()
    same_class, is_cached, result = queue.get(timeout=600)
    process.join(600)
    assert (process.exitcode, same_class, is_cached) == (0, True, True)
    twin.run(1, batches())
    assert result == weights(twin).tolist()


def test_a_class_made_in_a_function_does_not_pickle_and_says_its_name():
    """The object that cannot travel is named."""

    class Local(Task):
        pass

    for made in (Local, Local.add_on(InnerAddon)):
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"Local"):
            pickle.dumps(made)


# -------------------------------------------------------------------------------------------------------- the cache


def test_the_cache_keeps_no_class_alive():
    class LocalAddon(AddOnBase):
        def clip(self):
            super().clip()

    class Local(Task):
        pass

    made = (Task.add_on(LocalAddon), Local.add_on(LocalAddon, EMAAddon), Local.add_on(WrappingAddon), LocalAddon, Local)
    make(made[0]).run(1, batches(1))
    with pytest.raises(OptionError):
        make(made[1], nonsense_zzz=1)
    seen = [weakref.ref(cls) for cls in made]
    del made, LocalAddon, Local
    gc.collect()  # The composed classes, and with them the cache's keys, which hold the add-ons;
    gc.collect()  # then these.
    assert [ref() for ref in seen] == [None] * 5


def test_the_cache_keeps_what_is_in_use():
    made = Task.add_on(OuterAddon, EMAAddon)
    number = id(made)
    gc.collect()
    assert id(Task.add_on(EMAAddon, OuterAddon)) == number


# ------------------------------------------------------------------------------------------------- add-ons by name


def test_add_ons_are_found_by_their_name():
    assert Task.add_on("AMPAddon", "EMA") is Task.add_on(AMPAddon, EMAAddon)
    with pytest.raises(AddOnError, match=r"no add-on is called 'AMPAdon'; did you mean 'AMPAddon'?"):
        Task.add_on("AMPAdon")
    with pytest.raises(AddOnError, match=r"no add-on is called 'state'; did you mean 'StateManagerAddon'"):
        Task.add_on("state")
    with pytest.raises(AddOnError, match=r"no add-on is called 'qqq'; installed are AMPAddon, "):
        Task.add_on("qqq")


def _install(folder, name, entries):
    """A distribution as pip leaves it behind."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zae.addons]\n" + "\n".join(entries) + "\n")


def test_names_of_other_distributions(tmp_path, monkeypatch):
    (tmp_path / "zae_other_parts.py").write_text(
        "from zae import AddOnBase\nclass RemoteAddon(AddOnBase):\n    'Far away.'\n"
    )
    _install(tmp_path, "zae-other", ["RemoteAddon = zae_other_parts:RemoteAddon", "GoneAddon = zae_gone:GoneAddon"])
    monkeypatch.syspath_prepend(tmp_path)
    assert Task.add_on("Remote").__name__ == "Task[RemoteAddon]"
    with pytest.raises(AddOnRequirement, match=r"'GoneAddon' .* cannot be imported: No module named 'zae_gone'"):
        Task.add_on("GoneAddon")
    _install(tmp_path, "zae-more", ["RemoteAddon = zae_more_parts:RemoteAddon"])
    importlib.invalidate_caches()
    with pytest.raises(AddOnConflict, match=r"installed more than once: .*zae-more.*; import the class and pass it"):
        Task.add_on("RemoteAddon")


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_clp": 1.0},
            r"unknown argument 'gradient_clp' for Task\[AMPAddon\]; did you mean 'gradient_clip'\?",
        ),
        ({"precison": "bf16"}, r"unknown argument 'precison' for Task\[AMPAddon\]; did you mean 'precision'\?"),
        ({"save_path": "x"}, r": it is an option of StateManagerAddon; add it with .add_on\(StateManagerAddon\)"),
        ({"ema_decay": 0.9}, r"here it is decay \(EMAAddon\)"),
        ({"save_pth": "x"}, r"did you mean 'save_path', an option of StateManagerAddon\? Add it with .add_on\(StateM"),
        ({"zzzzzz": 1}, r"unknown argument 'zzzzzz' for Task\[AMPAddon\]; it has model, device, mode"),
        ({"model": torch.nn.Linear(1, 1)}, "got 'model' twice: by position and by name; keep one"),
    ],
)
def test_options_are_checked_before_any_init_runs(options, message):
    ran = []

    class Watched(Task):
        def __init__(self, *args, **kwargs):
            ran.append(1)
            super().__init__(*args, **kwargs)

    Watched.__name__ = "Task"
    with pytest.raises(OptionError, match=message):
        make(Watched.add_on(AMPAddon), **options)
    assert ran == []


def test_a_missing_option_and_too_many_positions():
    with pytest.raises(OptionError, match=r"needs 'save_path' \(StateManagerAddon\); write Task\[StateManager"):
        make(Task.add_on(StateManagerAddon))
    with pytest.raises(OptionError, match=r"takes 5 positional arguments \(model, device, mode, optimizer, scheduler\) "
                                          r"and got 6; name the others: log_bar"):  # fmt: skip
        Task(torch.nn.Linear(1, 1), "cpu", "train", None, None, True)


def test_the_message_for_an_unknown_option_survives_a_broken_installation():
    code = (
        "import sys\n"
        "for name in [each for each in sys.modules if each.split('.')[0] == 'zae']: del sys.modules[name]\n"
        "sys.modules['zae.addons.ema'] = None\n"
        "import zae, torch\n"
        "class T(zae.Trainer):\n"
        "    def train_step(self, batch): ...\n"
        "    def test_step(self, batch): ...\n"
        "try: T(torch.nn.Linear(1, 1), zzz=1)\n"
        "except zae.OptionError as error: sys.stdout.write(str(error))\n"
    )
    _, out, err = Script(code).end()
    assert "unknown argument 'zzz' for T; it has model" in out, err
