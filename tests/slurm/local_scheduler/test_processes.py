"""Processes: whom a number means, who descends from whom, and that a tree is ended as a whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from scaling_slurm.slurm.local_scheduler.processes import descendants, identify, is_alive, send_to_tree
from tests.support.slurm import wait_until

# A shell with a child in its own session.
TREE = ["bash", "-c", "setsid sleep 60 & echo $!; wait"]


def test_a_process_is_its_number_its_start_and_its_boot() -> None:
    found = identify(os.getpid())
    assert found is not None
    assert is_alive(found)
    assert not is_alive(found._replace(start=found.start - 1))
    assert not is_alive(found._replace(boot="another"))


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: ") Z " in Path(f"/proc/{process.pid}/stat").read_text(), "the zombie")
        assert identify(process.pid) is None


def test_signal_to_a_tree() -> None:
    with subprocess.Popen(TREE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child in descendants(process.pid)
        assert child in descendants(os.getpid())
        root = identify(process.pid)
        assert root is not None
        send_to_tree(root._replace(start=1), signal.SIGKILL)
        assert process.poll() is None
        send_to_tree(root, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        wait_until(lambda: identify(child) is None, "the child's end")


def test_driver_code_ends_daemons_of_its_descendants() -> None:
    code = """import os, subprocess
from scaling_slurm.slurm.local_scheduler.processes import adopt_orphans, descendants, kill_descendants
adopt_orphans()
daemon = subprocess.run(["bash", "-c", "setsid sleep 60 >/dev/null & echo $!"], stdout=subprocess.PIPE).stdout
assert descendants(os.getpid()) == [int(daemon)], daemon
kill_descendants(os.getpid())
assert descendants(os.getpid()) == []
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20, cwd=Path(__file__).parents[3])


def test_child_dies_with_its_parent() -> None:
    code = """import subprocess
from scaling_slurm.slurm.local_scheduler.processes import die_with_parent
print(subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent, stdout=subprocess.DEVNULL).pid, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert identify(child) is not None
        parent.kill()
        parent.wait()
        wait_until(lambda: identify(child) is None, "the child's end")
