"""Rendezvous: from a launcher's variables to ranks, address and port."""

import shutil
import subprocess
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling_slurm.errors import ConfigError
from scaling_slurm.rendezvous import (
    FIRST_PORT,
    LAST_PORT,
    expand_nodelist,
    expand_tasks_per_node,
    read_rendezvous,
    rendezvous_port,
)

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu-a[07-08]",
    "SLURM_JOB_NODELIST": "gpu-a[07-09]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu-a08",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "gpu-a[07-08]",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
}


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("host-with-dash", ["host-with-dash"]),
        ("cn-001-b,cn-002-b", ["cn-001-b", "cn-002-b"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("a[1-2]n[3,5],b", ["a1n3", "a1n5", "a2n3", "a2n5", "b"]),
        ("gpu-a-[1-2]n3,127.0.0.[1-2]", ["gpu-a-1n3", "gpu-a-2n3", "127.0.0.1", "127.0.0.2"]),
    ],
)
def test_nodelist(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[1-]", "a[3-1]", "a[b]", "a[]", "a,", ",a", "a[1[2]]", "a b"])
def test_malformed_nodelist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        expand_nodelist(text)


prefixes = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z-]", fullmatch=True)


@given(
    st.lists(st.tuples(prefixes, st.integers(0, 200), st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=4)
)
def test_nodelist_of_padded_ranges(groups: list[tuple[str, int, int, int]]) -> None:
    text, names = [], []
    for prefix, first, length, width in groups:
        text.append(f"{prefix}[{first:0{width}d}-{first + length:0{width}d}]")
        padding = max(width, len(str(first)))
        names += [prefix + str(number).rjust(padding, "0") for number in range(first, first + length + 1)]
    assert expand_nodelist(",".join(text)) == names


@pytest.mark.skipif(not shutil.which("scontrol"), reason="no scontrol to compare with")
@pytest.mark.parametrize("text", ["n[098-101,7]", "gpu-a-[1-2],host-with-dash", "a[1-2]n[3,5],b[08-11]"])
def test_nodelist_as_scontrol_expands_it(text: str, tmp_path: object) -> None:
    configuration = f"{tmp_path}/slurm.conf"
    with open(configuration, "w") as file:
        file.write("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")
    found = subprocess.run(
        ["scontrol", "show", "hostnames", text], env={"SLURM_CONF": configuration, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert expand_nodelist(text) == found.stdout.split()


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]
    with pytest.raises(ConfigError, match="tasks per node"):
        expand_tasks_per_node("2(3)")


def test_step_of_several_tasks() -> None:
    found = read_rendezvous(STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank) == (3, 4, 1, 2, 1)
    assert (found.source, found.host, found.job_id, found.notes) == ("slurm", "gpu-a08", "4711", ())
    # The step's own list, not the job's.
    assert found.address == "gpu-a07"
    assert found.port == rendezvous_port("4711")


def test_uneven_tasks() -> None:
    environ = STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert read_rendezvous(environ).local_world_size == 1


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SHELL,
        # srun --pty bash
        BATCH_SHELL | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # salloc's interactive step
        BATCH_SHELL | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"},
        # Variables that leaked from elsewhere, and empty ones.
        {"RANK": "3", "WORLD_SIZE": "8"},
        BATCH_SHELL | {"SLURM_STEP_ID": "", "SLURM_ARRAY_TASK_ID": ""},
    ],
)
def test_alone_outside_of_a_parallel_step(environ: dict[str, str]) -> None:
    found = read_rendezvous(environ)
    assert (found.source, found.rank, found.world_size, found.address, found.job_id) == ("alone", 0, 1, None, None)


def test_the_job_scripts_own_variable_makes_a_step_of_one_task_count() -> None:
    environ = STEP | {
        "SCALING_RENDEZVOUS": "slurm",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "n1",
    }
    found = read_rendezvous(environ)
    assert (found.source, found.world_size, found.job_id) == ("slurm", 1, "4711")


