"""
How often the host waits for the device, and how much it launches, line by line.

    python tests/gpu/count.py

It runs on the pretend device (pretend_cuda.py), so no number here is a time.
"""

import contextlib
import copy
import io
import sys
import tempfile
import zlib
from dataclasses import fields
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pretend_cuda

import config
import models
import packing
import rollout
import update
from engines import check_decoder
from run import Run
from runtime.device import cast_weights, fuse_norms
from tasks import arithmetic
from train import Trainer

UPDATES = {
    "defaults of CUDA": {},
    "gspo": {"loss": "gspo"},
    "cap": {"importance_cap": 2.0},
    "beta": {"beta": 0.1},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


def make_model(seed=0, layers=4):
    model = arithmetic.make_model(TOKENIZER, seed=seed)
    model.vocab_size = len(TOKENIZER)
    fuse_norms(model)
    for index in range(len(model.model.layers), layers):
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
        attention = model.model.layers[index].self_attn
        attention.layer_idx, attention.config = index, model.config
    model.config.num_hidden_layers = layers
    model.config.layer_types = ["full_attention"] * layers
    model = model.to("cuda")
    check_decoder.compare(model)
    return model


def sample(model, prompts, new_tokens, engine="compact"):
    """Rollouts of which none ends before `new_tokens`, from weights in bfloat16."""
    prompt_ids = [TOKENIZER.encode(arithmetic.problem("train", n)[0]) for n in range(prompts)]
    sampling = rollout.Sampling(new_tokens, [10**6], TOKENIZER.pad_token_id, engine=engine)
    policy = copy.deepcopy(model)
    cast_weights(policy, "bfloat16")
    return rollout.sample(policy, prompt_ids, sampling, group_size=4, seed=1)


def first(rollouts, prompts):
    """The rollouts of the first prompts."""
    return rollout.Rollouts(*(getattr(rollouts, f.name)[:prompts] for f in fields(rollouts)))


def show(title, seen, times):
    for kinds in (pretend_cuda.WAITS, ("launch",)):
        print(f"\n{title}: {seen.total(*kinds) / times:.2f} {'/'.join(kinds)}")
        print(seen.table(*kinds, most=14, divide=times))


def count_rollout(engine, layers=4):
    """A decoded token, from the difference of two lengths."""
    model, seen = make_model(layers=layers), {}
    for new_tokens in (16, 48):
        with pretend_cuda.counting() as seen[new_tokens]:
            sample(model, 4, new_tokens, engine)
    show(f"{engine}, a decoded token of {len(model.model.layers)} layers", seen[48] - seen[16], 32)


def count_update(name, options):
    """A pack, from the difference of few and many packs."""
    options = {"dtype": "bfloat16", "pack_tokens": 100, **options}
    cfg = config.resolve(config.Config(device="cuda", **options))
    model = make_model()
    reference = make_model(seed=1).requires_grad_(False) if cfg.beta else None
    if cfg.gradient_checkpointing:
        models.checkpoint_layers(model)
    everything, seen = sample(model, 12, 12), {}
    for prompts in (3, 3, 12):  # the first makes .grad, and does not count
        rollouts = first(everything, prompts)
        ones = torch.ones(prompts, 4, dtype=torch.float64)
        with pretend_cuda.counting() as found:
            sums = update.accumulate_gradients(
                model, rollouts, ones, ones, ones > 0, cfg=cfg, reference=reference
            )
        seen[int(sums.slots) // cfg.pack_tokens] = found
    (few, before), (many, after) = seen.items()
    print(
        f"\nupdate, {name}: {few} packs wait {before.waits()} times, {many} {after.waits()} times"
    )
    show(f"update, {name}, a pack", after - before, many - few)


def count_step(method):
    """The third step of a run: the first ones fill the history and the optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        make_model().save_pretrained(f"{folder}/model")
        TOKENIZER.save_pretrained(f"{folder}/model")
        args = ["--method", method, "--model", f"{folder}/model", "--data", "arithmetic"]
        args += ["--device", "cuda", "--out-dir", f"{folder}/run", "--eval-every", "0"]
        args += ["--steps", "3", "--prompts-per-step", "12", "--group-size", "4"]
        args += ["--max-new-tokens", "24", "--pack-tokens", "256"]
        reward = lambda text, _answer: float(zlib.crc32(text.encode()) % 2)
        with contextlib.redirect_stdout(io.StringIO()):
            run = Run(Trainer(config.parse_config(args), reward))
            run.open_folder()
            for _ in range(3):
                with pretend_cuda.counting() as seen:
                    run.write(*run.trainer.step(run.done + 1))
    show(f"a step of {method}", seen, 1)


if __name__ == "__main__":
    pretend_cuda.install()
    transformers.utils.logging.disable_progress_bar()
    packing.flash_attn_varlen_func = pretend_cuda.flash_attn_varlen_func
    TOKENIZER = arithmetic.make_tokenizer()
    count_rollout("hf")
    count_rollout("compact")
    count_rollout("compact", layers=28)
    for name, options in UPDATES.items():
        count_update(name, options)
    for method in ("grpo", "pps"):
        count_step(method)
