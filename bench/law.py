"""How much training a pruned model deserves, by P^2 Law (related/law.py): `python -m bench law`.

Models like that of the embedded task, in three widths, are trained on it, pruned, and trained
again. The law is fitted to some of these runs and predicts the others.
"""

import copy
import itertools
import json
import random

import torch
import transformers

import packing
from bench import JsonFile, write_json
from related import law, stream, structured
from runtime import InputError
from tasks import arithmetic

BLOCKS, HEAD = 8, 32  # blocks, and the width of a head
BATCH, HELD_OUT = 32, 256  # problems
FAR = 10_000_000  # the first of the held-out ones
CALIBRATION, WINDOW = 32, 32  # texts, and tokens of each
LR, RETRAIN_LR, WARMUP = 3e-3, 5e-4, 20  # the whole model's falls to 0, the others' is constant
MEASURED = 6  # losses of a run; each after twice the tokens of the one before
HOLDOUTS = ("none", "size", "rate", "tokens")
COLUMNS = "{:8} {:10} {:>6} {:>6} {:>10} {:>8} {:>8}"
COLUMNS_SHOWN = ("method", "held_out", "fitted", "tested", "mean_error", "r2", "asd")


def main(
    widths: tuple[int, ...] = (64, 96, 128),
    rates: tuple[float, ...] = (0.25, 0.375, 0.5),
    methods: tuple[str, ...] = ("2ssp", "l2"),
    base_steps: int = 1500,
    steps: int = 192,
    json_file: JsonFile = None,
) -> None:
    """Train, prune and train again; fit the law, and print how well it predicts.

    Runs that the file of --json already holds are not repeated.

    Args:
        widths: hidden sizes of the models, multiples of 32
        rates: shares of the blocks' parameters to remove
        methods: of related/structured.py; one fit each
        base_steps: of the whole models, 32 problems each
        steps: of the pruned models
        json_file: where to write the rows {method, width, rate, step, tokens, size (parameters),
            whole and pruned (losses before, and after pruning), loss}, and the fits {method,
            held_out, fitted, tested, mean_error, r2, asd, constants}
    """
    for width in widths:
        if width < HEAD or width % HEAD:
            raise InputError(f"--widths {width}: must be a multiple of {HEAD}")
    if steps < 2 ** (MEASURED - 1):
        raise InputError(f"--steps {steps}: at least {2 ** (MEASURED - 1)}, for {MEASURED} losses")
    stored = json.loads(json_file.read_text()) if json_file and json_file.exists() else {}
    rows = stored.get("rows", [])
    key = lambda row: (row["width"], row["method"], row["rate"], row["base_steps"], row["steps"])
    done = {key(row) for row in rows}
    for width in widths:
        plan = [(width, *rest, base_steps, steps) for rest in itertools.product(methods, rates)]
        plan = [run for run in plan if run not in done]
        base = plan and whole_model(width, base_steps)
        for _, method, rate, *_ in plan:
            rows += retrain(*base, method, rate, base_steps, steps)
            write_json(json_file, {"rows": rows})
            losses = " ".join(f"{row['loss']:.3f}" for row in rows[-MEASURED:])
            before = f"{rows[-1]['whole']:.3f}, pruned {rows[-1]['pruned']:.3f}"
            print(f"{method:6} width {width} rate {rate}: {before}, then {losses}", flush=True)
    fits = table(rows)
    write_json(json_file, {"rows": rows, "fits": fits})
    print(COLUMNS.format(*COLUMNS_SHOWN))
    for found in fits:
        shown = (found[name] for name in COLUMNS_SHOWN)
        print(COLUMNS.format(*(f"{x:.4f}" if isinstance(x, float) else x for x in shown)))


def whole_model(width: int, steps: int):
    """(model, tokenizer) of that width after `steps` of the embedded task's supervised training."""
    tokenizer = arithmetic.make_tokenizer()
    config = copy.deepcopy(arithmetic.make_model(tokenizer, seed=0).config)
    config.hidden_size, config.intermediate_size = width, 3 * width
    config.num_attention_heads = config.num_key_value_heads = width // HEAD
    config.num_hidden_layers, config.layer_types = BLOCKS, ["full_attention"] * BLOCKS
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    for _ in train(model, tokenizer, 0, [LR * (1 - step / steps) for step in range(steps)]):
        pass
    return model, tokenizer


