"""The records of a run, with several writers at once and with writers that are killed."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaling_slurm.errors import NotFoundError, RefusedError
from scaling_slurm.run_directory import (
    RunDirectory,
    append_line,
    exclusive,
    read_json,
    read_lines,
    record_end,
    write_atomically,
)

ROOT = Path(__file__).resolve().parents[1]


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """Another process with `run` and `path` at hand."""
    given = f"from pathlib import Path; from scaling_slurm.run_directory import *; path = Path({str(folder)!r}); "
    command = [sys.executable, "-c", given + "run = RunDirectory(path)\n" + code]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def wait_for_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def end(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=60)[0] for process in processes]


# Files


def test_a_writer_that_is_killed_leaves_the_old_or_the_new_text(tmp_path: Path):
    file = tmp_path / "record.json"
    code = (
        "print('ready', flush=True)\nwhile True:\n"
        "  for word in 'ab': write_atomically(path / 'record.json', word * 1_000_000)"
    )
    seen = set()
    for _ in range(3):
        writer = start(code, tmp_path)
        wait_for_line(writer)
        until = time.monotonic() + 0.2
        while time.monotonic() < until or not file.exists():
            if file.exists():
                seen.add(file.read_text())
        writer.kill()
        end([writer])
        seen.add(file.read_text())
    assert seen
    assert seen <= {"a" * 1_000_000, "b" * 1_000_000}


def test_a_write_that_fails_leaves_the_old_text_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "record.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \udcff")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["record.json"]


def test_lines_of_several_writers_do_not_mix(tmp_path: Path):
    code = (
        "import os\nfor i in range(200): append_line(path / 'lines', {'who': os.getpid(), 'i': i, 'text': 'x' * 3000})"
    )
    writers = [start(code, tmp_path) for _ in range(3)]
    end(writers)
    lines = [line for line in (tmp_path / "lines").read_text().splitlines() if line]
    assert len(lines) == len(list(read_lines(tmp_path / "lines"))) == 600
    for writer in writers:
        own = [record["i"] for record in map(json.loads, lines) if record["who"] == writer.pid]
        assert own == list(range(200))


def test_a_torn_line_is_left_out_and_the_others_are_read(tmp_path: Path):
    file = tmp_path / "lines"
    assert list(read_lines(file)) == []
    file.write_bytes(b'{"step": 1}\n{"st\n7\n{"step": 2}\n{"step": 3, "loss": 0.')
    assert [record["step"] for record in read_lines(file)] == [1, 2]
    append_line(file, {"step": 4})
    append_line(file, {"step": 5, "path": tmp_path})
    assert list(read_lines(file))[2:] == [{"step": 4}, {"step": 5, "path": str(tmp_path)}]


@pytest.mark.parametrize(("text", "record"), [('{"a": 1}', {"a": 1}), ('{"a"', None), ("[1]", None), (None, None)])
def test_a_small_record(tmp_path: Path, text: str | None, record: dict[str, int] | None):
    if text is not None:
        (tmp_path / "r").write_text(text)
    assert read_json(tmp_path / "r") == record


# Attempts


def test_every_process_that_claims_gets_a_number_of_its_own(tmp_path: Path):
    code = "print(*[run.claim_attempt().number for _ in range(20)])"
    claimed = [int(number) for text in end([start(code, tmp_path) for _ in range(3)]) for number in text.split()]
    assert sorted(claimed) == list(range(1, 61))
    run = RunDirectory(tmp_path)
    assert [attempt.number for attempt in run.list_attempts()] == list(range(1, 61))
    assert run.is_current(60)
    assert not run.is_current(59)


def test_only_numbers_are_attempts_and_they_sort_as_numbers(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert run.list_attempts() == []
    for name in ("1000", "999", "notes", "12", "002"):
        (run.attempts / name).mkdir(parents=True)
    assert [attempt.number for attempt in run.list_attempts()] == [2, 999, 1000]
    assert run.claim_attempt().path.name == "1001"


def test_the_last_words_of_an_attempt_come_in_their_order(tmp_path: Path):
    attempt = RunDirectory(tmp_path).claim_attempt()
    for rank, moment in ((0, 3.5), (10, 2.5), (2, 10.5)):
        attempt.failure_file(rank).write_text(json.dumps({"rank": rank, "time": moment}))
    assert [record["rank"] for record in attempt.failures()] == [10, 0, 2]


@pytest.mark.parametrize("cause", ["finished", "preempted"])
def test_the_end_of_an_attempt(tmp_path: Path, cause: str):
    run = RunDirectory(tmp_path)
    attempt = run.claim_attempt()
    record_end(run, attempt, cause, 12, requeue=cause != "finished", reason="r")
    end = json.loads(attempt.end_file.read_text())
    assert (end["cause"], end["step"], end["requeue"], end["reason"]) == (cause, 12, cause != "finished", "r")
    [event] = read_lines(run.events_file)
    assert (event["event"], event["attempt"], event["cause"]) == ("end", 1, cause)
    assert (read_json(run.finished_file) or {}).get("step") == (12 if cause == "finished" else None)


# The directory


def test_opening_needs_a_config(tmp_path: Path):
    with pytest.raises(NotFoundError, match="is not a run directory"):
        RunDirectory.open(tmp_path)
    (tmp_path / "config.yaml").touch()
    assert RunDirectory.open(tmp_path / ".." / tmp_path.name).path == tmp_path


def test_a_diary_that_cannot_be_written_ends_nothing(tmp_path: Path):
    RunDirectory(tmp_path / "gone").record_event("attempt")
    assert not (tmp_path / "gone").exists()


def test_one_process_at_a_time_and_a_dead_one_holds_nothing(tmp_path: Path):
    run = RunDirectory(tmp_path)
    code = "import time\nwith exclusive(run, 'submit'): print('ready', flush=True); time.sleep(60)"
    holder = start(code, tmp_path)
    wait_for_line(holder)
    with pytest.raises(RefusedError, match=f"another process is at work to submit {run.id}"), exclusive(run, "submit"):
        pass
    with exclusive(run, "train"):
        pass
    holder.send_signal(signal.SIGKILL)
    end([holder])
    with exclusive(run, "submit"):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with exclusive(RunDirectory(tmp_path), "submit"):
        pass
