"""
Stopping a run: SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C ask for a stop, and the run ends after its step.

A second Ctrl-C ends it at once. A run that is killed loses the steps since its last checkpoint.
"""

import contextlib
import signal

import torch

from runtime.ranks import all_reduce

# A scheduler warns with SIGUSR1 or SIGTERM, often with both; a terminal that closes sends SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Stop:
    def __init__(self):
        self.requested = False  # on this rank

    @contextlib.contextmanager
    def listening(self):
        """Let signals ask for a stop. The previous handlers are restored at the end."""
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