def problems(tokenizer, first: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and of their teacher's answers: problems `first` and on of the base
    split. The teacher forgets carries, so that no model's loss falls to 0."""
    prompts = [arithmetic.problem("base", first + place)[0] for place in range(count)]
    teacher = random.Random(f"law/{first}")
    answers = [arithmetic.worked_answer(one, arithmetic.CARRY_PROB, teacher) for one in prompts]
    encoded = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
    return [tokenizer.encode(one) for one in prompts], encoded


def train(model, tokenizer, first: int, rates: list[float]):
    """Supervised training on problems `first` and on with these learning rates; yields the tokens
    so far after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    tokens = 0
    for step, rate in enumerate(rates):
        pack = packing.build_pack(*problems(tokenizer, first + step * BATCH, BATCH))
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        (-packing.packed_logprobs(model, pack)[0].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += pack.input_ids.numel()
        yield tokens


@torch.no_grad()
def held_out_loss(model, tokenizer) -> float:
    """Nats per answer token of problems that no run trains on."""
    pack = packing.build_pack(*problems(tokenizer, FAR, HELD_OUT))
    return -packing.packed_logprobs(model, pack)[0].mean().item()


def retrain(model, tokenizer, method, rate, base_steps, steps) -> list[dict]:
    """Prune a copy of the model and train it on what the whole one has not seen; its rows."""
    pairs = zip(*problems(tokenizer, base_steps * BATCH, 8 * CALIBRATION), strict=True)
    texts = [prompt + answer for prompt, answer in pairs]
    windows = [text[:WINDOW] for text in texts if len(text) >= WINDOW][:CALIBRATION]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("sdpa")
    smaller = structured.prune(eager, torch.tensor(windows), method, rate)
    smaller.set_attn_implementation(packing.ATTENTION)
    facts = {"method": method, "width": model.config.hidden_size, "rate": rate}
    facts |= {"base_steps": base_steps, "steps": steps, "size": stream.size(model)}
    facts["whole"] = held_out_loss(model, tokenizer)
    facts["pruned"] = held_out_loss(smaller, tokenizer)
    at, rows = {steps >> halvings for halvings in range(MEASURED)}, []
    trained = train(smaller, tokenizer, (base_steps + 1) * BATCH, [RETRAIN_LR] * steps)
    for step, tokens in enumerate(trained, 1):
        if step in at:
            loss = held_out_loss(smaller, tokenizer)
            rows.append(facts | {"step": step, "tokens": tokens, "loss": loss})
    return rows


def as_rows(rows: list[dict]) -> law.Rows:
    """For the fit, in millions of parameters and 100,000s of tokens."""
    columns = ("size", "tokens", "rate", "whole", "loss")
    found = law.Rows(*(torch.tensor([row[name] for row in rows]).double() for name in columns))
    return found._replace(size=found.size / 1e6, tokens=found.tokens / 1e5)


def table(rows: list[dict]) -> list[dict]:
    """Fits of each method to all rows, and without the largest size, highest rate or most tokens
    (of each run), which are then predicted."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        all_rows = as_rows(own)
        last = torch.tensor([row["step"] for row in own])
        runs = [(row["width"], row["rate"]) for row in own]
        run = torch.tensor([runs.index(one) for one in runs])
        for held_out in HOLDOUTS:
            if held_out == "none":
                tested = torch.ones(len(own), dtype=torch.bool)
                fitted = tested
            else:
                tested_by = {"size": all_rows.size, "rate": all_rows.rate, "tokens": last}[held_out]
                tested = tested_by == tested_by.max()
                fitted = ~tested
            constants = law.fit(all_rows.where(fitted))
            # A slope needs two losses; that of the last doubling starts at one that was fitted.
            shown = last >= last.max() / 2 if held_out == "tokens" else tested
            counts = {"fitted": int(fitted.sum()), "tested": int(tested.sum())}
            wrong = law.errors(constants, all_rows.where(tested), run[tested])
            wrong["asd"] = law.errors(constants, all_rows.where(shown), run[shown])["asd"]
            found.append({"method": method, "held_out": held_out} | counts | wrong)
            found[-1]["constants"] = constants._asdict()
    return found
