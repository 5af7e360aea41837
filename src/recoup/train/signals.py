"""Ctrl-C and the scheduler's SIGTERM: stop after the step that is running."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Turns the first interrupt in the block into a request, which can be asked for.

    A second Ctrl-C raises `KeyboardInterrupt` at once. Handlers are installed in the
    main thread only, the one thread that gets signals, and put back at the end.

    Examples:
        >>> with Interruption() as interruption:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interruption.is_requested
        True
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                self._before[each] = signal.signal(each, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _request(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_requested = True
