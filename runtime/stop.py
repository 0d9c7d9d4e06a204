"""
Stopping a run: SIGTERM and Ctrl-C request a stop; the run ends at its next safe point and saves.

A step changes nothing that is saved until its first optimizer update. Until then it can be
abandoned at any moment, and the resumed run repeats it whole. After that update the step is
finished first. Rollouts and backward passes, which may take minutes, are interrupted. All ranks
decide together.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading

import torch

from runtime.ranks import all_reduce


class Stopped(BaseException):
    """A stop was requested. The current step has changed nothing that is saved. Not an Exception,
    so that a reward's `except Exception` lets it pass."""


class Stop:
    def __init__(self):
        self.requested = False  # on this rank
        self.agreed = False  # all ranks know that at least one of them has a request
        self.held = False  # the weights have changed: the step must be finished and logged
        self._interruptible = False

    @contextlib.contextmanager
    def listening(self):
        """SIGTERM and Ctrl-C request a stop; a second Ctrl-C kills. Handlers are restored after."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._handle) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number, _frame):
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.requested = True
        if self._interruptible:
            self._interruptible = False  # once: cleaning up is not interrupted again
            raise Stopped

    def run(self, work, *args, collective: bool = False, **kwargs):
        """work(*args, **kwargs), or Stopped on every rank if any of them has a request.

        All ranks call this together. A signal interrupts `work`, unless the step is held. If `work`
        is itself a collective, it is never interrupted: other ranks would wait for this one.
        """
        result = None
        try:
            self._interruptible = not (self.held or collective)
            if not (self.requested and self._interruptible):
                result = work(*args, **kwargs)
            self._interruptible = False  # from here on a signal must not skip `agree`
        except Stopped:
            pass
        finally:
            self._interruptible = False
        if self.agree():
            raise Stopped
        return result

    def agree(self) -> bool:
        """Whether any rank has a request. All ranks call this together. Unchanged while held."""
        if not self.held:
            self.agreed = all_reduce(torch.tensor([float(self.requested)])).item() > 0
        return self.agreed


def resume_command(out_dir: str) -> str:
    """The command line that resumes the run."""
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE")
    if ranks_here != os.environ.get("WORLD_SIZE"):
        return "the same commands with --resume"
    launch = f"torchrun --nproc-per-node {ranks_here}" if ranks_here else "python"
    return f"{launch} {shlex.quote(sys.argv[0])} --resume --out-dir {shlex.quote(out_dir)}"
