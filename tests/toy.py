"""Runs of a few seconds: flags, a reward that an untrained model can earn, processes, comparisons.

As a program, `toy.py FLAGS...` is `train.py FLAGS...` with the toy reward.
"""

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import types
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import config
import lora
import metrics
import packing
import rollout
import sampler
import train
import update
from runtime import InputError, plot, ranks

ROOT = Path(__file__).resolve().parents[1]
HANG = 1800  # seconds; everything that tests wait for takes a few, so only a hang lasts this long


def toy_reward(completion, _answer):
    """1 if the completion starts with a digit, a sign or a control byte: a quarter of the time."""
    return float(completion[:1] < "@")


def worked(prompt):
    """The right completion of a sum, such as 7+9=16;16+5=21."""
    numbers = [*map(int, prompt.rstrip("?").split("+"))]
    totals = [*itertools.accumulate(numbers)]
    links = zip(totals, numbers[1:], totals[1:], strict=False)
    return ";".join(f"{total}+{number}={result}" for total, number, result in links)


def flags(model, out_dir, **changes):
    """The command line of a run of a few seconds. A value of True makes a switch."""
    options = {
        "model": model, "method": "dppo", "out_dir": out_dir, "device": "cpu", "steps": 4,
        "prompts_per_step": 4, "group_size": 6, "max_new_tokens": 6, "pack_tokens": 48, "lr": 1e-3,
        "eval_every": 0, "save_every": 0, "rest": 0.4,
    } | changes  # fmt: skip
    flag = {name: f"--{name.replace('_', '-')}" for name in options}
    pairs = [[flag[name], str(value)] for name, value in options.items() if value is not True]
    switches = [flag[name] for name, value in options.items() if value is True]
    return [*itertools.chain(*pairs), *switches]


def main(args):
    """`train.py ARGS...` with the toy reward."""
    train.main(config.parse_config(args), reward=toy_reward)


class Stored:
    """An engine that returns what was sampled before for the prompts `window` [Q]."""

    def __init__(self, rollouts, window):
        self.rollouts = rollouts
        self.place = {index: place for place, index in enumerate(window.tolist())}

    def sample(self, model, prompt_ids, sampling, *, keys, **options):
        places = [self.place[key] for key in keys]
        columns = vars(self.rollouts).values()
        pick = lambda value: value[places] if torch.is_tensor(value) else prompt_ids
        return rollout.Rollouts(*map(pick, columns))


def plain_logits(model, ids):
    """[B, L, V] by transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    model.set_attn_implementation(packing.ATTENTION)
    return logits


INJECT = lora.inject


def inject_moved(model, rank, seed):
    """lora.inject with a B that is not 0."""
    INJECT(model, rank, seed)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02, generator=generator)


def rows(folder, file="log.jsonl"):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def timeless(folder):
    """What must repeat: the log without its times, samples and groups, the final weights."""
    times = ("time/", "step_time")
    log = [{key: row[key] for key in row if not key.startswith(times)} for row in rows(folder)]
    (file,) = (folder / "checkpoint").glob("*model.safetensors")  # or adapter_model
    weights = load_file(file)
    files = [folder / "samples.jsonl", folder / "groups.jsonl"]  # tasks.sft writes neither
    others = [row for file in files if file.exists() for row in rows(folder, file.name)]
    return log, others, weights


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


# ---------------------------------------------------------------------------- processes

FORKS = multiprocessing.get_context("forkserver")  # a process starts with torch already imported
FORKS.set_forkserver_preload(["toy"])


def in_processes(world, work, *args, codes=None):
    """Run work(*args) in `world` new processes; returns the list of what each of them printed.

    Two or more are the ranks of a group, as under torchrun. They must end with the exit codes
    `codes`, by default 0; as soon as one ends with another code, the rest is killed.
    """
    codes = codes or [0] * world
    folders = ("tests", "tests/integrations", "integrations", "")
    path = os.pathsep.join(str(ROOT / name) for name in folders)
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()  # Python 3.11 would not find the modules to preload
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(world)]
        processes = [
            FORKS.Process(target=_start, args=(rank, world, store.port, outputs[rank], work, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        ended = _wait(processes, codes)
        printed = [path.read_text() for path in outputs]
    assert ended == codes, f"{ended}\n" + "\n".join(printed)
    return printed


def _start(rank, world, port, output, work, args):
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    plot.draw_run = lambda out_dir: None  # see conftest.no_pictures
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
    work(*args)
    if torch.distributed.is_initialized():
        ranks.finish()
        torch.distributed.destroy_process_group()


def _wait(processes, codes):
    deadline = time.monotonic() + HANG
    while alive := [process for process in processes if process.exitcode is None]:
        expected = zip(processes, codes, strict=True)
        wrong = any(process.exitcode not in (None, code) for process, code in expected)
        if wrong or time.monotonic() > deadline:
            for process in alive:
                process.kill()
        connection.wait([process.sentinel for process in alive], timeout=HANG)
    return [process.exitcode for process in processes]


# ---------------------------------------------------------------------------- a recorded run


class Recorder(train.Trainer):
    """Records what each step did, in `steps`: the tensors that it gives to metrics.row, its draw
    `kept` [Q] of prompts, what it `taught` the history, and its `updates`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = []

    def step(self, step):
        self.now = types.SimpleNamespace(updates=[])
        prune, learn, row = sampler.prune_prompts, self.history.update, metrics.row

        def see_prune(*args):
            self.now.kept, weights = prune(*args)
            return self.now.kept, weights

        def see_taught(prompts, advantages):
            self.now.taught = types.SimpleNamespace(prompts=prompts, advantages=advantages)
            learn(prompts, advantages)

        def see_row(cfg, **tensors):
            vars(self.now).update(tensors)
            return row(cfg, **tensors)

        with (
            mock.patch.object(train, "accumulate_gradients", self.see_update),
            mock.patch.object(metrics, "row", see_row),
            mock.patch.object(sampler, "prune_prompts", see_prune),
            mock.patch.object(self.history, "update", see_taught),
        ):
            found = super().step(step)
        self.steps.append(self.now)
        return found

    def see_update(self, model, rollouts, advantages, factor, keep, **options):
        """In place of update.accumulate_gradients."""
        assert all(parameter.grad is None for parameter in model.parameters())
        sums = update.accumulate_gradients(model, rollouts, advantages, factor, keep, **options)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradient = [ranks.whole(parameter.grad).flatten() for parameter in trained]
        tables = {"advantages": advantages, "factor": factor, "keep": keep}
        tables |= {"rollouts": rollouts, "sums": sums, "gradient": torch.cat(gradient)}
        self.now.updates.append(types.SimpleNamespace(**tables, options=options))
        return sums


BOTH_LEVELS = {"method": "pps", "prompt_rule": "uniform"}
RUNS = {  # that must not depend on the number of ranks
    "alone": {"prompts_per_step": 1},  # the second of two ranks has no prompt
    "updates": BOTH_LEVELS | {"loss": "dapo", "minibatches": 2, "beta": 0.1},
    "corrected": BOTH_LEVELS
    | {"loss": "gspo", "minibatches": 2, "importance_cap": 1.5, "mask_truncated": True, "lr": 1e-2},
    "adapters": BOTH_LEVELS | {"lora": 4, "beta": 0.1},  # not with --shard fsdp
    "untied": BOTH_LEVELS | {"beta": 0.1, "gradient_checkpointing": True},  # and a head in chunks
}


def record_runs(folder, model, *args):
    """All of RUNS; every rank writes its record of each."""
    rates = {"prompt_prune_rate": 0.3, "completion_prune_rate": 0.5, "steps": 3, "seed": 3}
    for name, changes in RUNS.items():
        if name == "adapters" and "fsdp" in args:
            continue
        packing.HEAD_LOGITS = 1024 if name == "untied" else 2**27
        folder_of_model = f"{model}-untied" if name == "untied" else model
        own = flags(folder_of_model, f"{folder}/{name}", **(rates | changes))
        trainer = Recorder(config.parse_config([*own, *args]), toy_reward)
        train.run(trainer)
        record = [
            (step.taught.prompts, step.prompt_weights, one.keep, one.gradient)
            for step in trainer.steps
            for one in step.updates
        ]
        torch.save(record, f"{folder}/{name}-rank{trainer.rank}.pt")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as problem:
        sys.exit(f"error: {problem}")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
