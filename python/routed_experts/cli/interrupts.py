"""Ctrl-C that is not lost: Python drops an exception that is raised inside a finalizer or a callback."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, Ctrl-C raises KeyboardInterrupt as ever, and again at the next :meth:`check` if that was lost."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Interrupts:
        self._before: Any = None
        # Only the main thread may set handlers, and only it is interrupted.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one since this was entered."""
        if self.seen:
            raise KeyboardInterrupt

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt
