"""
P^2 Law (arXiv:2411.10272): how far a pruned model's loss falls while it is trained again.

    L = L0 + rho^-gamma N0^-delta (N_C N0^-alpha + D_C D^-beta + E)

L0 and N0 are the loss and the size of the whole model, rho is the share that was removed, and D is
the number of tokens since. The seven constants are fitted to cheap runs, and tell whether an
expensive one is worth it. gamma is negative: the more is removed, the higher the loss.

    python -m related.law    fit it to small runs and predict others, half an hour of one core

Models like that of the embedded task, in three widths, are trained on it, pruned, and trained
again. The law is fitted to some of these runs and predicts the others.

The form is as a summary of the paper gives it. How it is fitted and the unit of a slope are our
reconstruction.

Letters: R measurements.
"""

import copy
import itertools
import math
import random
from typing import NamedTuple

import torch
import transformers
import tyro

import packing
from bench import JsonFile, write_json
from related import stream, structured
from tasks import arithmetic

HUBER = 0.01  # nats; beyond, a residual counts linearly
STARTS, ITERATIONS = 32, 300  # of the fit
CENTRE = (-2.0, -2.0, -4.0, -1.0, -1.0, 0.0, 0.0)  # of the random starts

WIDTHS, RATES, METHODS = (64, 96, 128), (0.25, 0.375, 0.5), ("2ssp", "l2")
BLOCKS, HEAD = 8, 32  # blocks of a model, and the width of a head
BASE_STEPS, LR = 1500, 3e-3  # of the whole models; their learning rate falls to 0
STEPS, RETRAIN_LR = 192, 5e-4  # of the pruned ones; theirs is constant
WARMUP, BATCH = 20, 32  # steps, problems
MEASURED = (6, 12, 24, 48, 96, 192)  # the steps after which a pruned model's loss is measured
CALIBRATION, WINDOW = 32, 32  # texts, and tokens of each
HELD_OUT, FAR = 256, 10_000_000  # problems, and the first of them: no run comes that far


# ---------------------------------------------------------------------------- the law


class Rows(NamedTuple):
    """Measurements, float64 [R] each. The constants absorb all units; values near 1 are best."""

    size: torch.Tensor  # N0
    tokens: torch.Tensor  # D, above 0
    rate: torch.Tensor  # rho, above 0
    whole: torch.Tensor  # L0, nats
    loss: torch.Tensor  # L, nats

    def where(self, chosen: torch.Tensor) -> "Rows":
        """The chosen rows, bool [R], alone."""
        return Rows(*(column[chosen] for column in self))


class Law(NamedTuple):
    """The constants, under the names of the equation."""

    N_C: float
    D_C: float
    E: float
    alpha: float
    beta: float
    gamma: float
    delta: float

    def predict(self, rows: Rows) -> torch.Tensor:
        """The losses [R] that the law expects; rows.loss is not read."""
        inner = self.N_C * rows.size**-self.alpha + self.D_C * rows.tokens**-self.beta + self.E
        return rows.whole + rows.rate**-self.gamma * rows.size**-self.delta * inner


def fit(rows: Rows) -> Law:
    """The constants with the least mean Huber loss, from the best of several random starts."""
    generator = torch.Generator().manual_seed(0)
    best, found = math.inf, None
    for _ in range(STARTS):
        start = torch.tensor(CENTRE) + torch.randn(len(CENTRE), generator=generator)
        loss, law = descend(rows, start.double())
        if loss < best:  # False for a start that diverged to NaN
            best, found = loss, law
    return found


def descend(rows: Rows, start: torch.Tensor) -> tuple[float, Law]:
    """(loss, law) at the end of one descent. All constants but gamma and delta are exponentials of
    what is fitted, so that they stay positive."""
    free = start.requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def huber():
        optimizer.zero_grad()
        predicted = Law(*free[:5].exp(), *free[5:]).predict(rows)
        loss = torch.nn.functional.huber_loss(predicted, rows.loss, delta=HUBER)
        loss.backward()
        return loss

    optimizer.step(huber)
    loss = huber().item()
    return loss, Law(*free[:5].exp().tolist(), *free[5:].tolist())


def errors(law: Law, rows: Rows, run: torch.Tensor) -> dict[str, float]:
    """How well the law predicts: mean_error (of the loss, nats), r2, and asd, the paper's Average
    Slope Difference, here in nats per doubling of D. run [R] numbers the runs; slopes are between
    neighbours in D of one run."""
    residual = law.predict(rows) - rows.loss
    spread = (rows.loss - rows.loss.mean()).square().sum()
    order = sorted(range(len(run)), key=lambda r: (run[r].item(), rows.tokens[r].item()))
    inside = run[order].diff() == 0
    doublings = rows.tokens[order].log2().diff()[inside]
    slopes = (residual[order].diff()[inside] / doublings).abs()
    return {
        "mean_error": residual.abs().mean().item(),
        "r2": (1 - residual.square().sum() / spread).item(),
        "asd": slopes.mean().item(),
    }


# ---------------------------------------------------------------------------- the small runs


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


