"""Tells the user about waits."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("stepgraph")

_PATIENCE_SECONDS = 1.0
_REDRAW_SECONDS = 0.5


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Logs how long the context took; on a terminal also shows that it goes on, once a second has passed."""
    start = time.perf_counter()
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, start, done), daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        logger.info("%s took %.1f s", what, time.perf_counter() - start)


def _show(what: str, start: float, done: threading.Event) -> None:
    if done.wait(_PATIENCE_SECONDS):
        return
    while True:
        sys.stderr.write(f"\rstepgraph: {what} ... {time.perf_counter() - start:.0f} s")
        sys.stderr.flush()
        if done.wait(_REDRAW_SECONDS):
            break
    sys.stderr.write("\r\033[K")
    sys.stderr.flush()
