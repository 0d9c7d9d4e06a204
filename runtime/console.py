"""The console of a program, which is never a reason to stop: files hold what matters."""

import contextlib
import io
import os
import sys


class Console:
    """stdout or stderr. It drops what cannot be written: after `| head`, a Ctrl-C that also ended
    `tee`, a terminal that closed, on a full disk."""

    def __init__(self, stream):
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115  None: it was closed

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()


def escape() -> None:
    """Escape the characters that the console's encoding lacks; Python would raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's
            stream.reconfigure(errors="backslashreplace")


def go_on() -> None:
    """From here on, a console that cannot be written is no error."""
    with contextlib.suppress(OSError):  # it flushes
        escape()
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
