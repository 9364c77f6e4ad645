"""Ranks that start, fail, hang, are killed and interrupted: nothing is left, and the message says which one it was."""

from __future__ import annotations

import importlib
import itertools
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kit.faults import Child, fingerprint, wait_for
from kit.loggers import lines
from kit.rank_tasks import Task, build, forks, loader, same
from kit.scripts import Script, Torchrun, besides_progress
from zae import ConfigError, DistributedError
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.checkpoint.reader import load_checkpoint
from zae.distributed import spawn as launching
from zae.distributed.rank_process import Report
from zae.distributed.spawn import _rendezvous_point, spawn

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"
CPUS = [torch.device("cpu")] * 2
MARK = "ZAE_TEST_RUN"


def processes(mark):
    """Processes whose environment holds a mark, but for zombies: what a run has left."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                found.append((int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ")[:200]))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return [each for each in found if b"resource_tracker" not in each[1]]


def still_there(count=2):
    """The ranks that have left their number in the folder and that are not gone."""
    pids = [path.read_text() for path in Path().glob("rank-*")]
    assert len(pids) == count
    return [pid for pid in pids if Path("/proc", pid).exists() and ") Z " not in Path("/proc", pid, "stat").read_text()]


def began(folder, count):
    wait_for(lambda: len(list(Path(folder).glob("rank-*"))) == count)


# ---------------------------------------------------------------------------------------- what ranks are told to do


def listening():
    """The addresses that this process listens at."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def add_up(number, after=""):
    wait_for(Path(after).exists)
    total = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(total)
    ports: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ports, listening())
    return (
        total.item(),
        dist.get_world_size(),
        os.environ["RANK"],
        list(itertools.chain(*ports)),
    )


