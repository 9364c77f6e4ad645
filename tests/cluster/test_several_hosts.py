"""Training over several hosts with torchrun: hosts and links that are lost, and what is finished elsewhere.

Needs root, and Debian's package iproute2. Each host is a network namespace with its own address; they share a disk.
"""

from __future__ import annotations

import sys
import time

import pytest

from cluster.hosts import Hosts, Program, wait_for
from cluster.training import TRAIN, checkpoints, has_ended_as_undisturbed

pytestmark = pytest.mark.cluster
SHARDED = '{"timeout": 20, "save_format": "sharded"}'
OPTIONS = {"ddp": '{"timeout": 20}', "fsdp": SHARDED, "tensor": SHARDED, "pipeline": SHARDED}


def start(
    hosts: Hosts, host: str, first: str = "host1", engine: str = "ddp", pause: float = 0.3, **how: int
) -> Program:
    """Start the agent of torchrun on a host, with one rank of two."""
    how = {"nnodes": 2, "nproc_per_node": 1, "max_restarts": 0, **how}
    line = [sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in how.items())]
    line += ["--rdzv_backend=c10d", "--rdzv_id=job1", f"--rdzv_endpoint={first}:29500"]
    # Else a host that joins later waits for an address that is not sent again.
    known = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    return hosts.start(
        host, *line, TRAIN, "run", "--engine", engine, "--pause", pause, "--options", OPTIONS[engine], **known
    )


def wait_for_checkpoint(*agents: Program) -> None:
    """Wait for a checkpoint that was not there; fail the test where an agent has ended before it."""
    known = checkpoints("run")
    wait_for(lambda: checkpoints("run") - known or any(not agent.is_running for agent in agents), "checkpoint", 400)
    assert checkpoints("run") - known, "\n".join(agent.output[-3000:] for agent in agents)


def wait_for_error(agent: Program) -> None:
    """Wait until the rank of an agent has ended with an error. The agent itself may wait for minutes more."""
    wait_for(lambda: "zae: in rank" in agent.output, "error of a rank", 400)


def end(*agents: Program) -> None:
    """Wait until the agents have ended, each with success."""
    for agent in agents:
        assert agent.end(400) == 0, agent.output[-5000:]


@pytest.mark.parametrize("engine", OPTIONS)
def test_a_host_that_is_lost_is_replaced(hosts: Hosts, engine: str) -> None:
    """The first host waits for another one, and both end bitwise as undisturbed."""
    first, second = (start(hosts, host, engine=engine, max_restarts=3) for host in ("host1", "host2"))
    wait_for_checkpoint(first, second)
    hosts.lose("host2")
    third = start(hosts, "host3", engine=engine, max_restarts=3)
    end(first, third)
    assert has_ended_as_undisturbed("run", engine)


def test_the_host_with_the_list_of_hosts_is_lost(hosts: Hosts) -> None:
    """The rank on the other one ends with an error; the job is started again, and ends bitwise as undisturbed."""
    agents = [start(hosts, host) for host in ("host1", "host2")]
    wait_for_checkpoint(*agents)
    hosts.lose("host1")
    wait_for_error(agents[1])
    hosts.kill_all("host2")
    end(*(start(hosts, host, first="host2", pause=0) for host in ("host2", "host3")))
    assert has_ended_as_undisturbed("run")


def test_a_link_that_is_down_for_two_seconds_is_not_noticed(hosts: Hosts) -> None:
    agents = [start(hosts, host) for host in ("host1", "host2")]
    wait_for_checkpoint(*agents)
    hosts.set_link("host2", "down")
    time.sleep(2)
    hosts.set_link("host2", "up")
    end(*agents)
    assert "resumed" not in agents[0].output
    assert has_ended_as_undisturbed("run")


def test_a_link_that_stays_down_ends_the_ranks(hosts: Hosts) -> None:
    """Both ranks end with an error; started again when the link is up, the job ends bitwise as undisturbed."""
    agents = [start(hosts, host) for host in ("host1", "host2")]
    wait_for_checkpoint(*agents)
    hosts.set_link("host2", "down")
    for agent, host in zip(agents, ("host1", "host2")):
        wait_for_error(agent)
        hosts.kill_all(host)
    hosts.set_link("host2", "up")
    end(*(start(hosts, host, pause=0) for host in ("host1", "host2")))
    assert has_ended_as_undisturbed("run")


def test_shards_of_two_hosts_are_finished_on_one(hosts: Hosts) -> None:
    """Two ranks of FSDP on two hosts; one host is lost, and both ranks go on together on the other."""
    agents = [start(hosts, host, engine="fsdp") for host in ("host1", "host2")]
    wait_for_checkpoint(*agents)
    hosts.lose("host1")
    wait_for_error(agents[1])
    hosts.kill_all("host2")
    end(start(hosts, "host2", first="host2", engine="fsdp", pause=0, nnodes=1, nproc_per_node=2))
    assert has_ended_as_undisturbed("run", "fsdp")
