"""Mistakes that people make, through the real command: one clear line, the documented exit code, no half-made run."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scaling_slurm.run_directory import RunDirectory, read_lines
from tests.support.runs import Run, Workplace
from tests.support.slurm import wait_until

PLAN = ("plan", "tiny.yaml")
SUBMIT = ("submit", "tiny.yaml")
BOOSTER = (*PLAN, "--cluster", "booster", "allocation.nodes=1")
MINE = "name: mine\ndescription: x\nverified: x\n"
PAID = (*BOOSTER, "--account", "project")


@dataclass(frozen=True)
class Mistake:
    """One call and what it must answer. `edits` change the run file, `files` are written beside it."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 2
    edits: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def edit(name: str, says: tuple[str, ...], /, **edits: str) -> Mistake:
    """A run file in which the value of some keys is another one."""
    lines = {"heads": "num_attention_heads: 4", "key_value_heads": "num_key_value_heads: 2", "time": 'time: "30:00"'}
    lines |= {"hidden": "hidden_size: 32", "layers": "num_layers: 2", "steps": "num_steps: 40", "rate": "0.01,"}
    lines |= {"batch": "global_batch_size: 8", "vocab": "vocab_size: 512", "dropout": "residual_dropout: 0.1"}
    lines |= {"name": "name: tiny", "optimizer": "optimizer:", "warmup": "warmup_steps: 5"}
    return Mistake(name, PLAN, says, edits={lines[key]: text for key, text in edits.items()})


RUN_FILE = [
    edit("unknown key", ("unknown key model.residul_dropout", "did you mean model.residual_dropout?", "tiny.yaml:11"),
         dropout="residul_dropout: 0.1"),
    edit("unknown section", ("unknown key optimiser", "did you mean optimizer?", "tiny.yaml:13"),
         optimizer="optimiser:"),
    edit("wrong type", ('model.num_layers is "two"', "it should be a valid integer", "tiny.yaml:6"),
         layers="num_layers: two"),
    edit("a section is a number", ("optimizer is 3", "a section with keys", "tiny.yaml:13"),
         optimizer="optimizer: 3 #"),
    edit("duplicate key", ("the key 'hidden_size' stands twice, in lines 5 and 6", "remove one", "tiny.yaml:6"),
         layers="hidden_size: 64\n  num_layers: 2"),
    edit("YAML syntax", ("not YAML", "learning_rate: 0.01}", "check its indentation", "tiny.yaml:13"), rate="0.01}"),
    edit("tab", ("not YAML", "spaces, not tabs", "tiny.yaml:5"), hidden="\thidden_size: 32"),
    edit("time without quotes", ("allocation.time is 90", 'quote it, "90"', "tiny.yaml:2"), time="time: 90"),
    edit("hidden and heads", ("hidden_size 32 is not divisible by num_attention_heads 5", "tiny.yaml:5",
         "tiny.yaml:7"), heads="num_attention_heads: 5"),
    edit("key-value heads", ("num_attention_heads 4 is not divisible by num_key_value_heads 3", "tiny.yaml:8"),
         key_value_heads="num_key_value_heads: 3"),
    edit("odd head size", ("= 3 is odd", "even head size", "tiny.yaml:5"),
         hidden="hidden_size: 12"),
    edit("zero layers", ("model.num_layers is 0", "greater than 0", "tiny.yaml:6"), layers="num_layers: 0"),
    edit("negative steps", ("trainer.num_steps is -1", "greater than 0", "tiny.yaml:15"), steps="num_steps: -1"),
    edit("not a number", ("optimizer.learning_rate", "finite", "tiny.yaml:13"), rate=".nan,"),
    edit("vocabulary", ("token id", "but vocab_size is 100", "must be at least", "model.vocab_size in"),
         vocab="vocab_size: 100"),
    edit("batch", ("global_batch_size 9 is not divisible", "data_parallel_size 4", "trainer"),
         batch="global_batch_size: 9"),
    edit("run name", ('name is "../tiny"', "letters, digits", "tiny.yaml:1"), name="name: ../tiny"),
    edit("run name of two lines", ('name is "a\\nb"', "letters, digits", "tiny.yaml:1"), name='name: "a\\nb"'),
    Mistake("no validation set", PLAN, ("evaluation_interval is set, but data.validation is not", "tiny.yaml:"),
            edits={", validation: {data}/validation": ""}),
    Mistake("empty file", ("plan", "empty.yaml"), ("empty.yaml is empty", "key: value"), files={"empty.yaml": "# x\n"}),
    Mistake("missing file", ("plan", "./tino.yaml"), ("tino.yaml does not exist", "did you mean tiny.yaml?")),
    Mistake("missing name", ("plan", "tino"), ("there is no config 'tino'", "did you mean tiny?")),
    Mistake("a directory", ("plan", "./"), ("./ is a directory", "tiny.yaml")),
    Mistake("not UTF-8", ("plan", "latin.yaml"), ("0xfc is not UTF-8", "latin.yaml:2"),
            files={"latin.yaml": "name: x\n# \udcfc\n"}),
    Mistake("extends nothing", ("plan", "child.yaml"), ("parent.yaml does not exist", "child.yaml:1"),
            files={"child.yaml": "extends: parent.yaml\n"}),
    Mistake("extends in a circle", ("plan", "a.yaml"), ("extends goes in a circle", "remove one"),
            files={"a.yaml": "extends: b.yaml\n", "b.yaml": "extends: a.yaml\n"}),
]  # fmt: skip

