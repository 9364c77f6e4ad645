"""Checkpoints on S3 over connections that are cut, slow, held and refused: s3fs, a proxy, and a server of moto.

Needs the packages s3fs, moto, flask and flask-cors of PyPI: pip install -e '.[cluster]'.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import fsspec
import pytest
from torch import nn

from cluster.object_store import Proxy
from kit import faults, hand
from zae import Trainer
from zae.addons import StateManagerAddon
from zae.addons.state_manager import FsspecCheckpointer
from zae.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.cluster
EPOCHS = 4
# How often the client tries again, and how long it waits, is its own: here not for a minute.
CLIENT = {"retries": {"max_attempts": 1}, "connect_timeout": 5, "read_timeout": 60}


class Task(Trainer):
    """A classifier with dropout."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


@pytest.fixture
def proxy(s3: int) -> Iterator[Proxy]:
    with closing(Proxy(s3)) as between:
        between.start()
        yield between


def build(proxy: Proxy, url: str, task: type[Trainer] | None = None, **options: Any) -> Any:
    """Return a trainer whose checkpoints pass the proxy."""
    at = f"http://127.0.0.1:{proxy.port}"
    store = FsspecCheckpointer.at(url, endpoint_url=at, config_kwargs=CLIENT, skip_instance_cache=True)
    options = {"save_path": "local", "save_every": 2, "keep_last": None, "resume": "auto", **options}
    return faults.build(task or Task, StateManagerAddon, checkpointer=store, **options)


def everything(trainer: Any) -> dict[str, str]:
    """Return what a run ends with.

    The position has the state of Python's `random`. With ``save_async=True`` the client draws from it in another
    thread, before it tries again.
    """
    return {key: value for key, value in faults.everything(trainer).items() if key != "position"}


def undisturbed() -> dict[str, str]:
    """Return what the run ends with where it saves on the disk."""
    trainer = faults.build(Task, StateManagerAddon, save_path="undisturbed", save_every=2, keep_last=None)
    trainer.run(EPOCHS, hand.loader())
    return everything(trainer)


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize("kind", ["cut", "refused"])
def test_a_save_that_does_not_arrive(
    bucket: str, proxy: Proxy, kind: str, save_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on with a warning that names the URL, later saves arrive, and so does the next run."""
    url = f"{bucket}/{kind}-{save_async}"

    def fail() -> None:
        proxy.cut_after, proxy.refuses = (3000, False) if kind == "cut" else (None, True)

    def recover() -> None:
        proxy.cut_after, proxy.refuses = None, False

    class TaskWithoutStore(Task):
        """Have no connections from step 5 to 9."""

        def train_step(self, batch: Any) -> Any:
            {5: fail, 9: recover}.get(self.progress_checker.step, lambda: None)()
            return super().train_step(batch)

    with caplog.at_level(logging.WARNING, "zae"):
        trainer = build(proxy, url, TaskWithoutStore, save_async=save_async, on_save_error="warn")
        trainer.run(2, hand.loader())
    assert proxy.n_cut + proxy.n_refused > 0
    assert url in caplog.text
    again = build(proxy, url)
    again.run(EPOCHS, hand.loader())
    assert everything(again) == undisturbed()


@pytest.mark.parametrize("save_async", [False, True])
def test_a_save_that_is_cut_ends_the_run_and_the_next_one_goes_on(bucket: str, proxy: Proxy, save_async: bool) -> None:
    """The error names the URL; what was saved before is there, and the next run goes on from it, bitwise."""
    url = f"{bucket}/ended-{save_async}"

    class TaskWithoutUploads(Task):
        """Lose each upload from step 5 on."""

        def train_step(self, batch: Any) -> Any:
            proxy.cut_after = 3000 if self.progress_checker.step >= 5 else None
            return super().train_step(batch)

    trainer = build(proxy, url, TaskWithoutUploads, save_async=save_async)
    with pytest.raises(CheckpointError, match=url):
        trainer.run(EPOCHS, hand.loader())
    proxy.cut_after = None
    again = build(proxy, url)
    again.setup()
    assert again.progress_checker.step in ((2, 4) if save_async else (4,))
    again.run(EPOCHS, hand.loader())
    assert everything(again) == undisturbed()


def test_training_goes_on_while_a_save_is_uploaded(bucket: str, proxy: Proxy) -> None:
    """With save_async an upload that stands still keeps no step waiting until the next save."""
    step = 0
    step_of_release = 0

    class TaskOfHeldUpload(Task):
        """Hold the upload of step 4 until a later step is made."""

        def train_step(self, batch: Any) -> Any:
            nonlocal step
            step = self.progress_checker.step
            if step == 3:
                proxy.is_held = True
            return super().train_step(batch)

    def release() -> None:
        nonlocal step_of_release
        with suppress(TimeoutError):
            faults.wait_for(lambda: step == 5)
        step_of_release = step
        proxy.is_held = False

    helper = threading.Thread(target=release)
    helper.start()
    trainer = build(proxy, f"{bucket}/held", TaskOfHeldUpload, save_async=True, save_every=4)
    trainer.run(EPOCHS, hand.loader())
    helper.join()
    assert step_of_release == 5
    assert everything(trainer) == undisturbed()


@pytest.mark.parametrize("save_async", [False, True])
def test_a_slow_connection(bucket: str, proxy: Proxy, save_async: bool) -> None:
    """Each checkpoint arrives whole, and a run on another machine goes on from the newest one, bitwise."""
    proxy.bytes_per_second = 40_000
    build(proxy, f"{bucket}/slow-{save_async}", save_async=save_async, save_every=5).run(2, hand.loader())
    again = build(proxy, f"{bucket}/slow-{save_async}", save_async=save_async, save_every=5, save_path="other")
    again.run(EPOCHS, hand.loader())
    assert everything(again) == undisturbed()


def test_a_mistyped_bucket_is_named_as_the_run_begins(bucket: str, proxy: Proxy) -> None:
    """It is not made, and nothing is trained."""
    url = f"{bucket}-mistyped/run"
    trainer = build(proxy, url)
    with pytest.raises(ConfigError, match=f"url='{url}': there is no bucket 'runs-mistyped'; correct the URL"):
        trainer.run(EPOCHS, hand.loader())
    assert trainer.progress_checker.step == 0
    assert fsspec.filesystem("s3", skip_instance_cache=True).ls("") == ["runs"]
