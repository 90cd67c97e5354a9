"""Notices requests to save and leave: SIGUSR2, SIGTERM, SIGINT, a file, and a newer attempt that has taken over.

Knows no torch: it is installed before torch is imported, so that a signal during loading is not lost. It decides
nothing; the ranks agree on the step in the trainer.
"""

import os
import select
import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

POLL_SECONDS = 1.0
SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class StopCause(IntEnum):
    """Why a run stops before its last step. Where ranks saw different causes, the largest counts."""

    NONE = 0
    DEADLINE = 1
    SIGNAL = 2
    STOP_FILE = 3


class StopListener:
    """Listens in a thread of its own, because a Python signal handler waits as long as a blocking collective does.

    The thread reads `signal.set_wakeup_fd`, which the C-level handler writes to at once. A second SIGINT interrupts
    the process. The trainer is the one owner of these signals: handlers that were installed before are put back when
    the listener closes, and are not called meanwhile.

    """

    def __init__(self) -> None:
        self.stop_file: Path | None = None
        self.notice_file: Path | None = None
        self.is_current: Callable[[], bool] = lambda: True
        self.on_superseded: Callable[[], None] = lambda: None
        self.received: list[str] = []
        self._cause = StopCause.NONE
        self._interrupts = 0
        self._previous: dict[int, Any] = {}
        self._previous_descriptor = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)

    def __enter__(self) -> "StopListener":
        assert threading.current_thread() is threading.main_thread(), "only the main thread may listen to signals"
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.register_at_fork(after_in_child=self._forget)
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        self._previous_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        signal.set_wakeup_fd(self._previous_descriptor)
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def watch(
        self,
        *,
        stop_file: Path,
        notice_file: Path,
        is_current: Callable[[], bool],
        on_superseded: Callable[[], None],
    ) -> None:
        """From now on, look at files too.

        Args:
            stop_file: Its existence is a request that must not be followed by a requeue.
            notice_file: Written when this rank gets a signal, so that ranks that wait for data learn of it.
            is_current: False once a newer attempt of the run has started; then `on_superseded` is called.
        """
        self.on_superseded = on_superseded
        self.stop_file, self.notice_file, self.is_current = stop_file, notice_file, is_current
        if self.received:
            self._receive(self.received.pop())

    @property
    def cause(self) -> StopCause:
        """What this rank was asked, so far."""
        return self._cause

    def heard_elsewhere(self) -> bool:
        """Whether any rank was asked to stop; looks at the file system, so only for ranks that wait anyway."""
        self._look_for_stop_file()
        return self._cause != StopCause.NONE or (self.notice_file is not None and self.notice_file.exists())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    def _forget(self) -> None:
        """In a forked child, such as a data worker: it must not speak for this process through the shared pipe."""
        if not self._closing.is_set():
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def _listen(self) -> None:
        while not self._closing.is_set():
            readable, _, _ = select.select([self._reader], [], [], POLL_SECONDS)
            for number in os.read(self._reader, 64) if readable else b"":
                if number in SIGNALS:
                    self._receive(signal.Signals(number).name)
            self._look_for_stop_file()
            if not self.is_current():
                self.on_superseded()
                return

    def _look_for_stop_file(self) -> None:
        if self.stop_file is not None and self.stop_file.exists():
            self._cause = StopCause.STOP_FILE  # the largest

    def _receive(self, name: str) -> None:
        self.received.append(name)
        self._cause = max(self._cause, StopCause.SIGNAL)
        if self.notice_file is not None:
            try:
                self.notice_file.write_text(name)
            except OSError:
                # A full disk must not cost the request itself: the agreement of the next step carries it too.
                return