COMMAND_LINE = [
    Mistake("override without value", (*PLAN, "model.num_layers"), ("'model.num_layers' has no key and value",
            "model.num_layers=24")),
    Mistake("override of an unknown key", (*PLAN, "model.num_layer=3"), ("unknown key model.num_layer",
            "did you mean model.num_layers?", "command line")),
    Mistake("no nodes", (*PLAN, "--nodes", "0"), ("--nodes", "greater than or equal to 1", "scaling plan -h")),
    Mistake("no argument", ("submit",), ("Missing argument", "scaling submit -h")),
    Mistake("unknown option", (*PLAN, "--nods", "2"), ("No such option: --nods", "scaling plan -h")),
    Mistake("unknown verb", ("sumbit",), ("No such command 'sumbit'", "scaling -h")),
    Mistake("time", (*PLAN, "--time", "soon"), ('allocation.time is "soon"', '"90m"', "command line")),
    Mistake("a directive of the plan", (*PLAN, "--sbatch", "nodes=3"), ("nodes belongs to the run's allocation",)),
    Mistake("layout", (*PLAN, "topology.data_parallel_size=3"), ("data_parallel_size 3 = 3, but the world size is 4",
            "leave data_parallel_size out", "topology in")),
    Mistake("tensor size 2", (*SUBMIT, "topology.tensor_parallel_size=2"), ("tensor_parallel_size 2",
            "with tensor and pipeline size 1 only", "topology in")),
    Mistake("heads and tensor size", (*SUBMIT, "topology.tensor_parallel_size=4"), (
            "num_key_value_heads 2 is not divisible by tensor_parallel_size 4", "model.num_key_value_heads in")),
    Mistake("name with a slash", (*PLAN, "--name", "a/b"), ("a run's name is no path", "--name")),
    Mistake("name above", (*PLAN, "--name", "../b"), ("a run's name is no path", "--name")),
    Mistake("empty name", (*PLAN, "--name", ""), ("a run's name is no path", "--name")),
    Mistake("name with %", (*PLAN, "--name", "50%"), ("holds %", "give these characters a meaning", "--name")),
    Mistake("name of two lines", (*PLAN, "--name", "a\nb"), ("control character",)),
    Mistake("runs with %", (*PLAN, "--runs", "50%"), ("holds %", "--runs")),
    Mistake("runs with quotes", (*PLAN, "--runs", "it's"), ("holds '", "--runs")),
    Mistake("runs is a file", (*SUBMIT, "--runs", "file/runs"), ("file cannot be written to", "--runs"),
            files={"file": ""}),
    Mistake("runs of an unset variable", (*PLAN, "--cluster", "mine"), ("$NOWHERE_SET/runs", "not set", "export it"),
            files={"clusters/mine.yaml": MINE + "runs_directory: $NOWHERE_SET/runs\n"}),
]  # fmt: skip

SITE = [
    Mistake("unknown cluster", (*PLAN, "--cluster", "boster"), ("no cluster 'boster'", "did you mean booster?")),
    Mistake("broken profile", (*PLAN, "--cluster", "mine"), ("unknown key gpus", "did you mean gpu?", "mine.yaml:4"),
            files={"clusters/mine.yaml": MINE + "gpus: 4\n"}),
    Mistake("template with an undefined variable", PLAN, ("'acount' is undefined", "train.sbatch.j2:2"),
            files={"templates/train.sbatch.j2": "#!/bin/bash\n#SBATCH --account={{ acount }}\n"}),
    Mistake("template with a syntax error", PLAN, ("template cannot be read", "train.sbatch.j2:1"),
            files={"templates/train.sbatch.j2": "{% for %}\n"}),
    Mistake("template that starts nothing", SUBMIT, ("does not start the tasks", "template"),
            files={"templates/train.sbatch.j2": "#!/bin/bash\ntrue\n"}),
    Mistake("account", BOOSTER, ("charges every job to an account", "--account")),
    Mistake("partition", (*PAID, "--partition", "boster"), ("no partition 'boster'", "did you mean booster?",
            "--partition")),
    Mistake("time over the limit", (*PAID, "--time", "48h"), ("2-00:00:00 is over the limit 1-00:00:00",
            "2 jobs", "--time")),
    Mistake("nodes", (*PAID, "--partition", "develbooster", "--nodes", "8", "allocation.tasks_per_node=1"),
            ("8 nodes are more than the 4 of partition develbooster", "partition booster takes that many", "--nodes")),
    Mistake("tasks", (*PAID, "allocation.tasks_per_node=8"), ("8 tasks per node want a GPU each", "at most 4",
            "allocation.tasks_per_node")),
    Mistake("no sbatch", (*SUBMIT, "--cluster", "slurm"), ("sbatch is not on PATH", "--cluster local"), code=5,
            environment={"PATH": "/nowhere"}),
    Mistake("Slurm says no", (*SUBMIT, "--cluster", "slurm", "--account", "nobody"), ("Slurm refused the job",
            "Invalid account", "sacctmgr", "SCALING_ACCOUNT"), code=4, environment={"PATH": "{path}/bin:/usr/bin:/bin"},
            files={"bin/sbatch": "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid account or "
                   "account/partition combination specified' >&2\nexit 1\n"}),
    Mistake("Slurm does not answer", (*SUBMIT, "--cluster", "slurm"), ("got no answer from Slurm", "try again later"),
            code=5, environment={"PATH": "{path}/bin:/usr/bin:/bin"},
            files={"bin/sbatch": "#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller' >&2\nexit 1\n"}),
]  # fmt: skip

OTHER = [
    *(
        Mistake(f"{words[0]} of an unknown run", words, ("no run or job '4711'", "no runs there", "--runs"), 6)
        for words in [*((verb, "4711") for verb in ("status", "logs", "resume", "cancel")), ("infer", "4711", "x")]
    ),
    Mistake("resume of a directory", ("resume", "./clusters"), ("./clusters is not a run directory", "config.yaml"), 6,
            files={"clusters/x": ""}),
    Mistake("infer of a directory", ("infer", "./nowhere", "x"), ("./nowhere is not a run directory",), 6),
    Mistake("no corpus", ("prepare", "nothing", "--out", "runs/data", "--train-tokenizer", "300"), ("nothing",)),
    Mistake("empty corpus", ("prepare", "corpus", "--out", "runs/data", "--train-tokenizer", "300"), ("no",),
            files={"corpus/.hidden": "text"}),
    Mistake("corpus without text", ("prepare", "corpus", "--out", "runs/data", "--train-tokenizer", "300"),
            ("there is no text", "1 documents are empty"), files={"corpus/a.txt": ""}),
    Mistake("existing output", ("prepare", "corpus", "--out", "corpus", "--train-tokenizer", "300"),
            ("corpus is not empty", "--overwrite", "--out"), files={"corpus/a.txt": "text"}),
    Mistake("no tokenizer", ("prepare", "corpus", "--out", "runs/data"), ("--train-tokenizer SIZE", "--tokenizer FILE"),
            files={"corpus/a.txt": "text"}),
    Mistake("a tokenizer that is none", ("prepare", "corpus", "--out", "runs/data", "--tokenizer", "t.json"),
            ("t.json",), files={"corpus/a.txt": "text", "t.json": "{"}),
    Mistake("train with a wrong key", ("train", "tiny.yaml", "trainer.num_step=3"), ("unknown key trainer.num_step",
            "trainer.num_steps?")),
    Mistake("show of an unknown cluster", ("clusters", "boster"), ("no cluster 'boster'", "did you mean booster?")),
]  # fmt: skip


