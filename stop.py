"""
Stopping a run: SIGTERM and Ctrl-C ask, the run ends at its next safe point, saves, and says how to go on.

A step changes nothing that is saved until its first optimizer update. Until then it can be given up at any moment, and
the run that resumes repeats it whole; from there on it is finished first. Sampling and the backward passes, which may
take minutes, are cut short. All ranks decide together, where all of them come by.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading

import torch

from ranks import all_reduce


class Stopped(Exception):
    """The run was asked to stop; the step it was in has changed nothing."""


class Stop:
    def __init__(self):
        self.asked = False  # of this rank
        self.asked_anywhere = False  # as all ranks know since the last agreed()
        self.held = False  # between a step's first update and its row in the log
        self._cuttable = False

    @contextlib.contextmanager
    def listening(self):
        """SIGTERM and Ctrl-C ask, the second Ctrl-C kills; outside they do what they did."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number, _frame):
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True
        if self._cuttable:
            self._cuttable = False  # once: what is being cleaned up now is not cut
            raise Stopped

    def unless_asked(self, work, *words, **options):
        """work(*words, **options), or None as soon as the run is asked to stop. No collective is in it: another rank
        may not be asked yet, and would wait."""
        try:
            self._cuttable = not self.held
            return None if self.asked and self._cuttable else work(*words, **options)
        except Stopped:
            return None
        finally:
            self._cuttable = False

    def agreed(self) -> bool:
        """Whether any rank was asked; all ranks call it together. Not while a step has to be finished."""
        if not self.held:
            self.asked_anywhere = all_reduce(torch.tensor([float(self.asked)])).item() > 0
        return self.asked_anywhere


def resume_command(out_dir: str) -> str:
    """What the user types to go on."""
    here, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if here != world:
        return "the same commands with --resume"
    launch = f"torchrun --nproc-per-node {here}" if here else "python"
    return f"{launch} {shlex.quote(sys.argv[0])} --resume --out-dir {shlex.quote(out_dir)}"
