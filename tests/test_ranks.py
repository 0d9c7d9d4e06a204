"""--shard fsdp is the same run: gradients, updates, checkpoints. test_train.py has whole runs on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import flags, rows
from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def test_gradients_of_a_sharded_model(make_policy, tmp_path):
    """Three updates with clipping, AdamW and the KL term, tied and untied, with and without gradient checkpointing and
    head chunks, on ranks with unequal packs and one with none. Kills: a mean over ranks, a rank that forwards less
    often, weights of before the update, a tied weight in two shards."""
    for name, tied in (("tied", True), ("untied", False)):
        model, tokenizer = make_policy()
        model.config.tie_word_embeddings = tied
        torch.manual_seed(0)
        Qwen3ForCausalLM(model.config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    program = [str(ROOT / "tests" / "sharded.py"), str(tmp_path / "tied"), str(tmp_path / "untied")]
    done = subprocess.run(
        [*TORCHRUN, "2", *program], capture_output=True, text=True, env=ONE_THREAD, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same") == 16


def test_resumed_on_other_ranks(policy_folder, tmp_path):
    """Two steps sharded over 2 ranks, two on one rank, two sharded over 3: the run of one rank, and its checkpoint.
    Kills: a share saved as the whole, Adam's state of another parameter, a fingerprint of a share."""
    toy = [str(ROOT / "tests" / "toy.py"), "by-prompt"]
    common = {"save_every": 2, "eval_every": 2, "eval_problems": 3, "beta": 0.1, "weight_decay": 0.1}

    def go(name, steps, ranks, *words):
        command = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
        run = [*command, *toy, *flags(policy_folder, str(tmp_path / name), **common), "--steps", str(steps), *words]
        subprocess.run(run, check=True, env=ONE_THREAD, timeout=200)

    go("whole", 6, 1)
    go("broken", 2, 2, "--shard", "fsdp")
    go("broken", 4, 1, "--resume", "--shard", "none")
    go("broken", 6, 3, "--resume", "--shard", "fsdp")
    for here, there in zip(rows(tmp_path / "whole"), rows(tmp_path / "broken"), strict=True):
        assert here.keys() == there.keys()
        for key in {"step", "reward", "grad_norm", "loss", "eval/avg@4"} & here.keys():
            assert here[key] == pytest.approx(there[key], rel=1e-4, abs=1e-6), key
    one, other = tmp_path / "whole" / "checkpoint", tmp_path / "broken" / "checkpoint"
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())
    here, there = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-5)
    here, there = (torch.load(folder / "trainer.pt", weights_only=True)["optimizer"] for folder in (one, other))
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys()
    for index, entries in here["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(value, there["state"][index][name], rtol=1e-3, atol=1e-6)


def test_the_first_rank_decides(tmp_path):
    """What it found, and what it found wrong, on both ranks. Kills: problems that each rank picks by its
    own clock, a base model that each one trains."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import data, ranks\n"
        "rank, world = ranks.start('cpu')\n"
        "def fail(): raise data.InputError(f'wrong on {rank}')\n"
        "said = ranks.first_says(lambda: print('called', flush=True) or f'found by {rank}')\n"
        "try: ranks.first_says(fail)\n"
        "except data.InputError as error: print(f'<{rank} of {world}: {said}, {error}>', flush=True)\n"
        "ranks.barrier()\n"
    )
    done = subprocess.run([*TORCHRUN, "2", str(program)], capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert done.stdout.count("called") == 1, done.stderr
    for rank in range(2):
        assert f"<{rank} of 2: found by 0, wrong on 0>" in done.stdout, done.stderr
