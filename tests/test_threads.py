"""The number of threads follows the idle cores, and ignores noise."""

import os

import pytest
import torch

from runtime import threads


@pytest.fixture
def machine(monkeypatch):
    """A machine of four cores whose idle shares the test sets, and torch with four threads."""
    idle, clock, before = [1.0] * 4, [0.0], torch.get_num_threads()
    looks = []

    def ticks():
        looks.append(len(looks))
        number = len(looks)  # each look reads the counters twice, 100 ticks apart
        return {core: (100 * share * number, 100 * number) for core, share in enumerate(idle)}

    monkeypatch.setattr(threads, "_ticks", ticks)
    monkeypatch.setattr(threads, "LOOK", 1e-9)
    monkeypatch.setattr(threads.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "MOST", 4)
    torch.set_num_threads(4)
    yield idle, clock, looks
    torch.set_num_threads(before)


def test_one_thread_for_each_idle_core(machine, capsys):
    """Fewer when other processes compute, all of them again afterwards, and one at the least.

    Fails if busy cores are counted, if the number never recovers, if it reaches 0, or if part of a
    core changes it.
    """
    idle, *_ = machine
    for shares, expected in (
        ([1.0] * 4, 4), ([0.9, 0.95, 1.0, 0.8], 4), ([0.9, 0.0, 1.0, 0.9], 3), ([0.0] * 4, 1),
        ([0.5, 0.0, 0.0, 0.0], 1), ([0.9, 0.8, 0.0, 0.0], 1), ([1.0, 1.0, 0.0, 0.0], 2),
        ([1.0, 1.0, 0.6, 0.0], 2), ([1.0] * 4, 4),
    ):  # fmt: skip
        idle[:] = shares
        threads.Threads("cpu").fit()  # every run knows what the machine has
        assert torch.get_num_threads() == expected, shares
    out, err = capsys.readouterr()
    said = [
        f"computing with {number} of 4 threads, one for each idle core" for number in (3, 1, 2, 4)
    ]
    assert (out, err.splitlines()) == ("", said), "the output of eval.py is for other programs"


def test_a_fixed_number_stays(machine, monkeypatch):
    """Fails if OMP_NUM_THREADS is overruled, or a GPU run pays for looking at the cores."""
    idle, _, looks = machine
    idle[:] = [0.0] * 4
    threads.Threads("cuda").fit()
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "4")
    threads.Threads("cpu").fit()
    assert torch.get_num_threads() == 4
    assert not looks


@pytest.mark.parametrize("ticks", [lambda: {}, lambda: {0: (7, 9)}, lambda: {}["cpu"]])
def test_an_unknown_machine_is_idle(machine, monkeypatch, ticks):
    """Counters that are missing, stand still or cannot be read. Fails if they mean one thread."""

    def read():
        try:
            return ticks()
        except KeyError:
            raise OSError from None

    monkeypatch.setattr(threads, "_ticks", read)
    threads.Threads("cpu").fit()
    assert torch.get_num_threads() == 4


def test_own_threads_are_no_load(machine, monkeypatch):
    """Fails if threads of this process that still spin count as another process."""
    idle, *_ = machine
    idle[:] = [0.0, 1.0, 1.0, 1.0]
    spent = iter((0.0, threads.LOOK))
    monkeypatch.setattr(threads.time, "process_time", lambda: next(spent))
    threads.Threads("cpu").fit()
    assert torch.get_num_threads() == 4


def test_looks_are_rare(machine):
    """One look in PERIOD seconds. Fails if every step pays for one."""
    _, clock, looks = machine
    chosen = threads.Threads("cpu")
    for seconds in range(20):
        clock[0] = float(seconds)
        chosen.fit()
    assert len(looks) == 2 * 4


def test_this_machine():
    """The real counters: between none and all of the cores that this process may use, up to the
    length of a clock tick."""
    assert 0 <= threads.idle_cores() <= len(os.sched_getaffinity(0)) + 0.5
