import json
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from scaling_slurm.core.config import TopologyConfig
from scaling_slurm.core.topology import topology as module
from scaling_slurm.core.topology.layout import Layout
from scaling_slurm.core.topology.topology import AXES, Topology, select_device
from scaling_slurm.errors import ConfigError, ScalingError
from scaling_slurm.rendezvous import Rendezvous, read_rendezvous
from tests.support.distributed import RankError, local_rendezvous, run_ranks

SHORT = timedelta(seconds=1)


def collectives(topology: Topology) -> dict[str, object]:
    group = topology.data_group
    value = torch.tensor([10.0**topology.rank])
    if group is not None:
        dist.all_reduce(value, group=group)
    assert topology.mesh is not None
    return {
        "data_sum": value.item(),
        "world_sum": topology.all_reduce(torch.tensor([10.0**topology.rank])).item(),
        "objects": topology.all_gather_object({"rank": topology.rank}),
        "from_one": topology.broadcast_object(f"rank {topology.rank}", source=1),
        "coordinate": topology.mesh.get_coordinate(),
        "data_rank": topology.data_rank,
        "axes": {axis: dist.get_process_group_ranks(topology.mesh.get_group(axis)) for axis in AXES},
        "backend": dist.get_backend(topology.world_group),
    }


def test_alone_has_no_process_group() -> None:
    rendezvous = read_rendezvous({})
    topology = Topology.initialize(rendezvous, TopologyConfig(), timeout=SHORT)
    assert (topology.layout, topology.rank, topology.mesh) == (Layout(), 0, None)
    assert topology.data_group is None
    assert topology.world_group is None
    assert not dist.is_initialized()
    assert topology.all_reduce(torch.tensor([2.0])).item() == 2.0
    assert topology.all_gather_object("x") == ["x"]
    assert topology.broadcast_object(3) == 3
    topology.barrier()
    topology.close()


def test_groups_follow_the_layout() -> None:
    config = TopologyConfig(tensor_parallel_size=2, pipeline_parallel_size=1)
    results = run_ranks(4, collectives, config=config)
    assert [result["data_sum"] for result in results] == [101.0, 1010.0, 101.0, 1010.0]
    assert [result["world_sum"] for result in results] == [1111.0] * 4
    assert results[3]["objects"] == [{"rank": rank} for rank in range(4)]
    assert [result["from_one"] for result in results] == ["rank 1"] * 4
    assert [tuple(result["coordinate"]) for result in results] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [result["data_rank"] for result in results] == [0, 0, 1, 1]
    assert results[2]["axes"] == {"pipeline": [2], "data": [0, 2], "tensor": [2, 3]}
    assert results[0]["backend"] == "gloo"


def raise_timeouts(topology: Topology) -> float:
    """A collective of a sub-group that its peer never joins: how long until it fails."""
    started = time.monotonic()
    if topology.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=topology.data_group)
    else:
        time.sleep(4)
    return time.monotonic() - started


def test_the_timeout_holds_for_sub_groups() -> None:
    config = TopologyConfig(tensor_parallel_size=2)
    assert run_ranks(4, raise_timeouts, config=config, group_timeout=2.0)[0] < 4.0


def test_thousands_of_ranks_on_a_fake_process_group() -> None:
    layout = Layout(tensor=8, pipeline=4, data=64)
    dist.init_process_group("fake", store=FakeStore(), rank=1000, world_size=layout.world_size)
    try:
        started = time.monotonic()
        mesh = module._build_mesh(layout, 1000, torch.device("cpu"), SHORT)
        assert time.monotonic() - started < 5
        assert tuple(mesh.get_coordinate() or ()) == layout.coordinates(1000) == (1, 61, 0)
        data = dist.get_process_group_ranks(mesh.get_group("data"))
        assert data == [512 + 8 * index for index in range(64)]
        assert dist.get_process_group_ranks(mesh.get_group("pipeline")) == [488, 1000, 1512, 2024]
    finally:
        dist.destroy_process_group()


