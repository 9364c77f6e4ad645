"""Ranks that start, fail, hang, are killed and interrupted: nothing is left, and the message says which one it was."""

from __future__ import annotations

import itertools
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
from faults import fingerprint
from rank_tasks import Task, build, loader

from zae import ConfigError, DistributedError, files
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.launching import _meeting_point, spawn
from zae.ranks import Report

ROOT = Path(__file__).resolve().parent.parent
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


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


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


def add_up(number):
    total = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(total)
    ports: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ports, listening())
    return (
        total.item(),
        dist.get_world_size(),
        os.environ["RANK"],
        torch.get_default_dtype(),
        list(itertools.chain(*ports)),
    )


def misbehave(how, who):
    assert dist.get_world_size() == 2
    Path(f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "exit":
            os._exit(0)
    dist.all_reduce(torch.zeros(1))


class Own(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, code, place):
        super().__init__(f"{code} at {place}")


class Raises(Task):
    """Fails on rank 1 in its third step, while rank 0 waits for the gradients."""

    def train_step(self, batch):
        if self.rank == 1 and self.progress_checker.step == 2:
            raise ValueError("bad sample")
        return super().train_step(batch)


# --------------------------------------------------------------------------------------------------- starting


def test_c8_loopback_only_and_two_at_once_and_a_given_port(monkeypatch):
    """F-C8, P-46: no socket of any rank or of the parent is open to the network; two runs at once; MASTER_PORT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = dict(os.environ)
    results, parents = {}, []
    names = ("first", "second")

    def run(name):
        results[name] = spawn(add_up, {"number": 1}, CPUS, timeout=30)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        parents += listening()
        time.sleep(0.05)
    for name in names:
        total, world, rank, dtype, ports = results[name]
        assert (total, world, rank, dtype) == (3.0, 2, "0", torch.float32)
        assert ports, name
        assert {address.split(":")[0] for address in ports} == {"0100007F"}
    assert {address.split(":")[0] for address in parents} == {"0100007F"}
    assert dict(os.environ) == before
    store, meeting = _meeting_point("env://", 5.0)
    assert meeting == f"tcp://127.0.0.1:{port}"
    assert f"0100007F:{port:04X}" in listening()
    del store


def test_p46_a_port_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DistributedError, match=f"port {port} of localhost cannot be used .*leave init_method out"):
            spawn(add_up, {"number": 1}, CPUS, init_method=f"tcp://localhost:{port}")
    for bad in ("tcp://", "udp://localhost:1", "env://"):
        with pytest.raises(ConfigError, match=r"left out|leave init_method out"):
            spawn(add_up, {"number": 1}, CPUS, init_method=bad)


def test_p38_scripts_without_a_guard_and_from_standard_input_are_refused_in_words(tmp_path):
    """P-38: what is typed into an interpreter cannot be imported elsewhere; a script needs its guard."""
    head = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom rank_tasks import *\nfrom zae.addons import *\n"
    body = "class Mine(Task):\n    pass\nbuild(Mine, (MultiGPUAddon,), ['cpu', 'cpu']).run(1, loader(4, 2))\n"
    Path("bare.py").write_text(head + body)
    typed = subprocess.run([sys.executable, "-"], input=head + body, capture_output=True, text=True, timeout=60)
    bare = subprocess.run([sys.executable, "bare.py"], capture_output=True, text=True, timeout=60)
    assert typed.returncode == bare.returncode == 1
    assert re.search("ConfigError: Mine: defined where the interpreter was typed into", typed.stderr)
    assert 'put what begins it under: if __name__ == "__main__":' in bare.stderr
    assert "before it began" in bare.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------- failing


@pytest.mark.parametrize("who", [0, 1])
def test_d5_a_killed_rank_is_named(who, monkeypatch):
    """F-D5: within 15 s after the kill, with rank and signal; nothing is left."""
    monkeypatch.setenv(MARK, mark := f"kill{who}-{os.getpid()}")
    begin = time.monotonic()
    with pytest.raises(DistributedError, match=rf"rank {who} of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\)"):
        spawn(misbehave, {"how": "kill", "who": who}, CPUS)
    ended = max(path.stat().st_mtime for path in Path().glob("rank-*"))
    assert time.time() - ended < 15
    assert time.monotonic() - begin < 60
    assert processes(mark) == []


def test_d6_a_stopped_rank_is_named_after_the_timeout(monkeypatch):
    """F-D6: a rank that does not go on ends with `timeout`, by its name; a rank that ends early is named too."""
    monkeypatch.setenv(MARK, mark := f"stop-{os.getpid()}")
    with pytest.raises(DistributedError, match=r"rank 1 \(process \d+\) of 2 did not answer within timeout=3 s"):
        spawn(misbehave, {"how": "stop", "who": 1}, CPUS, timeout=3)
    assert processes(mark) == []
    with pytest.raises(DistributedError, match=r"rank 0 of 2 \(process \d+\) ended with exit code 0 in the middle"):
        spawn(misbehave, {"how": "exit", "who": 0}, CPUS)
    assert processes(mark) == []


def test_p42_fd4_an_exception_of_one_rank_is_raised_here(monkeypatch, capfd, caplog):
    """P-42, F-D6: the type, the rank's number and its traceback; a type that cannot be made again is told in words.

    F-D4: that rank alone saves the state apart, and says what it is without and which checkpoint is whole.
    """
    monkeypatch.setenv(MARK, mark := f"raise-{os.getpid()}")
    add_ons = (MultiGPUAddon, StateManagerAddon)
    trainer = build(Raises, add_ons, ["cpu", "cpu"], save_path="run", save_every=1, keep_last=1)
    before = [value.clone() for value in trainer.model.state_dict().values()]
    with pytest.raises(ValueError, match=r"^bad sample \[rank 1 of 2\]") as caught:
        trainer.run(2, loader(16, 2))
    notes = "\n".join(caught.value.__notes__)
    assert "raised in rank 1 of 2; its traceback:" in notes
    assert 'raise ValueError("bad sample")' in notes
    assert "in epoch 1, step 3" in notes
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.state_dict().values()))
    assert processes(mark) == []
    assert sorted(path.name for path in Path("run").glob("[!.]*")) == ["crash-00000002", "step-00000002"]
    manifest, weights, state = files.load_checkpoint(Path("run", "crash-00000002"))
    assert (manifest["world_size"], manifest["info"]["rank"], manifest["info"]["in_step"]) == (2, 1, True)
    _, regular, expected = files.load_checkpoint(Path("run", "step-00000002"))
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


SLOW = """
    import os, signal, sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from rank_tasks import Task, build, loader
    from zae.addons import MultiGPUAddon, StateManagerAddon
    class Slow(Task):
        def train_step(self, batch):
            Path(f"rank-{{self.rank}}").write_text(str(os.getpid()))
            time.sleep(0.1)
            return super().train_step(batch)
    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Whoever runs the tests may ignore it.
        add_ons, options = (MultiGPUAddon,), {{}}
        if "--save" in sys.argv:
            add_ons, options = (MultiGPUAddon, StateManagerAddon), {{"save_path": "run", "save_every": 10**6}}
        build(Slow, add_ons, ["cpu", "cpu"], timeout=20.0, **options).run(1000, loader(16, 2))
"""


@pytest.mark.parametrize(
    ("number", "code", "save"),
    [
        (signal.SIGINT, -signal.SIGINT, []),
        (signal.SIGTERM, 143, ["--save"]),
        (signal.SIGKILL, -signal.SIGKILL, []),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_d3_what_ends_the_parent_ends_every_rank(number, code, save):
    """F-D3, F-D5, P-26: Ctrl-C, SIGTERM (saved first, by all ranks), and a kill that nobody can catch: none is left."""
    Path("slow.py").write_text(textwrap.dedent(SLOW.format(tests=str(TESTS))))
    mark = f"{number.name}-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "slow.py", *save], env={**os.environ, MARK: mark}, stderr=subprocess.PIPE
    ) as run:
        began(".", 2)
        assert len(processes(mark)) == 3
        run.send_signal(number)
        _, said = run.communicate(timeout=30)
    assert run.returncode == code, said.decode()
    wait_for(lambda: processes(mark) == [], 15)
    assert len(list(Path().glob("run/step-*"))) == len(save)
    if number == signal.SIGINT:
        assert said.decode().splitlines()[-1] == "KeyboardInterrupt"


# ------------------------------------------------------------------------------------------------- under torchrun


def torchrun(*arguments, mark="torchrun"):
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process):
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return text


RESTART = """
    import os, signal, sys, torch
    sys.path.insert(0, {tests!r})
    from rank_tasks import Task, build, loader, weights
    from zae.addons import MultiGPUAddon, StateManagerAddon
    class Dies(Task):
        def train_step(self, batch):
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            if first and self.rank == 1 and self.progress_checker.step == 5 and "--die" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(batch)
    folder = sys.argv[1]
    trainer = build(Dies, (MultiGPUAddon, StateManagerAddon), timeout=20.0, seed=1, save_path=folder,
                    save_every=1, resume="auto")
    metrics = trainer.run(2, loader(16, 2, 3))
    assert trainer.world_size == 2
    if trainer.is_main:
        torch.save(weights(trainer), folder + ".pt")
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        print(f"restart {{start}} world {{trainer.world_size}} step {{metrics['step']}}", flush=True)
"""


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path):
    """A rank is killed in step 6; torchrun starts both again, which go on to bitwise the same end."""
    Path("restart.py").write_text(textwrap.dedent(RESTART.format(tests=str(TESTS))))
    plain = torchrun("--standalone", "--nproc_per_node", 2, "restart.py", tmp_path / "plain")
    again = torchrun(
        "--standalone", "--nproc_per_node", 2, "--max-restarts", 2, "restart.py", tmp_path / "dies", "--die"
    )
    assert "restart 0 world 2 step 8" in output_of(plain)
    assert "restart 1 world 2 step 8" in output_of(again)
    ends = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("plain", "dies")]
    assert len(ends[0]) == len(ends[1])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_ddp_example_spawned_by_torchrun_and_by_two_agents():
    """P-46: examples/ddp.py started in three ways at once: world size 2, and the same accuracy."""
    example = ROOT / "examples" / "ddp.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "job"]
    agents = [torchrun("--nnodes", 2, "--nproc_per_node", 1, *rendezvous, example) for _ in range(2)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    spawned = [subprocess.Popen([sys.executable, example], **options)]
    joined = output_of(torchrun("--standalone", "--nproc_per_node", 2, example))
    both = "".join(output_of(agent) for agent in agents)
    plain = [process.communicate(timeout=120) for process in spawned]
    assert [(process.returncode, said) for process, (_, said) in zip(spawned, plain)] == [(0, "")]
    shown = [re.findall(r"world size .*|test accuracy .*", text) for text in (*(out for out, _ in plain), joined, both)]
    assert all(each == shown[0] for each in shown)
    assert shown[0][0] == "world size 2"
    assert float(shown[0][1].split()[-1]) > 0.9


def test_the_seed_s_example_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "ddp_seed.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("Model saved as 'dummy_model_mgpu.pth'.\n", "")
    state = torch.load("dummy_model_mgpu.pth", weights_only=True)
    assert list(state) == ["weight", "bias"]