def whole_model(width: int, tokenizer):
    """A model of that width after the embedded task's supervised training."""
    config = copy.deepcopy(arithmetic.make_model(tokenizer, seed=0).config)
    config.hidden_size, config.intermediate_size = width, 3 * width
    config.num_attention_heads = config.num_key_value_heads = width // HEAD
    config.num_hidden_layers, config.layer_types = BLOCKS, ["full_attention"] * BLOCKS
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    rates = [LR * (1 - step / BASE_STEPS) for step in range(BASE_STEPS)]
    for _ in train(model, tokenizer, 0, rates):
        pass
    return model


def calibration_texts(tokenizer) -> torch.Tensor:
    """[CALIBRATION, WINDOW] tokens of the first problems that a whole model has not seen."""
    pairs = zip(*problems(tokenizer, BASE_STEPS * BATCH, 8 * CALIBRATION), strict=True)
    texts = [prompt + answer for prompt, answer in pairs]
    long_enough = [text[:WINDOW] for text in texts if len(text) >= WINDOW]
    return torch.tensor(long_enough[:CALIBRATION])


def retrain(model, tokenizer, method: str, rate: float) -> list[dict]:
    """Prune a copy of the model and train it on what the whole one has not seen; its rows."""
    whole = copy.deepcopy(model)
    whole.set_attn_implementation("sdpa")
    smaller = structured.prune(whole, calibration_texts(tokenizer), method, rate)
    smaller.set_attn_implementation(packing.ATTENTION)
    facts = {"method": method, "width": model.config.hidden_size, "rate": rate}
    facts |= {"size": stream.size(model), "whole": held_out_loss(model, tokenizer)}
    facts |= {"pruned": held_out_loss(smaller, tokenizer)}
    rows = []
    rates = [RETRAIN_LR] * STEPS
    for step, tokens in enumerate(train(smaller, tokenizer, (BASE_STEPS + 1) * BATCH, rates), 1):
        if step in MEASURED:
            loss = held_out_loss(smaller, tokenizer)
            rows.append(facts | {"step": step, "tokens": tokens, "loss": loss})
    return rows


# ---------------------------------------------------------------------------- what it predicts


def as_rows(rows: list[dict]) -> Rows:
    """For the fit, in millions of parameters and 100,000s of tokens."""
    columns = ("size", "tokens", "rate", "whole", "loss")
    found = Rows(*(torch.tensor([row[name] for row in rows]).double() for name in columns))
    return found._replace(size=found.size / 1e6, tokens=found.tokens / 1e5)


def fits_of(rows: list[dict], method: str) -> list[dict]:
    """The law of a method, fitted to all of its rows, and without the largest size, the highest
    rate or the most tokens (of each run), which it then predicts."""
    own = [row for row in rows if row["method"] == method]
    measured = as_rows(own)
    step = torch.tensor([row["step"] for row in own])
    runs = [(row["width"], row["rate"]) for row in own]
    run = torch.tensor([runs.index(one) for one in runs])
    nothing = torch.zeros(len(own), dtype=torch.bool)
    held_out = {
        "none": nothing,
        "size": measured.size == measured.size.max(),
        "rate": measured.rate == measured.rate.max(),
        "tokens": step == step.max(),
    }
    found = []
    for name, hidden in held_out.items():
        law = fit(measured.where(~hidden))
        tested = hidden if hidden.any() else ~nothing
        # A slope needs two losses; that of the last doubling starts at one that was fitted.
        sloped = step >= step.max() / 2 if name == "tokens" else tested
        wrong = errors(law, measured.where(tested), run[tested])
        wrong["asd"] = errors(law, measured.where(sloped), run[sloped])["asd"]
        counts = {"fitted": int((~hidden).sum()), "tested": int(tested.sum())}
        facts = {"method": method, "held_out": name} | counts | wrong
        found.append(facts | {"constants": law._asdict()})
    return found


def main(json_file: JsonFile = None) -> None:
    """Train, prune and train again; fit the law, and print how well it predicts.

    Args:
        json_file: where to write the rows {method, width, rate, size (parameters), whole and pruned
            (losses before, and after pruning), step, tokens, loss}, and the fits {method, held_out,
            fitted, tested, mean_error, r2, asd, constants}
    """
    tokenizer = arithmetic.make_tokenizer()
    rows = []
    for width in WIDTHS:
        model = whole_model(width, tokenizer)
        for method, rate in itertools.product(METHODS, RATES):
            own = retrain(model, tokenizer, method, rate)
            rows += own
            losses = " ".join(f"{row['loss']:.3f}" for row in own)
            before = f"{own[0]['whole']:.3f}, pruned {own[0]['pruned']:.3f}"
            print(f"{method:6} width {width} rate {rate}: {before}, then {losses}", flush=True)
    fits = [fit for method in METHODS for fit in fits_of(rows, method)]
    write_json(json_file, {"rows": rows, "fits": fits})
    print(f"{'method':8}{'held out':10}{'fitted':>7}{'tested':>7}{'error':>9}{'r2':>9}{'asd':>9}")
    for one in fits:
        counts = f"{one['fitted']:7}{one['tested']:7}"
        figures = f"{one['mean_error']:9.4f}{one['r2']:9.4f}{one['asd']:9.4f}"
        print(f"{one['method']:8}{one['held_out']:10}{counts}{figures}")


if __name__ == "__main__":
    tyro.cli(main)
