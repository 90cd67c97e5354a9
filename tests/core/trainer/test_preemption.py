import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scaling_slurm.core.trainer.preemption import StopCause, StopListener


def wait_until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def watch(listener: StopListener, folder: Path, **changes) -> None:
    settings = {
        "stop_file": folder / "STOP",
        "notice_file": folder / "stop-requested",
        "is_current": lambda: True,
        "on_superseded": lambda: None,
    }
    listener.watch(**(settings | changes))


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noticed_and_the_process_lives_on(number: signal.Signals, tmp_path: Path):
    with StopListener() as listener:
        watch(listener, tmp_path)
        assert listener.cause == StopCause.NONE
        os.kill(os.getpid(), number)
        assert wait_until(lambda: listener.cause == StopCause.SIGNAL)
        assert listener.received == [number.name]
        assert wait_until((tmp_path / "stop-requested").exists), "ranks that wait for data must learn of it"


def test_a_signal_before_the_files_are_known_is_passed_on_later(tmp_path: Path):
    with StopListener() as listener:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_until(lambda: listener.cause == StopCause.SIGNAL)
        watch(listener, tmp_path)
        assert (tmp_path / "stop-requested").read_text() == "SIGTERM"
        assert listener.received == ["SIGTERM"]


def test_the_stop_file_is_noticed_and_outranks_a_signal(tmp_path: Path):
    with StopListener() as listener:
        watch(listener, tmp_path)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wait_until(lambda: listener.cause == StopCause.SIGNAL)
        (tmp_path / "STOP").touch()
        assert wait_until(lambda: listener.cause == StopCause.STOP_FILE)


def test_a_rank_that_waits_hears_of_a_signal_to_another_rank(tmp_path: Path):
    with StopListener() as listener:
        watch(listener, tmp_path)
        assert not listener.heard_elsewhere()
        (tmp_path / "stop-requested").write_text("SIGTERM")
        assert listener.heard_elsewhere()
        assert listener.cause == StopCause.NONE, "its own cause stays its own"


def test_a_rank_that_waits_and_sees_the_stop_file_says_so_at_once(tmp_path: Path):
    """Else its void step would count as a signal, after which the job is requeued."""
    with StopListener() as listener:
        watch(listener, tmp_path)
        (tmp_path / "STOP").touch()
        assert listener.heard_elsewhere()
        assert listener.cause == StopCause.STOP_FILE


def test_a_newer_attempt_ends_the_older_one(tmp_path: Path):
    replaced = []
    with StopListener() as listener:
        watch(listener, tmp_path, is_current=lambda: False, on_superseded=lambda: replaced.append(True))
        assert wait_until(lambda: replaced == [True])


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopListener():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_full_disk_does_not_cost_the_request(tmp_path: Path):
    with StopListener() as listener:
        watch(listener, tmp_path, notice_file=tmp_path / "missing" / "file")
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_until(lambda: listener.cause == StopCause.SIGNAL)


def run_child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)


def test_a_signal_is_seen_while_the_main_thread_blocks_in_c():
    """A Python handler would wait for the blocking call, as it does in a collective; the thread does not."""
    child = run_child(
        """
        import ctypes, os, signal, threading, time
        from scaling_slurm.core.trainer.preemption import StopCause, StopListener
        with StopListener() as listener:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            seen = []
            def look():
                while not seen:
                    if listener.cause == StopCause.SIGNAL:
                        seen.append(time.monotonic() - begun)
                    time.sleep(0.01)
            threading.Thread(target=look).start()
            begun = time.monotonic()
            left = 2
            while left:  # a sleep in C that restarts, as collectives do
                left = ctypes.CDLL(None).sleep(left)
            blocked = time.monotonic() - begun
        print(seen[0] < 1.0 < blocked)
        """
    )
    assert child.stdout.strip() == "True", child.stderr


def test_a_second_ctrl_c_interrupts():
    child = run_child(
        """
        import os, signal, time
        from scaling_slurm.core.trainer.preemption import StopListener
        with StopListener() as listener:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            print("alive", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        """
    )
    assert child.stdout.strip() == "alive"
    assert "KeyboardInterrupt" in child.stderr


def test_a_forked_child_dies_of_the_signal_and_tells_nobody(tmp_path: Path):
    """Data workers inherit handlers; they must neither save nor ask for a requeue."""
    with StopListener() as listener:
        watch(listener, tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(0.1)
        assert listener.cause == StopCause.NONE