@pytest.fixture
def place(local: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """With a good run file of 2 nodes x 2 ranks, and no variable that says who pays."""
    local.config()
    for name in ("SCALING_ACCOUNT", "SBATCH_ACCOUNT", "NOWHERE_SET"):
        monkeypatch.delenv(name, raising=False)
    return local


def assert_one_line(done: subprocess.CompletedProcess[str], *says: str) -> None:
    [line] = done.stderr.splitlines() or [""]
    assert line.startswith("error: ")
    for words in says:
        assert words in line


def call(place: Workplace, mistake: Mistake) -> None:
    run_file = place.path / "tiny.yaml"
    for old, new in mistake.edits.items():
        old = old.format(data=place.data) if "{data}" in old else old
        text = run_file.read_text()
        assert text.count(old) == 1, old
        run_file.write_text(text.replace(old, new))
    for name, text in mistake.files.items():
        file = place.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, errors="surrogateescape", encoding="utf-8")
        file.chmod(0o755)
    place.environment |= {name: text.format(path=place.path) for name, text in mistake.environment.items()}
    done = place.scaling(*mistake.arguments, code=mistake.code)
    assert_one_line(done, *mistake.says)
    if not done.stdout.startswith("run "):  # a plan is shown with its problems
        assert done.stdout == ""
    assert not list(place.path.glob("runs/*")), "something half-made is left"


@pytest.mark.parametrize("mistake", RUN_FILE, ids=lambda mistake: mistake.name)
def test_a_mistake_in_the_run_file(place: Workplace, mistake: Mistake):
    call(place, mistake)


@pytest.mark.parametrize("mistake", COMMAND_LINE, ids=lambda mistake: mistake.name)
def test_a_mistake_on_the_command_line(place: Workplace, mistake: Mistake):
    call(place, mistake)


@pytest.mark.parametrize("mistake", SITE, ids=lambda mistake: mistake.name)
def test_what_a_site_does_not_have(place: Workplace, mistake: Mistake):
    call(place, mistake)


@pytest.mark.parametrize("mistake", OTHER, ids=lambda mistake: mistake.name)
def test_mistakes_with_other_verbs(place: Workplace, mistake: Mistake):
    call(place, mistake)


def test_a_time_without_quotes_is_the_time_it_looks_like(place: Workplace):
    """YAML 1.1 reads 24:00:00 as the number 86400."""
    place.config(time='24:00:00" #')
    (place.path / "tiny.yaml").write_text((place.path / "tiny.yaml").read_text().replace('"24:00:00" #"', "24:00:00"))
    assert "limit 1-00:00:00" in place.scaling("submit", "tiny.yaml", "--dry-run").stdout


def test_strange_but_harmless_names_are_taken(place: Workplace):
    shown = place.scaling("plan", "tiny.yaml", "--name", "a (b) #1", "--runs", "my runs é").stdout
    assert f"run='{place.path}/my runs é/a (b) #1'\n" in shown


# Data


