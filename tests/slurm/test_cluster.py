"""Cluster profiles: those that are shipped, and what a site may write into one."""

from pathlib import Path

import pytest

from scaling_slurm.errors import ConfigError
from scaling_slurm.resources import shipped_folder
from scaling_slurm.settings import Duration
from scaling_slurm.slurm.cluster import ClusterProfile, find_account, load_cluster
from tests.support.plans import LAB, write_cluster

SHIPPED = sorted(shipped_folder("clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", [*SHIPPED, LAB], ids=lambda path: path.stem)
def test_every_profile_loads_and_says_where_its_facts_come_from(path: Path) -> None:
    profile = load_cluster(str(path)).value
    assert profile.name == path.stem
    assert profile.verified
    assert profile.description
    assert profile.default_partition is None or profile.default_partition in profile.partitions


def test_the_profiles_that_everybody_needs_are_shipped() -> None:
    assert {"local", "slurm", "booster"} <= {path.stem for path in SHIPPED}
    assert load_cluster("local").value.scheduler == "local"


def test_limits_are_read() -> None:
    booster = load_cluster("booster").value
    assert booster.partitions["develbooster"].max_time == Duration(2 * 3600)
    assert booster.partitions["largebooster"].min_nodes == 385
    assert booster.gpu.memory_gib == 40


def test_an_unknown_key_names_the_nearest_one_and_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default_partiton.*default_partition.*site\.yaml:\d"):
        write_cluster(tmp_path, default_partiton="gpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"directives": {"nodes": 3}},
        {"directives": {"ntasks-per-node": 3}},
        {"directives": {"time": "1:00:00"}},
        {"directives": {"--exclusive": True}},
        {"directives": {"exclusive": False}},
        {"directives": {"exclusive": ""}},
        {"directives": {"a b": "c"}},
        {"env": {"A=B; rm -rf": "1"}},
        {"env": {"DEBUG": True}},
        {"name": "two words"},
        {"python": "'unbalanced"},
        {"python": " "},
        {"gpu": {"request": "gpus"}},
    ],
    ids=str,
)
def test_what_a_script_could_not_hold_is_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        write_cluster(tmp_path, **settings)


@pytest.mark.parametrize(
    ("name", "setter"),
    [
        ("nodes", "--nodes or allocation.nodes"),
        ("ntasks-per-node", "allocation.tasks_per_node"),
        ("time", "--time or allocation.time"),
    ],
)
def test_what_belongs_to_the_run_is_set_elsewhere(name: str, setter: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster("local", directives={name: "3"})
    wrong = f"{name} belongs to the run's allocation: {setter} sets it; here it can only be removed"
    assert str(caught.value) == f"{wrong}; command line"
    assert load_cluster("local", directives={name: None}).value.directives[name] is None


def test_directives_from_the_command_line_have_the_last_word(tmp_path: Path) -> None:
    write_cluster(tmp_path, directives={"constraint": "gpu", "licenses": "home"})
    wanted = {"constraint": "a&b: #[c]", "licenses": None, "exclusive": True, "segment": 4}
    loaded = load_cluster(str(tmp_path / "site.yaml"), directives=wanted)
    assert loaded.value.directives == wanted


def test_account_from_the_environment_as_with_sbatch() -> None:
    profile = ClusterProfile(name="x", description="x", verified="no", account="profile")
    both = {"SCALING_ACCOUNT": "ours", "SBATCH_ACCOUNT": "slurms"}
    assert find_account(profile, "given", both) == "given"
    assert find_account(profile, None, both) == "ours"
    assert find_account(profile, None, {"SBATCH_ACCOUNT": "slurms", "SCALING_ACCOUNT": ""}) == "slurms"
    assert find_account(profile, None, {}) == "profile"
    assert find_account(profile.model_copy(update={"account": None}), None, {}) is None
