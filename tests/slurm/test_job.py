"""What Slurm is asked for, and the requests that a site would refuse."""

from pathlib import Path
from typing import Any

import pytest

from scaling_slurm.settings import Duration
from scaling_slurm.slurm.cluster import ClusterProfile, load_cluster
from scaling_slurm.slurm.job import JobRequest, build_request, find_problems


def profile(**settings: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "site", "description": "", "verified": "no"} | settings)


def request(cluster: ClusterProfile, **settings: Any) -> JobRequest:
    options: dict[str, Any] = {"name": "job", "output": Path("/log"), "nodes": 2, "environ": {}} | settings
    return build_request(cluster, **options)


def problems(cluster: ClusterProfile, **settings: Any) -> list[str]:
    return [str(problem) for problem in find_problems(request(cluster, **settings), cluster)]


def test_nothing_is_asked_for_that_nobody_set() -> None:
    assert request(profile()).directives == {
        "job-name": "job",
        "nodes": 2,
        "ntasks-per-node": 1,
        "signal": "USR2@120",
        "requeue": True,
        "open-mode": "append",
        "output": "/log",
    }


@pytest.mark.parametrize(
    ("form", "type_name", "expected"),
    [
        ("gres", None, {"gres": "gpu:4"}),
        ("gres", "h100", {"gres": "gpu:h100:4"}),
        ("gpus_per_node", None, {"gpus-per-node": "4"}),
        ("gpus_per_node", "h100", {"gpus-per-node": "h100:4"}),
        ("gpus_per_task", None, {"gpus-per-task": "1"}),
        ("gpus_per_task", "h100", {"gpus-per-task": "h100:1"}),
        ("none", None, {}),
    ],
)
def test_gpus_in_the_form_that_the_site_takes(form: str, type_name: str | None, expected: dict[str, str]) -> None:
    directives = request(profile(gpu={"per_node": 4, "request": form, "type": type_name})).directives
    assert directives["ntasks-per-node"] == 4
    assert {key: value for key, value in directives.items() if "gpu" in key or "gres" in key} == expected


def test_fewer_ranks_take_fewer_gpus_and_no_gpus_no_request() -> None:
    assert request(profile(gpu={"per_node": 4}), tasks_per_node=1).directives["gres"] == "gpu:1"
    assert "gres" not in request(profile(), tasks_per_node=3).directives


def test_any_directive_can_be_removed_replaced_and_added() -> None:
    directives = request(
        profile(
            cpu={"per_task": 8},
            memory="480G",
            directives={"cpus-per-task": None, "nodes": None, "mem": "0", "exclusive": True, "segment": 4},
        )
    ).directives
    assert "cpus-per-task" not in directives
    assert "nodes" not in directives
    assert directives["mem"] == "0"
    assert list(directives.items())[-2:] == [("exclusive", True), ("segment", 4)]


def test_the_partition_gives_limit_and_qos() -> None:
    cluster = profile(default_partition="a", partitions={"a": {"max_time": "12:00:00", "qos": "q"}, "b": {}})
    assert request(cluster).directives["time"] == "0-12:00:00"
    assert request(cluster).directives["qos"] == "q"
    assert request(cluster, time=Duration(90)).directives["time"] == "0-00:01:30"
    assert not {"time", "qos"} & set(request(cluster, partition="b").directives)


def test_requeue_needs_the_runs_and_the_sites_consent() -> None:
    for allowed, wanted in ((True, False), (False, True)):
        asked = request(profile(requeue_allowed=allowed), requeue=wanted)
        assert asked.directives["no-requeue"] is True
        assert "requeue" not in asked.directives
        assert not asked.requeue


def test_a_request_within_the_limits_has_no_problems() -> None:
    booster = load_cluster("booster").value
    assert problems(booster, nodes=384, account="a", time=Duration(24 * 3600)) == []


def test_an_account_is_asked_for_where_the_site_wants_one() -> None:
    booster = load_cluster("booster").value
    [problem] = problems(booster)
    assert "account" in problem
    assert "SCALING_ACCOUNT" in problem
    assert problems(booster, environ={"SBATCH_ACCOUNT": "a"}) == []


def test_an_unknown_partition_names_the_nearest() -> None:
    cluster = profile(partitions={"booster": {}, "devel": {}})
    assert "did you mean booster?" in problems(cluster, partition="boster")[0]
    assert "there are booster, devel" in problems(cluster, partition="xyz")[0]
    assert problems(profile(), partition="xyz") == [], "a profile that lists none takes any"


def test_a_time_over_the_limit_proposes_several_jobs() -> None:
    cluster = profile(partitions={"normal": {"max_time": "12:00:00"}})
    assert problems(cluster, partition="normal", time=Duration(12 * 3600)) == []
    [problem] = problems(cluster, partition="normal", time=Duration(24 * 3600))
    assert "1-00:00:00 is over the limit 0-12:00:00 of partition normal" in problem
    assert "2 jobs" in problem
    assert "3 jobs" in problems(cluster, partition="normal", time=Duration(24 * 3600 + 1))[0]


def test_too_many_and_too_few_nodes_name_the_partition_that_fits() -> None:
    booster = load_cluster("booster").value
    [problem] = problems(booster, account="a", nodes=385)
    assert "385 nodes are more than the 384 of partition booster; partition largebooster takes that many" in problem
    [problem] = problems(booster, account="a", nodes=8, partition="largebooster")
    assert "fewer than the 385" in problem
    assert "partition booster takes" in problem
    [problem] = problems(booster, account="a", nodes=5, partition="develbooster")
    assert "more than the 4" in problem


def test_more_ranks_than_gpus_or_cores() -> None:
    cluster = profile(gpu={"per_node": 4}, cpu={"per_node": 48, "per_task": 12})
    assert problems(cluster, tasks_per_node=4) == []
    [problem] = problems(cluster, tasks_per_node=5)
    assert "5 tasks per node want a GPU each" in problem, "the cores are no second fault"
    [problem] = problems(profile(cpu={"per_node": 48, "per_task": 12}), tasks_per_node=5)
    assert "5 tasks per node x 12 cores are more than the 48" in problem


@pytest.mark.parametrize(("seconds", "refused"), [(60, True), (120, True), (121, False)])
def test_the_warning_must_fit_into_the_time_limit(seconds: int, refused: bool) -> None:
    assert any("warning" in problem for problem in problems(profile(), time=Duration(seconds))) is refused


def test_removing_what_is_never_written_is_refused() -> None:
    profile = ClusterProfile(name="x", description="x", verified="no", directives={"opn-mode": None, "signal": None})
    (problem,) = find_problems(build_request(profile, name="n", output=Path("o"), nodes=1), profile)
    assert "directives.opn-mode is null" in str(problem)
    assert "did you mean open-mode?" in str(problem)
