"""Job scripts: how values are quoted, what is in the text, what bash and sbatch make of it, and a site's own templates.

The oracles are bash, shellcheck and sbatch's own parser.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scaling_slurm.errors import ConfigError
from scaling_slurm.resources import list_names, shipped_folder
from scaling_slurm.settings import Loaded
from scaling_slurm.slurm.cluster import ClusterProfile, load_cluster
from scaling_slurm.slurm.template import directive_value, quote, render
from tests.support.plans import LAB, plan_in, write_cluster

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
STRANGE = [
    "a b",
    "(x)",
    "k=v",
    "#1",
    "it's",
    'a"b',
    "back\\slash",
    "$(touch pwned)",
    "`touch pwned`",
    "a;b",
    "*",
    "--x",
    "é",
]


def script_of(folder: Path, cluster: Loaded[ClusterProfile], *overrides: str, **options: object) -> str:
    return plan_in(folder, cluster, *overrides, **options).script


def directives_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


# Quoting


@pytest.mark.parametrize("value", STRANGE)
def test_bash_reads_a_quoted_value_as_it_was(value: str, tmp_path: Path) -> None:
    script = f"printf %s {quote(value)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == value
    assert not (tmp_path / "pwned").exists()


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm's sbatch is not installed")
def test_sbatch_reads_a_directive_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nNodeName=n\nPartitionName=p Nodes=n\n"
    )
    values = [*STRANGE, "/run dir (#1=2)/logs/job-%j.log", "all \\ of 'it' \"at\" #once", "\\", "x\\"]
    lines = [f"#SBATCH --comment={directive_value(value)}" for value in values]
    # The last line makes sbatch stop before it looks for a controller.
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/bash", *lines, "#SBATCH end-of-test", "true"]))
    done = subprocess.run(
        ["sbatch", "-vvv", "job.sh"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")},
    )
    found = re.findall(r'Found in script, argument "(.*)"$', done.stderr, re.MULTILINE)
    assert found == [*(f"--comment={value}" for value in values), "end-of-test"]


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\tb", "a\0b", "a\x1bb", "a\u2028b"], ids=repr)
@pytest.mark.parametrize("function", [quote, directive_value])
def test_control_characters_are_refused(function: object, value: str) -> None:
    with pytest.raises(ConfigError, match="control character"):
        function(value)  # type: ignore[operator]


# Golden files: UPDATE_GOLDEN=1 writes them


@pytest.mark.parametrize("cluster", ["booster", "local", "slurm", str(LAB)], ids=lambda name: Path(name).stem)
def test_scripts_are_as_reviewed(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/scaling/bin/python")
    loaded = load_cluster(cluster)
    script = script_of(tmp_path, loaded, runs_root=Path("/scratch/runs"), run_id="small-1", account="project")
    golden = GOLDEN / f"train-{loaded.value.name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()


def test_every_shipped_template_and_cluster_has_a_golden_file() -> None:
    templates = {path.name.removesuffix(".sbatch.j2") for path in shipped_folder("templates").glob("*.j2")} - {"base"}
    clusters = {path.stem for path in shipped_folder("clusters").glob("*.yaml")} | {"lab"}
    expected = {f"{template}-{cluster}.sbatch" for template in templates for cluster in clusters}
    assert {path.name for path in GOLDEN.glob("*.sbatch")} == expected


@pytest.mark.parametrize("script", sorted(GOLDEN.glob("*.sbatch")), ids=lambda path: path.stem)
def test_bash_and_shellcheck_accept_the_scripts(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.stdout == ""


# The text


def everything(folder: Path) -> Loaded[ClusterProfile]:
    """A profile that uses every field a script depends on."""
    return write_cluster(
        folder,
        partitions={"p": {"max_time": "2:00:00", "qos": "q"}},
        default_partition="p",
        gpu={"per_node": 2, "request": "gpus_per_node"},
        cpu={"per_node": 16, "per_task": 8},
        memory="0",
        srun={"cpu_bind": "none", "gpu_bind": "none", "mpi": "none", "extra": ["--threads-per-core=1", "a b"]},
        network={"master_address_suffix": "i"},
        login_shell=True,
        modules=["CUDA/12", "Python (3)"],
        setup=["unset PYTHONPATH", "source /venv/bin/activate"],
        env={"FOO": "a b", "NUMBER": 7, "CUDA_VISIBLE_DEVICES": None},
        python="apptainer exec '/my image.sif' python",
        directives={"exclusive": True, "comment": "x #1"},
    )


def test_directives_are_contiguous_and_right_below_the_shebang(tmp_path: Path) -> None:
    lines = script_of(tmp_path, everything(tmp_path)).splitlines()
    assert lines[0] == "#!/bin/bash -l"
    count = len(directives_of("\n".join(lines)))
    assert count > 12
    assert all(line.startswith("#SBATCH --") for line in lines[1 : count + 1])


def test_every_setting_of_a_profile_reaches_the_script(tmp_path: Path) -> None:
    script = script_of(tmp_path, everything(tmp_path), account="acc", partition="p")
    expected = {"--account=acc", "--partition=p", "--qos=q", "--mem=0", "--gpus-per-node=2", "--cpus-per-task=8"}
    expected |= {"--exclusive", '--comment="x #1"', "--signal=USR2@120", "--requeue", "--open-mode=append"}
    assert expected <= set(directives_of(script))
    for text in (
        "module load CUDA/12 || exit 1\nmodule load 'Python (3)' || exit 1\n",
        "unset PYTHONPATH\nsource /venv/bin/activate\n",
        "default FOO 'a b'\ndefault NUMBER 7\nunset CUDA_VISIBLE_DEVICES\n",
        "export SCALING_MASTER_SUFFIX=i\n",
        "    --cpus-per-task=8 \\\n    --cpu-bind=none \\\n    --gpu-bind=none \\\n    --mpi=none \\\n",
        "    --threads-per-core=1 \\\n    'a b' \\\n",
        " -- apptainer exec '/my image.sif' python -u -m submitit.core._submit ",
        "    apptainer exec '/my image.sif' python -m scaling_slurm.launch.failure ",
    ):
        assert text in script


@pytest.mark.parametrize("cluster", ["slurm", "booster"])
def test_ranks_are_started_by_srun_which_ends_all_when_one_fails(cluster: str, tmp_path: Path) -> None:
    script = script_of(tmp_path, load_cluster(cluster))
    assert re.search(r"^srun --kill-on-bad-exit=1 --wait=\d+ ", script, re.MULTILINE)
    assert re.search(r" -- \S+ -u -m submitit\.core\._submit \S+ \|\| rc=\$\?$", script, re.MULTILINE)
    assert "--signal=USR2@" in script
    assert "B:" not in script, "with B: only the batch shell would get the signal"


def test_the_batch_shell_expands_no_variable_of_a_task(tmp_path: Path) -> None:
    for cluster in (load_cluster("booster"), everything(tmp_path)):
        script = script_of(tmp_path, cluster)
        assert not re.search(r"SLURM_(?:PROCID|NODEID|LOCALID|STEP)|GTIDS", script)


def test_what_nobody_set_does_not_appear(tmp_path: Path) -> None:
    script = script_of(tmp_path, load_cluster("slurm"))
    assert "None" not in script
    assert "cpus-per-task" not in script
    assert "gres" not in script
    assert not re.search(r"=\s*$|=''|=\"\"", "\n".join(directives_of(script)))
    assert not re.search(r"export SLURM_", script)


def test_cores_are_asked_for_on_srun_too(tmp_path: Path) -> None:
    script = script_of(tmp_path, load_cluster("booster"))
    assert script.count("--cpus-per-task=12") == 2


def test_a_run_that_may_not_be_requeued_says_so(tmp_path: Path) -> None:
    script = script_of(tmp_path, load_cluster("slurm"), "trainer.requeue.enabled=false")
    assert "--no-requeue" in directives_of(script)


def test_logs_are_per_rank_and_for_many_ranks_per_node(tmp_path: Path) -> None:
    few = script_of(tmp_path, load_cluster("slurm"), "allocation.nodes=16", "allocation.tasks_per_node=4",
                    "trainer.global_batch_size=1024")  # fmt: skip
    assert '--output="$run/logs/attempt-$attempt-rank-%5t.log"' in few
    assert "--label" not in few
    many = script_of(tmp_path, load_cluster("slurm"), "allocation.nodes=65", "allocation.tasks_per_node=1",
                     "trainer.global_batch_size=65")  # fmt: skip
    assert '--label --output="$run/logs/attempt-$attempt-node-%5n.log"' in many


def test_the_script_depends_on_nothing_but_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = script_of(tmp_path, load_cluster("booster"))
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setattr(sys, "argv", ["scaling", "submit", "secret"])
    assert script_of(tmp_path, load_cluster("booster")) == first


@pytest.mark.parametrize("field", ["account", "partition"])
def test_a_line_break_cannot_smuggle_in_a_directive(field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control character"):
        script_of(tmp_path, load_cluster("slurm"), **{field: "a\n#SBATCH --uid=0"})


@pytest.mark.parametrize(
    "settings",
    [
        {"env": {"A": "x\nrm"}},
        {"modules": ["x\nrm"]},
        {"directives": {"comment": "x\n#SBATCH -n1"}},
        {"srun": {"extra": ["x\nrm"]}},
    ],
    ids=str,
)
def test_nor_can_one_in_a_profile(settings: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control character"):
        script_of(tmp_path, write_cluster(tmp_path, **settings))


# What it does: srun, scontrol and python are stubs that write down how they were called


class Stage:
    """A run directory and a PATH of stubs in which a rendered script runs for real."""

    def __init__(self, folder: Path, srun: str = "exit 0", **settings: object) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        self.stub("srun", f'printf "%s\\n" "$@" > "$CALLS/srun"; env -0 > "$CALLS/environment"; {srun}')
        self.stub("scontrol", 'echo "$@" >> "$CALLS/scontrol"')
        self.stub("python", 'printf "%s\\n" "$@" > "$CALLS/python"; exit 1')
        cluster = write_cluster(folder, python=str(folder / "bin" / "python"), **settings)
        job = plan_in(folder, cluster, run_id="run dir (#1=2)")
        self.run = job.run_directory
        (self.run / "attempts").mkdir(parents=True)
        (self.run / "logs").mkdir()
        self.script = folder / "job.sh"
        self.script.write_text(job.script)

    def stub(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def execute(self, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environ = {"PATH": path, "CALLS": str(self.folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
        return subprocess.run(
            ["bash", self.script],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=environ | environment,
        )

    def called(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def environment(self) -> dict[str, str]:
        pairs = self.called("environment").rstrip("\0").split("\0")
        return dict(pair.split("=", 1) for pair in pairs)


def test_a_script_starts_the_first_attempt(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    done = stage.execute()
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in (stage.run / "attempts").iterdir()] == ["001"]
    arguments = stage.called("srun").splitlines()
    assert f"--output={stage.run}/logs/attempt-001-rank-%5t.log" in arguments
    assert arguments[-5:] == [
        str(tmp_path / "bin/python"),
        "-u",
        "-m",
        "submitit.core._submit",
        f"{stage.run}/submitit",
    ]
    environment = stage.environment()
    assert environment["SCALING_RUN_DIRECTORY"] == str(stage.run)
    assert environment["SCALING_ATTEMPT"] == "1"
    assert environment["SCALING_RENDEZVOUS"] == "slurm"
    assert environment["SUBMITIT_EXECUTOR"] == "slurm"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "SCALING_MASTER_SUFFIX" not in environment
    assert re.search(r"^attempt 1 of run dir \(#1=2\)$", done.stdout, re.MULTILINE)
    assert not stage.called("python")
    assert not stage.called("scontrol")


def test_the_next_attempt_follows_the_highest_number(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    for name in ("001", "008", "0010", "1002", "003.old", "note"):
        (stage.run / "attempts" / name).mkdir()
    assert stage.execute().returncode == 0
    assert (stage.run / "attempts" / "1003").is_dir()
    assert stage.environment()["SCALING_ATTEMPT"] == "1003"


def test_starts_at_the_same_time_get_numbers_of_their_own(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: stage.execute(), range(6)))
    numbers = sorted(int(re.findall(r"^attempt (\d+) of", one.stdout, re.MULTILINE)[0]) for one in done)
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_without_a_place_for_attempts_nothing_starts(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (stage.run / "attempts").rmdir()
    done = stage.execute()
    assert done.returncode == 1
    assert "cannot start an attempt: mkdir:" in done.stderr
    assert "No such file or directory" in done.stderr
    assert not stage.called("srun")


@pytest.mark.parametrize("code", [1, 3, 137])
def test_the_exit_code_of_srun_is_the_jobs_and_the_failure_is_explained(code: int, tmp_path: Path) -> None:
    stage = Stage(tmp_path, srun=f"exit {code}")
    assert stage.execute().returncode == code
    assert stage.called("python").splitlines() == ["-m", "scaling_slurm.launch.failure", str(stage.run), "1"]
    assert not stage.called("scontrol")


def test_a_wish_to_be_requeued_is_carried_out_from_the_batch_host(tmp_path: Path) -> None:
    stage = Stage(tmp_path, srun="exit 75")
    assert stage.execute().returncode == 75
    assert stage.called("scontrol") == "requeue 7\n"
    assert not stage.called("python")


def test_the_wish_is_heard_when_srun_reports_the_ranks_that_it_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, srun='touch "$SCALING_RUN_DIRECTORY/attempts/001/requeue"; exit 143')
    assert stage.execute().returncode == 143
    assert stage.called("scontrol") == "requeue 7\n"
    assert not stage.called("python")


def test_of_an_array_only_the_task_is_requeued(tmp_path: Path) -> None:
    stage = Stage(tmp_path, srun="exit 75")
    stage.execute(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="0")
    assert stage.called("scontrol") == "requeue 5_0\n"


def test_a_refused_requeue_says_how_to_go_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, srun="exit 75")
    stage.stub("scontrol", "echo disabled >&2; exit 1")
    done = stage.execute()
    assert done.returncode == 75
    assert "scaling resume" in done.stderr


def test_values_arrive_as_they_are_and_run_nothing(tmp_path: Path) -> None:
    values = {f"VALUE_{index}": value for index, value in enumerate(STRANGE)}
    stage = Stage(tmp_path, env=values, network={"master_address_suffix": "$(touch pwned)"})
    assert stage.execute().returncode == 0
    environment = stage.environment()
    assert {name: environment[name] for name in values} == values
    assert environment["SCALING_MASTER_SUFFIX"] == "$(touch pwned)"
    assert not (tmp_path / "pwned").exists()


def test_what_the_user_exported_wins_and_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, env={"NCCL_SOCKET_IFNAME": "ib0", "SAME": "1", "GONE": None}, cpu={"per_task": 12})
    done = stage.execute(NCCL_SOCKET_IFNAME="eth7", SAME="1", GONE="x", OMP_NUM_THREADS="3")
    environment = stage.environment()
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "GONE" not in environment
    assert "NCCL_SOCKET_IFNAME=eth7 was exported and is used instead of ib0" in done.stdout
    assert "SAME" not in done.stdout


def test_threads_are_the_cores_of_a_task(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cpu={"per_task": 12})
    stage.execute()
    assert stage.environment()["OMP_NUM_THREADS"] == "12"
    other = Stage(tmp_path / "other")
    other.execute(SLURM_CPUS_PER_TASK="5")
    assert other.environment()["OMP_NUM_THREADS"] == "5"


def test_a_module_that_is_missing_ends_the_job(tmp_path: Path) -> None:
    stage = Stage(tmp_path, modules=["CUDA"])
    stage.stub("module", 'echo "no $2" >&2; exit 1')
    done = stage.execute()
    assert done.returncode == 1
    assert "no CUDA" in done.stderr
    assert not stage.called("srun")


# A site's own templates


def test_a_site_replaces_one_block_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = script_of(tmp_path, load_cluster("slurm"), run_id="r")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "train.sbatch.j2").write_text(
        '{% extends "shipped/train.sbatch.j2" %}\n'
        "{% block setup %}\n{{ super() }}proxy on {{ run_directory | quote }}\n{% endblock %}\n"
    )
    assert list_names("templates")["train"].resolve() == tmp_path / "templates" / "train.sbatch.j2"
    changed = script_of(tmp_path, load_cluster("slurm"), run_id="r")
    assert f"proxy on {tmp_path}/runs/r\n" in changed
    assert changed.replace(f"proxy on {tmp_path}/runs/r\n", "") == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/bash\n\n{{ no_such }}\n", r"'no_such' is undefined.*mine\.sbatch\.j2:3"),
        ("#!/bin/bash\n{% if %}\n", r"cannot be read.*mine\.sbatch\.j2:2"),
        ("#!/bin/bash\n{{ name | no_such }}\n", r"no_such.*mine\.sbatch\.j2:2"),
        ('{% extends "no_such" %}\n', r"there is no template no_such"),
        ("a\n{{ name + 1 }}\n", r"the template failed.*mine\.sbatch\.j2:2"),
        ("a\n{{ broken | quote }}\n", r"control character"),
    ],
)
def test_a_mistake_in_a_template_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.sbatch.j2").write_text(text)
    with pytest.raises(ConfigError, match=message):
        render("mine", {"name": "x", "broken": "a\nb"}, folders=[tmp_path])


def test_a_template_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no template nothing\.sbatch\.j2.*searched in"):
        render("nothing", {}, folders=[tmp_path])


def test_a_misspelt_block_of_a_sites_template_is_refused(tmp_path: Path) -> None:
    """It would replace nothing, and nobody would notice."""
    (tmp_path / "train.sbatch.j2").write_text(
        '{% extends "shipped/train.sbatch.j2" %}\n{% block module %}x{% endblock %}'
    )
    with pytest.raises(ConfigError, match=r"block 'module' replaces nothing; did you mean modules\?"):
        render("train", {}, folders=[tmp_path])