def test_our_job_without_srun_does_not_train_alone_silently() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_ID is not set"):
        read_rendezvous(BATCH_SHELL | {"SCALING_RENDEZVOUS": "slurm"})
    with pytest.raises(ConfigError, match="batch or interactive"):
        read_rendezvous(STEP | {"SCALING_RENDEZVOUS": "slurm", "SLURM_STEP_ID": "4294967291"})


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="'mpi'"):
        read_rendezvous({"SCALING_RENDEZVOUS": "mpi"})


def test_suffix_of_the_site() -> None:
    assert read_rendezvous(STEP | {"SCALING_MASTER_SUFFIX": "i"}).address == "gpu-a07i"


def test_rank_0_knows_where_it_runs_better_than_the_list() -> None:
    environ = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    found = read_rendezvous(environ)
    assert found.address == "gpu-a08"
    assert "gpu-a07" in found.notes[0]


def test_exported_address_and_port_win_and_are_reported() -> None:
    found = read_rendezvous(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (found.address, found.port) == ("10.0.0.1", 1234)
    assert [note.split(" ")[0] for note in found.notes] == ["MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234"]


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_no_loopback_between_nodes(address: str) -> None:
    with pytest.raises(ConfigError, match="2 nodes"):
        read_rendezvous(STEP | {"MASTER_ADDR": address})
    local = {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURMD_NODENAME": "127.0.0.2"}
    assert read_rendezvous(STEP | local).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID is '4'.*from 0 to 3"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID is '2'.*from 0 to 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "4 tasks on 2 nodes but lists 3 tasks on 2 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "4 tasks on 2 nodes but lists 4 tasks on 1 nodes"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'.*65535"),
        ({"SLURM_RESTART_COUNT": "one"}, "SLURM_RESTART_COUNT is 'one'"),
        ({"SCALING_RENDEZVOUS": "slurm", "SLURM_NTASKS_PER_NODE": "4"}, "4 tasks but 2 nodes x 4.* = 8"),
    ],
)
def test_contradicting_variables_are_refused_with_the_numbers(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rendezvous(STEP | change)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE"])
def test_missing_variable(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_rendezvous(without(STEP, name))


def test_array_tasks_and_restarts_have_ports_of_their_own() -> None:
    array = STEP | {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"}
    found = read_rendezvous(array | {"SLURM_RESTART_COUNT": "2"})
    assert found.job_id == "4700_11"
    assert found.port == rendezvous_port("4700_11", 2)
    assert len({rendezvous_port("4700_11", restart) for restart in range(20)}) == 20


def test_ports_spread_over_the_whole_range() -> None:
    ports = [rendezvous_port(str(job)) for job in range(1_000_000, 1_010_000, 1000)]
    # Ids that are equal modulo 1000 do not meet, and none is outside of the range.
    assert len(set(ports)) == len(ports)
    assert all(FIRST_PORT <= port <= LAST_PORT for port in ports)
    assert max(ports) - min(ports) > 6000


@pytest.mark.parametrize("extra", [{}, STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}])
def test_torchrun_is_the_inner_launcher(extra: dict[str, str]) -> None:
    found = read_rendezvous(extra | TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank) == (5, 8, 1, 4, 1)
    assert (found.source, found.address, found.port) == ("torchrun", "head", 29400)


def test_torchrun_once_a_node() -> None:
    with pytest.raises(ConfigError, match="torchrun 2 times"):
        read_rendezvous(STEP | TORCHRUN)


def test_variables_like_torchruns_do_not_hide_our_step() -> None:
    exported = without(TORCHRUN, "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    assert read_rendezvous(STEP | exported | {"MASTER_ADDR": "head"}).source == "slurm"
    assert read_rendezvous(TORCHRUN | {"TORCHELASTIC_RUN_ID": ""}).source == "torchrun"