def damage_data(place: Workplace, kind: str) -> None:
    """A copy of the data with one fault."""
    shutil.copytree(place.data, place.path / "data")
    file = place.path / "data" / "train.bin"
    match kind:
        case "no .bin":
            file.unlink()
        case "no .idx":
            file.with_suffix(".idx").unlink()
        case "truncated .bin":
            os.truncate(file, file.stat().st_size - 2)
        case "truncated .idx":
            os.truncate(file.with_suffix(".idx"), file.with_suffix(".idx").stat().st_size - 1)
        case "no index at all":
            file.with_suffix(".idx").write_text("text")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no .bin", "train.bin not found; `scaling prepare` makes token files from text"),
        ("no .idx", "train.idx not found"),
        ("truncated .bin", "the two files must be of one set, and complete"),
        ("truncated .idx", "the file is cut off or damaged"),
        ("no index at all", "is not an index of Megatron-LM's indexed format"),
    ],
)
def test_token_files_that_cannot_be_used_are_found_before_the_job(place: Workplace, kind: str, says: str):
    damage_data(place, kind)
    refused = place.scaling(*SUBMIT, f"data.train={place.path}/data/train", code=2)
    assert_one_line(refused, says, "data.train in command line")
    assert not list(place.path.glob("runs/*"))
    shown = place.scaling(*SUBMIT, f"data.train={place.path}/data/train", "--dry-run")
    assert "srun" in shown.stdout, "a plan can be made where the data is not"
    assert shown.stderr.startswith("not ready to submit: ")
    assert shown.stderr.count("\n") == 1


def test_a_full_disk(place: Workplace):
    folder = place.path / "small disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        assert_one_line(place.scaling(*SUBMIT, "--runs", folder, code=2), "1.0 MiB free", "two checkpoints", "--runs")
        assert not list(folder.iterdir())
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_read_only_disk(place: Workplace):
    folder = place.path / "read-only"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        refused = place.scaling(*SUBMIT, "--runs", folder / "runs", code=2)
        assert_one_line(refused, f"{folder} cannot be written to", "--runs")
    finally:
        subprocess.run(["umount", folder], check=True)


# Runs that exist


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    """Six steps on one rank, trained here; three checkpoints."""
    path = tmp_path_factory.mktemp("finished")
    state = {"SCALING_LOCAL_STATE": str(path / "scheduler"), "SCALING_HOME": str(path / "home")}
    root = Path(__file__).resolve().parent.parent.parent
    place = Workplace(path, data, "local", state | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)})
    place.config(steps=6, save=2)
    place.scaling("train", "tiny.yaml", "allocation.nodes=1", "allocation.tasks_per_node=1", "--run", "runs/done")
    return Run(place, RunDirectory(path / "runs" / "done"), "")


@pytest.fixture
def unfinished(place: Workplace, finished: Run) -> Run:
    """A copy that does not know that it is finished, as it would be after its last job was killed."""
    run = RunDirectory(place.path / "runs" / "copy")
    shutil.copytree(finished.directory.path, run.path)
    run.finished_file.unlink()
    shutil.copy(Path(__file__).parents[2] / "clusters" / "local.yaml", run.cluster_file)
    for folder in (run.logs, run.submitit):
        folder.mkdir(exist_ok=True)
    return Run(place, run, "")


def flip_a_byte(run: Run, step: int) -> None:
    """Silent damage in a file of weights: one bit, the size stays."""
    [file] = run.directory.checkpoints.glob(f"step-{step:08d}-*/*weight*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def log_of(run: Run) -> str:
    return (run.directory.logs / "attempt-002-rank-00000.log").read_text()


def test_a_corrupt_checkpoint_is_passed_over(unfinished: Run, finished: Run):
    flip_a_byte(unfinished, 6)
    unfinished.workplace.scaling("resume", "copy")
    unfinished.wait_until_finished()
    assert "checkpoint step-00000006-attempt-001 is passed over" in log_of(unfinished)
    assert "does not match its digest" in log_of(unfinished)
    assert "continuing after step 4" in log_of(unfinished)
    records = read_lines(unfinished.directory.metrics_file)
    assert [record["step"] for record in records if record["attempt"] == 2] == [5, 6]
    assert unfinished.losses() == finished.losses()


def test_no_checkpoint_is_whole(unfinished: Run):
    for step in (2, 4, 6):
        flip_a_byte(unfinished, step)
    unfinished.workplace.scaling("resume", "copy")
    followed = unfinished.workplace.scaling("logs", "-f", "copy", code=7)
    assert "error: of the checkpoints in" in followed.stdout
    assert_one_line(followed, "copy is FAILED", "none is whole", "scaling resume")
    assert unfinished.last_step() == 6
    assert "no checkpoint of" in unfinished.workplace.scaling("infer", "copy", "x", code=8).stderr.splitlines()[-1]


def test_two_resumes_at_once(unfinished: Run):
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(unfinished.workplace.scaling, "resume", "copy", "-q", code=None) for _ in range(3)]
        done = [call.result() for call in calls]
    assert sorted(one.returncode for one in done) == [0, 8, 8]
    for refused in (one for one in done if one.returncode):
        assert_one_line(refused, "copy")
    assert len(list(read_lines(unfinished.directory.jobs_file))) == 1
    unfinished.workplace.scaling("cancel", "copy", "--now")