def test_rank_0_takes_the_next_free_port_and_publishes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish = tmp_path / "rendezvous.json"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        store = module._open_store(local_rendezvous(0, 2, port), SHORT, publish)
    assert store.port > port
    assert json.loads(publish.read_text()) == {"address": "127.0.0.1", "port": store.port}
    assert f"port {port} is in use" in caplog.text
    client = module._open_store(local_rendezvous(1, 2, port), SHORT, publish)
    client.set("hello", "there")
    assert store.get("hello") == b"there"


def test_a_rank_waits_for_the_published_address(tmp_path: Path) -> None:
    publish = tmp_path / "rendezvous.json"
    timer = threading.Timer(0.3, lambda: publish.write_text('{"address": "node7", "port": 4}'))
    timer.start()
    assert module._await_address(publish, timedelta(seconds=10)) == ("node7", 4)
    timer.join()
    publish.unlink()
    with pytest.raises(ScalingError, match=r"rendezvous\.json did not appear within 1 s; rank 0 writes it") as error:
        module._await_address(publish, SHORT)
    assert "\n" not in str(error.value)


def initialize(rendezvous: Rendezvous) -> Topology:
    return Topology.initialize(rendezvous, TopologyConfig(), timeout=SHORT, publish=None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_unreachable_rank_0_is_one_line_with_its_address() -> None:
    port = free_port()
    with pytest.raises(ScalingError, match=f"rank 1 cannot connect to rank 0 at 127.0.0.1:{port}") as error:
        initialize(local_rendezvous(1, 2, port))
    assert "\n" not in str(error.value)


def test_missing_ranks_are_named() -> None:
    with pytest.raises(
        ScalingError, match=r"rank 0 of 3 could not join .* at 127.0.0.1:\d+ .*missing ranks: 1, 2"
    ) as e:
        initialize(local_rendezvous(0, 3, free_port()))
    assert "\n" not in str(e.value)


def test_ranks_of_another_world_size_are_refused() -> None:
    port = free_port()
    store = module._open_store(local_rendezvous(0, 2, port), SHORT, None)
    store.set("joined/0", "2")
    with pytest.raises(
        ConfigError, match=r"rank 1 was started as one of 4 ranks, but rank 0 at 127\.0\.0\.1:\d+ as one of 2"
    ):
        initialize(local_rendezvous(1, 4, port))


def test_a_layout_that_does_not_fit_fails_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="does not divide the world size 3"):
        Topology.initialize(local_rendezvous(0, 3), TopologyConfig(tensor_parallel_size=2), timeout=SHORT)


def thread_names() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def close(topology: Topology) -> tuple[int, list[str]]:
    topology.all_reduce(torch.ones(1))
    before = len(thread_names())
    topology.close()
    topology.close()
    return before, [name for name in thread_names() if "gloo" in name or "store" in name]


def test_no_thread_outlives_the_groups() -> None:
    """A thread of gloo that runs while the interpreter shuts down can abort a process that has done all its work."""
    for before, left in run_ranks(2, close):
        assert before > 3
        assert left == []


def under_torchrun(topology: Topology, port: int) -> float:
    topology.close()
    environment = {
        "RANK": topology.rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": topology.rank,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "x",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, str(value))
        again = Topology.initialize(read_rendezvous(), TopologyConfig(), timeout=timedelta(seconds=20))
        total = again.all_reduce(torch.ones(1)).item()
    again.close()
    return total


def test_the_environment_of_torchrun() -> None:
    assert run_ranks(2, under_torchrun, free_port()) == [2.0, 2.0]


@pytest.mark.parametrize(("visible", "local_rank", "expected"), [(4, 3, 3), (1, 3, 0), (2, 3, 1)])
def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, expected: int) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert select_device(local_rank) == torch.device("cuda", expected)
    assert chosen == [torch.device("cuda", expected)]


def fail_in_topology(topology: Topology) -> None:
    raise ValueError(f"not {topology.layout}")


def test_errors_of_ranks_reach_the_test() -> None:
    with pytest.raises(RankError, match=r"not Layout\(tensor=1, pipeline=1, data=2\)"):
        run_ranks(2, fail_in_topology)
