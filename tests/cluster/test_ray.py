"""Workers of Ray Train are ranks: the recipe of docs/engines/launching.md, with a worker that is killed.

Needs the package ray[train] of PyPI: pip install -e '.[cluster]'.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from cluster.needs import need_modules

DOCS = Path(__file__).parents[2] / "docs"
KILL = """        if torch.distributed.is_initialized() and self.rank == 1 and self.progress_checker.step == 3:
            try:
                os.close(os.open({file!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch
"""
HEAD = """
import sys, ray
context = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
DRIVE = """
if __name__ == "__main__":
    folder = os.path.abspath(sys.argv[1])
    if sys.argv[1] == "one":
        train(["cpu"], folder).save_model(f"{folder}/end.pt")
    else:
        ray.init(address=sys.argv[2])
        on_ray(folder)
"""


def script(batch_size: int, kills: bool) -> str:
    """Return the first block of scale.md and the recipe, with a file that tells of a worker that was killed."""
    texts = [(DOCS / name).read_text(encoding="utf-8") for name in ("features/scale.md", "engines/launching.md")]
    first, *blocks = re.findall(r"```python\n(.*?)```", "".join(texts), re.DOTALL)
    [recipe] = [block for block in blocks if "import ray.train" in block]
    base = first.partition('if __name__ == "__main__":')[0].replace("16 // len(devices)", str(batch_size))
    if kills:
        line = "        inputs, targets = batch\n"
        assert line in base
        base = base.replace(line, KILL.format(file=str(Path("killed").absolute())))
    return f"import os, signal, sys\n{base}\n{recipe}\n{DRIVE}"


def start(folder: str, environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """Start Ray on this machine; return its process, and its address, which is empty where it did not start."""
    with open("ray.log", "w") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        line = [sys.executable, "-c", HEAD, folder]
        head = subprocess.Popen(line, text=True, env=environment, start_new_session=True, **pipes)
    assert head.stdout
    ready, _, _ = select.select([head.stdout], [], [], 80)
    return head, head.stdout.readline().strip() if ready else ""


@contextmanager
def cluster(environment: dict[str, str]) -> Iterator[str]:
    """Start Ray, and return its address.

    Its raylet ends where its agents take more than 15 s to start, which is fixed in it, and happens on a machine under
    load: then Ray is started again. The path of its folder is short, because that of a socket has at most 107 bytes.
    """
    for _ in range(4):
        with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
            head, address = start(short, environment)
            try:
                if address:
                    yield address
                    return
            finally:
                head.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    head.wait(20 if address else 0)
                with suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)
    raise AssertionError(Path("ray.log").read_text()[-5000:])


@pytest.mark.cluster
def test_a_worker_is_killed_and_brought_back() -> None:
    """Two workers train as one process, to rounding; where one was killed, they end bitwise as if it had not been."""
    need_modules("ray")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(DOCS.parent)}
    # jsonschema, which each process of Ray imports, builds a grammar in 7 s where this package of Jupyter is installed.
    Path("without").mkdir()
    Path("without/rfc3987_syntax.py").write_text("raise ImportError")
    environment["PYTHONPATH"] += os.pathsep + str(Path("without").absolute())
    environment |= {"RAY_agent_register_timeout_ms": "200000", "RAY_raylet_start_wait_time_s": "60"}
    environment |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200", "RAY_worker_register_timeout_seconds": "200"}
    environment |= {"RAY_worker_niceness": "0"}  # Else 15: a machine under load starts no worker in time.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # For this cluster alone.
    ends = {}
    with cluster(environment) as address:
        for name, batch_size in (("one", 16), ("whole", 8), ("run", 8)):
            Path(f"{name}.py").write_text(script(batch_size, kills=name == "run"))
            line = [sys.executable, f"{name}.py", name, address]
            done = subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment)
            assert done.returncode == 0, done.stderr[-5000:]
            assert [each.name for each in sorted(Path(name).glob("step-*"))][-1] == "step-00000008"
            assert Path("killed").exists() == (name == "run")
            ends[name] = torch.load(f"{name}/end.pt", weights_only=True)
            assert len(list(Path(name).glob("ledger-*.jsonl"))) == (1 if name == "one" else 2)
    for key, value in ends["whole"].items():
        assert torch.equal(value, ends["run"][key])
        assert float((value - ends["one"][key]).abs().max()) < 1e-6