def misbehave(how, who, world=2):
    assert dist.get_world_size() == world
    Path(f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "exit":
            os._exit(0)
        if how == "linger":
            threading.Thread(target=wait_for_nothing).start()
    elif how == "stop" and dist.get_rank() == world - 1 > 1:
        wait_for_nothing()
    dist.all_reduce(torch.zeros(1))


def wait_for_nothing():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Own(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, code, place):
        super().__init__(f"{code} at {place}")


class Raises(Task):
    """Fails on rank 1 in its third step, while rank 0 waits for the gradients."""

    def train_step(self, batch):
        Path(f"rank-{self.rank}").write_text(str(os.getpid()))
        if self.rank == 1 and self.progress_checker.step == 2:
            logging.root.handlers.clear()  # Those of pytest, which a fork inherits.
            raise ValueError("bad sample")
        return super().train_step(batch)


# --------------------------------------------------------------------------------------------------- starting


def test_loopback_only_and_two_at_once_and_a_given_port(monkeypatch):
    """No socket of any rank or of the parent is open to the network; two runs at once; MASTER_PORT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with forks():  # What it imports sets a variable.
        before = dict(os.environ)
    results, parents = {}, []
    names = ("first", "second")

    def run(name):
        results[name] = spawn(add_up, {"number": 1, "after": name}, CPUS, timeout=120)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    with forks():
        for thread in threads:
            thread.start()
        wait_for(lambda: len(multiprocessing.active_children()) == 4)
    assert results == {}
    for name in names:
        Path(name).touch()
    while any(thread.is_alive() for thread in threads):
        parents += listening()
        time.sleep(0.05)
    for name in names:
        total, world, rank, ports = results[name]
        assert (total, world, rank) == (3.0, 2, "0")
        assert ports, name
        assert {address.split(":")[0] for address in ports} == {"0100007F"}
    assert {address.split(":")[0] for address in parents} == {"0100007F"}
    assert dict(os.environ) == before
    store, rendezvous_address = _rendezvous_point("env://", 5.0)
    assert rendezvous_address == f"tcp://127.0.0.1:{port}"
    assert f"0100007F:{port:04X}" in listening()
    del store


def test_a_port_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DistributedError, match=f"port {port} of localhost cannot be used .*leave init_method out"):
            spawn(add_up, {"number": 1}, CPUS, init_method=f"tcp://localhost:{port}")
    for bad in (
        "tcp://",
        "udp://localhost:1",
        "env://",
        "tcp://localhost:99999",
        "file:///no-such-folder/rendezvous_address",
    ):
        with pytest.raises(ConfigError, match=r"left out|leave init_method out"):
            spawn(add_up, {"number": 1}, CPUS, init_method=bad)


HEAD = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
HEAD += "from kit.rank_tasks import *\nfrom zae.addons import MultiGPUAddon\n"


MAKE = "Mine.add_on(MultiGPUAddon)(network(), ['cpu', 'cpu'], optimizer=torch.optim.SGD, log_bar=False)"
UNGUARDED = f"class Mine(Task):\n    pass\n{MAKE}.run(1, loader(4, 2))\n"


@pytest.mark.exhaustive
def test_a_script_without_a_guard_is_refused_in_words():
    Path("bare.py").write_text(HEAD + UNGUARDED)
    status, _, said = Script(Path("bare.py").absolute()).end()
    assert status == 1
    assert 'call run() under: if __name__ == "__main__":' in said
    assert 'begins its run under: if __name__ == "__main__":' in said.splitlines()[-1]


@pytest.mark.exhaustive
def test_what_is_typed_into_an_interpreter_cannot_be_imported_elsewhere():
    """All else runs."""
    made = MAKE.replace("Mine.", "Says.").replace("network()", "torch.nn.Linear(3, 1)")
    first = f"print('step', {made}.run(1, loader(4, 2))['step'], flush=True)\n"
    status, shown, said = Script(HEAD + first + UNGUARDED).end()
    assert status == 1
    # The workers of a rank's loader are started as those of the caller's: spawned, each epoch takes seconds.
    assert shown == f"torch.float32 {multiprocessing.get_start_method()}\nstep 1\n", said
    assert re.search(r"ConfigError: Mine cannot be sent .*Put it into a file.*from task import Mine\n$", said)


@pytest.mark.exhaustive
def test_a_condition_that_is_no_guard_is_refused_in_the_new_process(tmp_path):
    """Whatever else the script asks, the last line has the line to write."""
    make = "Task.add_on(MultiGPUAddon)(network(), ['cpu', 'cpu'], optimizer=torch.optim.SGD, log_bar=False)"
    Path("asking.py").write_text(f"{HEAD}if len(sys.argv) == 1:\n    {make}.run(1, loader(4, 2))\n")
    status, _, said = Script(Path("asking.py").absolute()).end()
    assert status == 1
    assert 'call run() under: if __name__ == "__main__":' in said
    assert 'begins its run under: if __name__ == "__main__":' in said.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------- failing


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank_is_named(who):
    """Long before the timeout of 600 s, with rank and signal; nothing is left."""
    killed = rf"rank {who} of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\)"
    with forks(), pytest.raises(DistributedError, match=killed):
        spawn(misbehave, {"how": "kill", "who": who}, CPUS)
    killed_at = max(path.stat().st_mtime for path in Path().glob("rank-*"))
    assert time.time() - killed_at < 100
    assert still_there() == []


def test_a_stopped_rank_is_named_after_the_timeout(monkeypatch):
    """A rank that does not go on ends with `timeout`, by its name, also after its work; so does an early end."""
    monkeypatch.setattr(launching, "GRACE_TIMEOUT_S", 1.0)  # Seconds that nobody is going to use.
    stopped = r"rank 1 \(process \d+\) and rank 2 \(process \d+\) of 3 did not answer within timeout=8 s"
    with forks(), pytest.raises(DistributedError, match=stopped):
        spawn(misbehave, {"how": "stop", "who": 1, "world": 3}, [torch.device("cpu")] * 3, timeout=8)
    assert still_there(3) == []
    Path("rank-2").unlink()
    ended = r"rank 0 of 2 \(process \d+\) ended with exit code 0 in the middle"
    with forks(), pytest.raises(DistributedError, match=ended):
        spawn(misbehave, {"how": "exit", "who": 0}, CPUS)
    assert still_there() == []
    lingers = r"^rank 1 of 2 \(process \d+\) had done its work and did not end within timeout=8 s"
    with forks(), pytest.raises(DistributedError, match=lingers):
        spawn(misbehave, {"how": "linger", "who": 1}, CPUS, timeout=8)
    assert still_there() == []


def test_an_exception_of_one_rank_is_raised_here(capfd, caplog):
    """The type, the rank's number and its traceback; a type that cannot be made again is told in words.

    That rank alone saves the state apart, and says what it is without and which checkpoint is whole.
    """
    add_ons = (MultiGPUAddon, StateManagerAddon)
    trainer = build(Raises, add_ons, ["cpu", "cpu"], save_path="run", save_every=1, keep_last=1)
    before = [value.clone() for value in trainer.model.state_dict().values()]
    with forks(), pytest.raises(ValueError, match=r"^bad sample \[rank 1 of 2\]") as caught:
        trainer.run(2, loader(16, 2))
    notes = "\n".join(caught.value.__notes__)
    assert "raised in rank 1 of 2; its traceback:" in notes
    assert 'raise ValueError("bad sample")' in notes
    assert "in epoch 1, step 3" in notes
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.state_dict().values()))
    assert still_there() == []
    assert sorted(path.name for path in Path("run").glob("[!.]*")) == ["crash-00000002", "step-00000002"]
    manifest, weights, state = load_checkpoint(Path("run", "crash-00000002"))
    assert (manifest["world_size"], manifest["info"]["rank"], manifest["info"]["in_step"]) == (2, 1, True)
    _, regular, expected = load_checkpoint(Path("run", "step-00000002"))
    assert fingerprint(weights, state["optimizer"]) == fingerprint(regular, expected["optimizer"])
    said = capfd.readouterr().err
    assert re.search(r"ValueError: the state is saved in \S*crash-00000002 by rank 1 of 2 alone; the newest regular "
                     r"checkpoint is \S*step-00000002", said)  # fmt: skip
    build(Task, (StateManagerAddon, MultiGPUAddon), save_path="other", reshard=True).load_state("run/crash-00000002")
    assert "saved by rank 1 of 2 alone" in caplog.text
    assert "not exactly" in caplog.text
    other = Report.of("failed", Own(7, "sea"), 0.0).rebuild(1, 2)
    assert isinstance(other, DistributedError)
    assert re.search(r"Own: 7 at sea \[rank 1 of 2\]", str(other))


class Slow(Task):
    """Takes its time, and says which process it is."""

    def train_step(self, batch):
        Path(f"rank-{self.rank}").write_text(str(os.getpid()))
        time.sleep(0.1)
        return super().train_step(batch)


def slow(*add_ons, **options):
    build(Slow, (MultiGPUAddon, *add_ons), ["cpu", "cpu"], timeout=120.0, **options).run(1000, loader(16, 2))


SLOW = f"""
import signal, sys
sys.path[:0] = {[str(TESTS), str(TESTS / "distributed")]!r}
sys.modules["tabulate"] = None  # Where torch imports it at exit, Python forgets that Ctrl-C ended the script.
from test_distributed import forks, slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # Whoever runs the tests may ignore it.
if __name__ == "__main__":
    with forks():
        slow()
"""


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_script_and_every_rank():
    """Once, in words; no process of it is left."""
    Path("slow.py").write_text(SLOW)
    mark = f"interrupted-{os.getpid()}"
    with subprocess.Popen([sys.executable, "slow.py"], env={**os.environ, MARK: mark}, stderr=subprocess.PIPE) as run:
        began(".", 2)
        assert len(processes(mark)) == 3
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=600)
    assert run.returncode == -signal.SIGINT, said.decode()
    assert said.decode().splitlines()[-1] == "KeyboardInterrupt"
    wait_for(lambda: processes(mark) == [])


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, None)],
    ids=["TERM", "HUP", "KILL"],
)
def test_what_ends_the_parent_ends_every_rank(number, status, capfd):
    """SIGTERM, after all ranks have saved, and a kill that nobody can catch: no rank is left.

    One rank says that it is saved.
    """

    def run():
        logging.basicConfig(force=True)  # To standard error, and not to the handlers of pytest.
        with forks():
            slow(StateManagerAddon, save_path="run", save_every=10**6) if status else slow()

    parent = Child(run)
    began(".", 2)
    assert len(still_there()) == 2
    parent.signal(number)
    assert parent.wait().status == (status or -number)
    wait_for(lambda: still_there() == [])
    assert len(list(Path().glob("run/step-*"))) == bool(status)
    assert capfd.readouterr().err.count(f"signal {number}: saved at step") == bool(status)


# ------------------------------------------------------------------------------------------------- under torchrun


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process):
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text
    return text


RESTART = """
    import os, signal, sys, torch
    sys.path.insert(0, {tests!r})
    from kit.rank_tasks import Task, build, loader, weights
    from zae.addons import FSDPAddon, JSONLLoggerAddon, MultiGPUAddon, StateManagerAddon
    class Dies(Task):
        def train_step(self, batch):
            if is_dying and self.rank == 1 and self.progress_checker.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(batch)
    engine = {{"ddp": MultiGPUAddon, "fsdp": FSDPAddon}}[sys.argv[1]]
    for name in ("dies", "whole"):
        is_dying = name == "dies" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        trainer = build(Dies, (engine, StateManagerAddon, JSONLLoggerAddon), timeout=120.0, seed=1, log_every=1,
                        save_path=name, save_every=1, resume="auto", jsonl_path=name + ".jsonl",
                        save_format="sharded" if engine is FSDPAddon else "safetensors")
        metrics = trainer.run(2, loader(16, 2, 3))
        assert trainer.world_size == 2
        held = [value.clone() for value in trainer.model_state().values()]
        if trainer.is_main:
            torch.save(held, name + ".pt")
            print(f"{{name}}: world {{trainer.world_size}}, step {{metrics['step']}}", flush=True)
"""


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_ranks_that_torchrun_restarts_end_as_if_never_killed(engine):
    """To the bit, and with one log."""
    Path("restart.py").write_text(textwrap.dedent(RESTART.format(tests=str(TESTS))))
    alone = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", "alone"]  # As --standalone.
    with forks():
        agent = Torchrun(*alone, "--nproc_per_node", "2", "--max-restarts", "1", "restart.py", engine)
        status, out, said = agent.end()
    assert status == 0, said
    names = ("dies", "whole")
    assert {line for line in out.splitlines() if ": world 2" in line} == {f"{name}: world 2, step 8" for name in names}
    assert all(list(Path(name).glob("step-*")) for name in names)
    assert same(*(torch.load(f"{name}.pt", weights_only=True) for name in names))
    for name in names:
        records = lines(Path(f"{name}.jsonl"))
        assert [record["step"] for record in records if "train/loss" in record] == list(range(1, 9))


@pytest.mark.exhaustive
def test_the_ddp_example_is_started_in_two_ways():
    """By itself, and by two agents of torchrun: the world size is 2, and the accuracy the same."""
    example = ROOT / "examples" / "ddp.py"
    importlib.import_module("sklearn.datasets")  # Here once, and not in each of the forks.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "job"]
    joins = ["--nnodes", "2", "--nproc_per_node", "1", *rendezvous, str(example)]
    with forks():
        agents, plain = [Torchrun(*joins) for _ in range(2)], Script(example)
        ended = [each.end() for each in (*agents, plain)]
    assert [status for status, *_ in ended] == [0, 0, 0], ended
    (_, one, _), (_, other, _), (_, out, said) = ended
    assert besides_progress(said) == ""
    both = one + other
    shown = [re.findall(r"world size .*|test accuracy .*", text) for text in (out, both)]
    assert all(each == shown[0] for each in shown)
    assert shown[0][0] == "world size 2"
    assert float(shown[0][1].split()[-1]) > 0.9


NODES = """
    import os, signal, sys, torch
    sys.path.insert(0, {tests!r})
    from kit.rank_tasks import Task, build, loader
    from zae.addons import FSDPAddon, StateManagerAddon
    class Dies(Task):
        def train_step(self, batch):
            if is_dying and self.rank == 1 and self.progress_checker.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(batch)
    name, is_dying = sys.argv[1], sys.argv[1] == "dies" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    trainer = build(Dies, (FSDPAddon, StateManagerAddon), timeout=120.0, seed=1, save_path=name, save_every=1,
                    resume="auto", save_format="sharded")
    trainer.run(2, loader(16, 2, 3))
    assert (trainer.world_size, os.environ["GROUP_WORLD_SIZE"], trainer.progress_checker.step) == (2, "2", 8)
    held = [value.clone() for value in trainer.model_state().values()]
    if trainer.is_main:
        torch.save(held, name + ".pt")
"""


@pytest.mark.exhaustive
def test_two_agents_of_torchrun_with_shards(tmp_path):
    """Two nodes as launching.md starts them, here on one host: killed and restarted, they end as if never killed."""
    Path("nodes.py").write_text(textwrap.dedent(NODES.format(tests=str(TESTS))))
    for name in ("dies", "whole"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        line = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id {name} --rdzv_endpoint localhost:{port}"
        agents = [torchrun(*line.split(), "--max-restarts", "3", "nodes.py", name) for _ in range(2)]
        for agent in agents:
            output_of(agent)
    ends = [torch.load(f"{name}.pt", weights_only=True) for name in ("dies", "whole")]
    assert same(*ends)


def test_the_seed_s_example_runs():
    with forks():
        script = Script(ROOT / "examples" / "ddp_seed.py")
    status, out, said = script.end()
    assert (status, out, besides_progress(said)) == (0, "Model saved as 'runs/dummy_model_mgpu.pth'.\n", "")
    state = torch.load("runs/dummy_model_mgpu.pth", weights_only=True)
    assert list(state) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("found", "rank", "world"),
    [
        ("RANK=1", "1", None),
        ("WORLD_SIZE=2", None, "2"),
        ("RANK=0, WORLD_SIZE=x", "0", "x"),
        ("RANK=2, WORLD_SIZE=2", "2", "2"),
    ],
)
def test_half_of_an_environment_of_ranks_is_refused_at_once(found, rank, world, monkeypatch):
    """One process would train in silence, or wait for the whole time limit."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=f"the environment has {found}; .*torchrun"):
        build(Task, (MultiGPUAddon,))


def test_one_process_of_a_launcher_that_sets_a_name_alone_trains(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)
    trainer = build(Task, (MultiGPUAddon,))
    assert trainer.run(1, loader(8, 2))["step"] == 4
    assert trainer.world_size == 1


NEWER_NAMES = """
import torch, zae
from zae.addons import MultiGPUAddon

class Task(zae.Trainer):
    def train_step(self, batch):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.fp32_precision == "ieee"
        return {"loss": self.model(batch).square().mean()}
    test_step = train_step

if __name__ == "__main__":
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.fp32_precision = "ieee"
    trainer = Task.add_on(MultiGPUAddon)(torch.nn.Linear(2, 1), ["cpu"] * 2, optimizer=torch.optim.SGD)
    trainer.run(1, [torch.ones(4, 2)] * 2)
    print("trained", trainer.progress_checker.step)
"""


@pytest.mark.exhaustive
def test_ranks_take_over_the_precision_of_float32_in_the_newer_names(tmp_path):
    """A script of its own: torch does not read the older names in a process that has used the newer ones."""
    script = tmp_path / "script.py"
    script.write_text(NEWER_NAMES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "trained 1" in done.stdout, done.stderr[-3000:]
