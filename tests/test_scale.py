"""bench/scale.py: counts and bytes are those of real runs, seconds those worked out by hand."""

import itertools
import json
import types

import numpy as np
import pytest
import torch
import toy
from toy import in_processes

import config
from bench import roofline, scale, shapes, tail
from bench.deal import Batch, Recorder
from run import Run
from runtime import deal, ranks

SMALL = shapes.qwen3("tiny")
RATES = scale.Rates(flops=1e9, memory=1e8, network=1e6, latency=0.25)


class Counting(Recorder):
    """Counts what this rank has really done in each step: completion tokens that it sampled, bytes
    of the table, bytes that it sent to others, prompt and completion tokens that it trained on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.real = []

    def roll_out(self, *args, **limit):
        sum_up = ranks.all_reduce
        tables = []
        ranks.all_reduce = lambda table, *how: tables.append(table.nbytes) or sum_up(table, *how)
        batch = super().roll_out(*args, **limit)
        ranks.all_reduce = sum_up
        self.real.append([int(batch.rollouts.lengths.sum()), max(tables), 0])
        return batch

    def backward(self, full, keep, *args):
        send, exchange = ranks.all_to_all, deal.exchange

        def sending(rows, sent, received):
            others = sum(sent) - sent[self.rank]
            self.real[-1][-1] = others * rows.shape[1] * rows.element_size()
            return send(rows, sent, received)

        def exchanging(*args):
            dealt, places, old = exchange(*args)
            tokens = [sum(map(len, dealt.prompt_ids)), int(dealt.lengths.sum())]
            self.real[-1] += tokens
            return dealt, places, old

        ranks.all_to_all, deal.exchange = sending, exchanging
        sums = super().backward(full, keep, *args)
        ranks.all_to_all, deal.exchange = send, exchange
        return sums


def count_work(folder, model):
    """Three steps of pps; each rank writes its counts."""
    flags = toy.flags(model, f"{folder}/run", method="pps", prompts_per_step=61, steps=3)
    trainer = Counting(config.parse_config([*flags, "--share-prompts", "False"]), toy.toy_reward)
    training = Run(trainer)
    training.open_folder()
    for _ in range(3):
        training.write(*training.advance())
    torch.save((trainer.batches, trainer.real), f"{folder}/rank{trainer.rank}.pt")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_counts_and_bytes_are_those_of_real_runs(policy_folder, tmp_path, world):
    """Three steps: what is dealt to each rank, and what travels. Fails if the simulation deals
    otherwise than a run, or forgets a column."""
    in_processes(world, count_work, str(tmp_path), policy_folder)
    hidden = 32  # of the policy
    for rank, step in itertools.product(range(world), range(3)):
        batches, real = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        batch = batches[step]
        sampled_on, trained_on, tokens, moved, _ = scale.place(batch, world, True, hidden)
        K, G = batch.lengths.shape
        sampled = int(batch.lengths[sampled_on == rank].sum())
        found = [sampled, scale.COLUMNS * K * G, int(moved[rank])]
        if world > 1:
            found += tokens[:, trained_on == rank].sum(dim=1).tolist()
        assert found == real[step]
        assert sampled > 0
        assert world == 1 or moved.sum() > 0


def test_what_stays_does_not_travel():
    """Fails if by turns is not prompt k on rank k mod R."""
    lengths = torch.arange(1, 13).view(3, 4)
    batch = Batch(torch.ones(3), torch.tensor([5, 6, 7]), lengths, lengths % 2 == 0)
    sampled_on, trained_on, tokens, moved, _ = scale.place(batch, 2, False, 8)
    assert sampled_on.tolist() == [[0] * 4, [1] * 4, [0] * 4]
    assert trained_on.tolist() == [0, 0, 1, 1, 0, 0]
    assert tokens.tolist() == [[5, 5, 6, 6, 7, 7], [2, 4, 6, 8, 10, 12]]
    assert not moved.any()


def test_decoding_is_that_of_single_passes():
    """Three ranks, of which one has nothing, with room for two sequences. Fails if a sequence
    starts too early, if its context does not grow, or if a rank pays for another."""
    ranks_of = np.array([0, 2, 0, 0, 2, 0])
    prompts, lengths = np.array([3, 4, 5, 6, 7, 8]), np.array([2, 9, 5, 4, 3, 1])
    gpu = shapes.GPU(RATES.flops, RATES.memory)
    found = scale.decoding_seconds(SMALL, gpu, ranks_of, prompts, lengths, 3, at_once=2)
    wanted = [0.0] * 3
    for rank in (0, 2):
        waiting = [number for number in range(6) if ranks_of[number] == rank]
        active = {}
        while waiting or active:
            while waiting and len(active) < 2:
                active[waiting.pop(0)] = 0
            context = sum(prompts[number] + done + 0.5 for number, done in active.items())
            wanted[rank] += roofline.decode_seconds(SMALL, gpu, len(active), context)
            active = {n: done + 1 for n, done in active.items() if done + 1 < lengths[n]}
    assert found == pytest.approx(wanted)


def test_seconds_by_hand():
    """One kept sequence of 5 + 3 tokens on the second of two ranks. Fails if a part waits for
    another rank than the slowest, if a collective is counted once too often, or if AdamW's state is
    not parted."""
    lengths = torch.tensor([[2, 2], [3, 1]])
    batch = Batch(torch.ones(2), torch.tensor([4, 5]), lengths, lengths == 3)
    moved = torch.tensor([7.0, 80.0])
    placed = (torch.tensor([[0, 0], [1, 1]]), torch.tensor([1]), torch.tensor([[5], [3]]), moved, 9)
    found = scale.seconds(batch, placed, 2, RATES, SMALL)
    weights, layers = roofline.parameters(SMALL), SMALL.num_hidden_layers
    compute = 4 / 3 * shapes.model_flops(SMALL, [(5, 3)]) / 1e9
    gathers = 3 * (4 * weights / 2 / 1e6 + layers * 0.25)
    assert gathers > compute > 0
    assert found["update"] == pytest.approx(gathers + roofline.ADAMW * weights / 2 / 1e8)
    fast = scale.seconds(batch, placed, 2, RATES._replace(network=1e15, latency=0.0), SMALL)
    assert fast["update"] == pytest.approx(compute + roofline.ADAMW * weights / 2 / 1e8)
    copy, table = 4 * weights / 2 / 1e6 + 0.25, 4 * scale.COLUMNS / 2 / 1e6 + 0.25
    assert found["traffic"] == pytest.approx(copy + 2 * table + 80 / 1e6 + 0.25)
    prefill = shapes.model_flops(SMALL, [(5, 1)]) / 3 / 1e9
    gpu, second = shapes.GPU(1e9, 1e8), (np.zeros(2, int), np.array([5, 5]), np.array([3, 1]))
    decode = scale.decoding_seconds(SMALL, gpu, *second, 1)[0]
    assert found["rollout"] == pytest.approx(prefill + decode)
    assert found["host"] == 9
    assert found["seconds"] == pytest.approx(sum(found[part] for part in list(found)[1:]))


def test_crossover():
    """Fails if it is not the first number of GPUs with a ratio below 1.5, or if none gives one."""
    grpo = {1: 9.0, 2: 3.0, 4: 2.9, 8: 9.0}
    step = lambda batch, world, rates: {"seconds": grpo.get(world, 9.0) if batch == "g" else 2.0}
    batches = {"grpo": "g", "pps": "p"}
    assert scale.crossover(batches, step, RATES) == 4
    assert scale.crossover(batches | {"grpo": "p", "pps": "g"}, step, RATES) == 1
    never = lambda batch, world, rates: {"seconds": 3.0 if batch == "g" else 2.0}
    assert scale.crossover(batches, never, RATES) is None


def test_log_normal():
    """1,000 tokens in the middle, 16,384 at most; pps keeps 0.4 of the prompts and fewer tokens
    than that, and grpo everything. Fails if the history has learned nothing."""
    grpo, pps = (scale.log_normal(method, 256) for method in ("grpo", "pps"))
    assert grpo.lengths.shape == (256, 16)
    assert grpo.keep.all()
    assert 800 < grpo.lengths.median() < 1250
    assert grpo.lengths.max() == 16_384
    assert len(pps.prompts) == 102
    assert pps.lengths.sum() < 0.4 * grpo.lengths.sum()
    kept = (pps.keep * pps.lengths).sum() / pps.lengths.sum()
    assert 0.2 < kept < 0.4
    assert grpo.expected.std() > 0.1


def test_the_command(monkeypatch, tmp_path, capsys):
    """Fails if a recorded batch is not repeated to the size that was asked for, if a change of rate
    does not reach the seconds, or if no picture is drawn."""
    lengths = torch.tensor([[2.0, 9], [4, 5], [1, 1]])
    batch = Batch(torch.tensor([3.0, 2, 1]), torch.tensor([4, 5, 6]), lengths, lengths > 1)
    batch = batch._replace(size=lengths, weight=torch.ones(3))
    trainer = types.SimpleNamespace(batches=[batch], num_candidates=6)
    monkeypatch.setattr(scale, "run", lambda args, _: (trainer, None))
    many = scale.recorded("")("pps", 10)
    assert many.prompts.tolist() == [4, 5, 6, 4, 5]
    monkeypatch.setattr(scale, "WORLDS", (1, 2, 4))
    seen, seconds = [], scale.seconds
    record = lambda *args: seen.append(args[3]) or seconds(*args)
    monkeypatch.setattr(scale, "seconds", record)
    scale.main("tiny", candidates=24, picture=tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert len(set(seen)) == 9
    out = capsys.readouterr().out
    assert "grpo / pps first below 1.5 at" in out
    assert "recorded" in out


# ---------------------------------------------------------------------------- bench tail


def test_noise_and_seconds_of_a_tail(monkeypatch):
    """Four groups of two, one beyond the checkpoint, by hand: noise, prompts and seconds. Catches
    sizes of a stopped step that count, a coin's noise that more prompts average out, and seconds
    that are not weighted by the coin's chance."""
    lengths = torch.tensor([[2, 3], [9, 1], [4, 4], [1, 1]])
    size = torch.tensor([[1.0, 1], [1, 0], [2, 0], [0, 0]], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    prompts, keep = torch.full((4,), 2), torch.ones(4, 2, dtype=torch.bool)
    batch = Batch(ones, prompts, lengths, keep, size, ones)
    short = tail.Tail(batch, 4, 0.0)
    assert short.beyond.tolist() == [False, True, False, False]
    share = 1 / (2**0.5 + 1 + 2)
    assert short.share == pytest.approx(share)
    assert short.facts()["mean_length_within"] == 2.5
    stopped = short.stopped()
    assert stopped.lengths.tolist() == [[2, 3], [4, 1], [4, 4], [1, 1]]
    assert stopped.keep.tolist() == [[True, True], [False, False], [True, True], [True, True]]
    assert short.kept(0.0)[1] == 6
    assert short.kept(2.0)[1] == 10  # the group's 1 became 4
    machine = tail.Machine("tiny", RATES)
    longest = lambda batch, world, prompts=1.0: prompts * batch.lengths.max().item()
    monkeypatch.setattr(machine, "seconds", longest)
    ratio, more = machine.ratio(short, 0.2, 0.5, 1, 9.0)
    noise = 0.2 * 6 + 0.8 * (6 + 1.25**2)  # a stopped step's terms, a whole one's
    assert more == pytest.approx(noise / 7 / (1 - 0.25 * share**2 / 0.5))
    assert ratio == pytest.approx(more * (0.2 * 4 + 0.8 * 9) / 9)
    assert machine.ratio(short, 0.5, share**2, 1, 9.0) == (None, None)
    # pps keeps a share of what a stopped step has sampled, so the noise of the rest grows
    pruned = tail.Tail(batch, 4, 0.5)
    assert pruned.kept(0.0)[1] > 6
    assert pruned.kept(1.0)[1] > 7


def test_the_table_of_tails(monkeypatch, tmp_path, capsys):
    """Fails if grpo's batch is pruned or pps's is not, if a checkpoint that all groups pass is
    listed, or if the rows are not those of the table."""
    lengths = torch.tensor([[8, 2], [7, 7], [1, 1], [6, 1]])
    size, ones = torch.ones(4, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    batch = Batch(ones, torch.full((4,), 2), lengths + 0, size > 0, size, ones)
    everything = batch._replace(lengths=torch.tensor([[8, 2], [7, 7], [5, 1], [6, 1]]))
    monkeypatch.setattr(scale, "log_normal", lambda *_: batch)
    monkeypatch.setattr(scale, "recorded", lambda _: lambda *_: everything)
    monkeypatch.setattr(tail, "WORLDS", (2,))
    seen, kind = set(), tail.Tail
    record = lambda batch, checkpoint, rate: seen.add(rate) or kind(batch, checkpoint, rate)
    monkeypatch.setattr(tail, "Tail", record)
    tail.main("tiny", json_file=tmp_path / "rows.json")
    assert seen == {0.0, 0.7}
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {(row["work"], row["method"], row["checkpoint"]) for row in rows}
    of = {"log-normal": (1, 2, 4, 6), "recorded": (6,)}
    wanted = {(work, m, c) for work, cs in of.items() for m in ("grpo", "pps") for c in cs}
    assert found == wanted
    assert len(rows) == 4 * len(found)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found)
