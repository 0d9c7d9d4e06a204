"""train.py with a reward that an untrained model can earn, and with rollouts that do not depend on the rank.

As a program: `toy.py FLAGS...` is `train.py FLAGS...` with the toy reward; `toy.py by-prompt FLAGS...` the same with
rollouts that do not depend on the ranks; `toy.py ranks FOLDER MODEL [FLAGS...]` is the run that test_train.py compares
on one and on two ranks.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import config
import data
import dppo
import packing
import ranks
import rollout
import sampler
import train


def toy_reward(completion, _gold):
    """1 if the completion starts with a digit, a sign or a control byte: one time in four by chance."""
    return float(completion[:1] < "@")


def flags(model, out_dir, **changes):
    """A run of a few seconds, as command-line words."""
    options = {
        "model": model, "method": "dppo", "out_dir": out_dir, "device": "cpu", "steps": 4, "prompts_per_step": 4,
        "group_size": 6, "max_new_tokens": 6, "pack_tokens": 48, "lr": 1e-3, "eval_every": 0, "save_every": 0,
    } | changes  # fmt: skip
    words = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items() if value is not True]
    return [
        *itertools.chain(*words),
        *[f"--{name.replace('_', '-')}" for name, value in options.items() if value is True],
    ]


def sample_by_prompt(model, prompt_ids, sampling, *, group_size, seed, real=rollout.sample):
    """Each prompt's group from a seed of its own, so that it is the same whoever rolls it out."""
    own = [([ids], sampler.seed_for("toy", ids)) for ids in prompt_ids] or [([], seed)]
    return rollout.join([real(model, ids, sampling, group_size=group_size, seed=one) for ids, one in own])


def plain_logits(model, ids):
    """[B, L, V] by transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    model.set_attn_implementation(packing.ATTENTION)
    return logits


def rows(folder, file="log.jsonl"):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def timeless(folder):
    """What must repeat: the log without its times, the samples, the final weights."""
    kept = [{key: row[key] for key in row if not key.startswith(("time/", "step_time"))} for row in rows(folder)]
    return kept, rows(folder, "samples.jsonl"), load_file(folder / "checkpoint" / "model.safetensors")


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def on_ranks(folder, model, *words):
    """Five runs whose gradients and keep decisions are written by every rank: a plain one, one where whatever the
    second of two ranks holds is dropped, one where the second rank gets no prompt, one with pps, KL, mini-batches,
    epochs and the running check, and greso, of which a round may leave the second rank without a prompt."""
    rollout.sample = sample_by_prompt
    record = []
    draw, systematic, sum_gradients = dppo.draw, dppo.systematic, train.sum_gradients

    def recording_sum(model):
        sum_gradients(model)
        record.append(torch.cat([ranks.whole(parameter.grad).flatten() for parameter in model.parameters()]))

    updates = {"method": "pps", "loss": "dapo", "minibatches": 2, "epochs": 2, "beta": 0.1,
               "check_every": 1}  # fmt: skip
    for name, changes in (
        ("plain", {}), ("dropped", {}), ("alone", {"prompts_per_step": 1}), ("updates", updates),
        ("greso", {"method": "greso", "group_size": 2, "prompts_per_step": 3, "prompt_prune_rate": 0,
                   "completion_prune_rate": 0, "lr": 1e-5, "steps": 8}),
    ):  # fmt: skip

        def recording_draw(keep_prob, generator, name=name):
            keep = draw(keep_prob, generator)
            if name == "dropped" and keep.dim() == 2:
                keep[1::2] = False
            record.append(keep)
            return keep

        def recording_systematic(keep_prob, order, start):
            record.append(systematic(keep_prob, order, start))
            return record[-1]

        record.clear()
        dppo.systematic = recording_systematic
        dppo.draw, train.sum_gradients = recording_draw, recording_sum
        rates = {"prompt_prune_rate": 0.3, "completion_prune_rate": 0.5, "steps": 3, "save_every": 3}
        own = flags(model, f"{folder}/{name}", **(rates | changes))
        train.main(config.parse_config([*own, *words]))
        torch.save(record, f"{folder}/{name}-rank{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    data.reward_function = lambda _name: toy_reward
    if sys.argv[1] == "ranks":
        on_ranks(*sys.argv[2:])
    else:
        if sys.argv[1] == "by-prompt":
            rollout.sample = sample_by_prompt
            del sys.argv[1]
        try:
            train.main(config.parse_config(sys.argv[1:]))
        except data.InputError as problem:
            sys.exit(f"error: {problem}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
