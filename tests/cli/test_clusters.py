"""`scaling clusters` as a user calls it."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.clusters import clusters
from scaling_slurm.resources import find
from scaling_slurm.slurm.cluster import load_cluster

app = Typer()
app.command()(clusters)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_clusters_lists_what_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.yaml").write_text("name: mine\ndescription: My own\nverified: today\n")
    (tmp_path / "clusters" / "broken.yaml").write_text("name: broken\ndescription: x\n")
    (tmp_path / "clusters" / "worse.yaml").write_text("name: worse\ndescripton: x\n")
    done = call()
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert {"NAME", "local", "booster", "slurm", "mine"} <= set(lines)
    assert lines["mine"].split() == ["mine", "My", "own", "today"]
    assert not {"broken", "worse"} & set(lines)
    assert "cannot be used" not in done.stdout
    broken, worse = done.stderr.splitlines()
    assert broken.startswith("clusters/broken.yaml cannot be used: verified is missing; add it: When and how")
    assert 'verified: "no"' in broken
    assert "worse.yaml cannot be used: unknown key descripton; did you mean description?" in worse
    assert "`scaling clusters worse` shows all" in worse


def test_one_cluster_in_full_can_be_loaded_again(tmp_path: Path) -> None:
    done = call("booster")
    first, text = done.stdout.split("\n", 1)
    assert Path(first.removeprefix("# ")).resolve() == find("clusters", "booster").resolve()
    (tmp_path / "again.yaml").write_text(text)
    assert load_cluster(str(tmp_path / "again.yaml")).value == load_cluster("booster").value