def test_two_submitters_at_once(place: Workplace):
    with ThreadPoolExecutor() as pool:
        options = (*SUBMIT, "allocation.nodes=1", "allocation.tasks_per_node=1", "-q")
        calls = [pool.submit(place.scaling, *options) for _ in range(2)]
        job_ids = {call.result().stdout.strip() for call in calls}
    runs = sorted(place.path.glob("runs/*"))
    assert [run.name.rpartition("-")[2] for run in runs] == ["1", "2"]
    assert {job["job_id"] for run in runs for job in read_lines(run / "jobs.jsonl")} == job_ids
    assert len(job_ids) == 2
    for job_id in job_ids:
        place.scaling("cancel", job_id, "--now")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("resume", "copy", "model.num_layers=3"), 8, ("model of copy cannot change", "scaling submit")),
        (("resume", "copy", "name=other"), 8, ("name of copy cannot change",)),
        (("resume", "copy", "--cluster", "loca"), 2, ("no cluster 'loca'", "did you mean local?")),
        (("resume", "copy", "trainer.global_batch_size=0"), 2, ("trainer.global_batch_size is 0", "command line")),
        (("submit", "tiny.yaml", "--name", "copy"), 8, ("copy exists already", "scaling resume copy", "--name")),
        (("logs", "copy", "--rank", "9"), 6, ("copy has no log of attempt 1, rank 9",)),
        (("infer", "copy", "x", "--device", "tpu"), 2, ("device 'tpu'", "--device")),
        (("infer", "copy", "x", "--precision", "int3"), 2, ("precision 'int3'", "bfloat16", "--precision")),
        (("infer", "copy", "x", "--max-tokens", "0"), 2, ("--max-tokens", "scaling infer -h")),
        (("infer", "copy", "x" * 100), 2, ("the prompt has",)),
        (("status", "./runs"), 6, ("./runs is not a run directory",)),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_what_a_run_does_not_allow(unfinished: Run, arguments: tuple[str, ...], code: int, says: tuple[str, ...]):
    files = sorted(unfinished.directory.path.rglob("*"))
    assert_one_line(unfinished.workplace.scaling(*arguments, code=code), *says)
    assert sorted(unfinished.directory.path.rglob("*")) == files
    assert os.listdir(unfinished.directory.path.parent) == ["copy"]


def test_a_run_without_checkpoint(unfinished: Run):
    shutil.rmtree(unfinished.directory.checkpoints)
    refused = unfinished.workplace.scaling("infer", "copy", "x", code=6)
    assert_one_line(refused, "copy has no checkpoint yet", "trainer.save_interval", "scaling status copy")


def test_a_run_whose_settings_were_damaged(unfinished: Run):
    unfinished.directory.config_file.write_text("name: tiny\nmodl: {}\n")
    for verb in ("status", "resume"):
        assert "config.yaml:" in unfinished.workplace.scaling(verb, "copy", code=2).stderr


def test_a_job_that_ends_at_once(place: Workplace):
    """A fault that only the job can meet: the site's module does not exist."""
    (place.path / "clusters").mkdir()
    (place.path / "clusters" / "mine.yaml").write_text(MINE + "scheduler: local\npoll_seconds: 1\nsetup: [exit 3]\n")
    run = Workplace(place.path, place.data, "mine", place.environment).submit("tiny.yaml")
    wait_until(lambda: run.state() == "FAILED", "the job to fail")
    assert_one_line(place.scaling("logs", "-f", run.job_id, code=7), f"{run.directory.id} is FAILED", "logs in")
