"""What the benches share: one process, and a clock that stands still."""

import pytest

from bench import __main__ as command_line
from bench import peers
from runtime import InputError


def test_several_processes_are_refused(monkeypatch):
    """Catches rows of a race that are written by each rank of torchrun."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="bench is one process, not 2"):
        command_line.main(["ceiling", "nowhere"])


def test_the_clock_of_peers_stands_still_while_it_evaluates(monkeypatch):
    """Ten steps of 3 seconds each, then an evaluation of 100 seconds, twice."""
    now = 50.0
    monkeypatch.setattr(peers.time, "process_time", lambda: now)

    class Judge:
        def accuracy(self, *_purpose):
            nonlocal now
            now += 100
            return 0.5

    watch = peers.Watch()
    for step in range(21):
        watch.see(step, Judge())
        now += 3
    assert watch.curve == ([10, 0.5, 30.0], [20, 0.5, 60.0])
