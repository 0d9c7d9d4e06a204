"""
Stopping a run: SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C ask for a stop, and the run ends after its step.

A second Ctrl-C ends it at once. A run that is killed loses the steps since its last checkpoint.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading

import torch

from runtime.ranks import all_reduce

# A scheduler warns with SIGUSR1 or SIGTERM, often with both; a terminal that closes sends SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
TORCHRUN_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # torchrun sets it to those that it passes on


class Stop:
    def __init__(self):
        self.requested = False  # on this rank

    @contextlib.contextmanager
    def listening(self):
        """Let signals ask for a stop. The previous handlers are restored at the end."""
        if threading.current_thread() is not threading.main_thread():  # it cannot set handlers
            yield
            return
        # nohup ignores SIGHUP, and a shell ignores Ctrl-C for what it runs in the background.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number, _frame):
        self.requested = True
        if number == signal.SIGINT:  # the next one raises KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks call this, or saving would wait forever."""
        return all_reduce(torch.tensor([float(self.requested)])).item() > 0


def about_torchrun() -> str:
    """What to tell torchrun so that a run has the time to save; "" without torchrun."""
    passed_on = os.environ.get(TORCHRUN_SIGNALS)
    if passed_on is None or "RANK" not in os.environ:
        return ""
    note = (
        "torchrun kills a run 30 s after it was asked to stop. If a step, its evaluation and its "
        "save may take longer, give torchrun --shutdown-timeout SECONDS"
    )
    if "SIGUSR1" not in passed_on:
        note += f"; if a scheduler warns with SIGUSR1, also --signals-to-handle {passed_on},SIGUSR1"
    return note


def resume_command(out_dir: str) -> str:
    """The command line that resumes the run."""
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE")
    several_nodes = ranks_here != os.environ.get("WORLD_SIZE")
    main = sys.modules["__main__"]  # its name is not in argv after python -m, or in a notebook
    if several_nodes or main.__spec__ is not None or not hasattr(main, "__file__"):
        return "the same command or cell with --resume"
    launch = f"torchrun --nproc-per-node {ranks_here}" if ranks_here else "python"
    return f"{launch} {shlex.quote(sys.argv[0])} --resume --out-dir {shlex.quote(out_dir)}"
