"""Jobs of submitit on a cluster of SLURM: the recipe of docs/engines/launching.md.

Needs root, Debian's packages iproute2, munge, slurm-client, slurmctld and slurmd, and submitit of PyPI.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from cluster.hosts import wait_for
from cluster.needs import need_modules
from cluster.slurm import Slurm
from cluster.training import DOCS, checkpoints

pytestmark = pytest.mark.cluster
SUBMIT = """
    import sys
    import submitit
    from recipe import Tasks

    executor = submitit.AutoExecutor("logs", cluster="slurm")
    executor.update_parameters(timeout_min=60, nodes=2, tasks_per_node=1)
    job = executor.submit(Tasks(), sys.argv[1])
    print(f"job {job.job_id}", flush=True)
    print(f"steps {job.results()}", flush=True)
"""
SLOW = (
    "        time.sleep({seconds} if 'SLURM_RESTART_COUNT' not in os.environ else 0)\n        inputs, targets = batch\n"
)


def write_recipe(seconds: float) -> None:
    """Write the recipe, with steps that take so many seconds in a job's first life, and a script that submits it."""
    texts = [(DOCS / name).read_text() for name in ("features/scale.md", "engines/launching.md")]
    first, *blocks = re.findall(r"```python\n(.*?)```", "".join(texts), re.DOTALL)
    [recipe] = [block for block in blocks if "import submitit" in block]
    base = first.partition('if __name__ == "__main__":')[0]
    slow = base.replace("        inputs, targets = batch\n", SLOW.format(seconds=seconds))
    assert slow != base
    Path("recipe.py").write_text(f"import os, time\n{slow}\n{recipe.partition('if __name__')[0]}")
    Path("submit.py").write_text(textwrap.dedent(SUBMIT))


@pytest.mark.parametrize("interruption", ["time limit", "preemption"])
def test_a_job_of_submitit_goes_on_after_an_interruption(slurm: Slurm, interruption: str) -> None:
    """Two tasks on two nodes are queued again, and end bitwise as those that nothing disturbs."""
    need_modules("submitit")
    write_recipe(seconds=0)
    modules = f"{Path.cwd()}:{DOCS.parent}"
    assert slurm.hosts.start("head", sys.executable, "submit.py", "undisturbed", PYTHONPATH=modules).end() == 0
    write_recipe(seconds=25)
    program = slurm.hosts.start("head", sys.executable, "submit.py", "run", PYTHONPATH=modules)
    wait_for(lambda: checkpoints("run") or not program.is_running, "checkpoint of the job")
    assert program.is_running, program.output
    (job,) = re.findall(r"job (\d+)", program.output)
    if interruption == "time limit":
        slurm.bring_the_limit_near(job)
        slurm.wait(job, lambda: slurm.job(job)["Restarts"] == "1", "restart")
        slurm.set_time_limit(job, 60)
    else:
        slurm.end(slurm.submit("--partition=high", "--nodes=3", "--exclusive", "--wrap", "true"))
    assert program.end() == 0, program.output
    assert "steps [4, 4]" in program.output
    assert slurm.end(job)["Restarts"] == "1"
    ends = [torch.load(f"{folder}/end.pt", weights_only=True) for folder in ("undisturbed", "run")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
