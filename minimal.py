"""
GRPO with unbiased pruning on one page: what train.py does by default.

    python minimal.py              trains on a random part of what it samples: 53 CPU seconds
    python minimal.py --grpo       trains on everything: 102, for the same accuracy, 0.98
    python minimal.py --prompts    also drops prompts before it samples, by the rule of the paper

GRPO samples G completions of each of Q prompts. The advantage of a completion is its reward minus
the mean reward of its prompt's G completions, its group. The loss makes completions of positive
advantage likelier and the others less likely. It is a sum of terms l_i, one for each completion,
and most of them hardly move the gradient.

Keep l_i with probability p_i, and multiply it by 1 / p_i if it is kept. Its expectation is still
l_i. So, given what was sampled, the expected gradient is that of all terms (Horvitz and Thompson,
1952), even if the draws of different terms depend on each other. There are four conditions:
    - advantages and denominators are those of the full groups and batch, whatever is dropped
    - p_i > 0 wherever l_i is not 0; a term that is exactly 0 (advantage 0) may go for free
    - p_i is the true probability of keeping l_i
    - each update has its own draw, because the parameters depend on the draws before it
This is the gradient before it is clipped by norm: clipping and Adam are not linear.

The rule for p here is train.py's default, adaptive: large gradients are kept for sure, and small
ones rarely. It saves training, but no sampling. --prompts saves both: it drops prompts of low past
|advantage|, the rule of the paper (arXiv:2603.04135) as we reconstruct it. The weights multiply.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed

from tasks import arithmetic

Q, G, T = 16, 8, 55  # prompts of a step, completions of each, most tokens of a right answer
REST = 0.1  # time of all of a step but training / time of training on everything; see keep_prob
FLOOR = 0.03  # the smallest size, relative to the mean size, so that no weight is too large
LOW = 0.7  # for --prompts: keep prompts of low past |advantage| with this probability
STEPS, WARMUP, LR, CLIP, ROWS = 100, 5, 6e-4, 0.2, 32  # ROWS: completions in one backward pass
PROBLEMS, HELD_OUT = 512, 150

tokenizer = AutoTokenizer.from_pretrained(arithmetic.BASE)  # a token a byte; pads on the left
PAD, END = tokenizer.pad_token_id, tokenizer.eos_token_id


def completion_size(advantage, factor, energy):
    """In proportion to the estimated gradient norm [N] of each term, exactly 0 where the term is.

    Up to its sign, a term's gradient is that of factor x advantage x the sum of its tokens'
    log-probs. At the logits, the gradient of a log-prob is onehot(token) - softmax. Each token has
    logits of its own, so their squared norms add up: this is the energy. Sampling computes it.
    """
    size = factor * advantage.abs() * energy.sqrt()
    live = advantage != 0
    return torch.where(live, size.clamp(min=FLOOR * size[live].mean()), 0.0)


def keep_prob(size, cost):
    """The keep probabilities p [n] that make time x noise least. Terms of size 0 get p = 0.

    A step takes the time R + sum(p cost), in tokens, with R = REST x the cost of all. The noise of
    its gradient, of sampling and of pruning, is about sum(size^2 / p). Averaging it away takes
    steps in proportion, so a run's time goes with time x noise (notebook 00). This is least at
    p = min(1, tau size / sqrt(cost)).

    Sort by size / sqrt(cost), the largest first. If the first m terms have p = 1, tau^2 is
    (R + their cost) / (their sum of size^2). m is the smallest number, from 1, for which the next
    term gets a p below 1; then all later terms do, too. For every smaller m, the next p is 1 or
    more, so m is 1 + how many of the taus give that.
    """
    priority = size / cost.sqrt()
    order = priority.argsort(descending=True)
    time_of_first = REST * cost.sum() + cost[order].cumsum(0)  # R + their cost, for each m
    taus = (time_of_first / size[order].square().cumsum(0).clamp(min=1e-30)).sqrt()
    m = 1 + (taus[:-1] * priority[order][1:] >= 1).sum()
    return (taus[m - 1] * priority).clamp(max=1.0)


def prune(p, order, start):
    """Weights [n]: 1 / p with probability p, else 0. So they are 1 on average wherever p > 0.

    Add up the p in `order`, from `start`, and keep each whose sum passes an integer: from 0.3,
    p = 0.5, 0.5, 1 give the sums 0.8, 1.3, 2.3, so the last two are kept. If `start` is uniform in
    [0, 1), each term is kept with probability p, and neighbours keep sum(p), rounded up or down.
    """
    integers = (start + p[order].cumsum(0)).floor()  # how many were passed so far
    weights = torch.zeros_like(p)
    weights[order] = torch.where(integers.diff(prepend=torch.zeros(1)) > 0, 1 / p[order], 0.0)
    return weights


@torch.no_grad()
def sample(model, problems):
    """A completion of each of N problems at temperature 1. Returns token ids, which of them were
    sampled and their log-probs, [N, W + T] each (W: padded prompt), energies and rewards, [N]."""
    texts, answers, _ = zip(*problems, strict=True)
    token = tokenizer(list(texts), padding=True, return_tensors="pt").input_ids
    N, W = token.shape
    ids, logprobs = F.pad(token, (0, T), value=PAD), torch.zeros(N, W + T)
    sampled = torch.zeros(N, W + T, dtype=torch.bool)
    energy = torch.zeros(N, dtype=torch.float64)
    rows, cache = torch.arange(N), DynamicCache()  # the rows that go on
    for t in range(W, W + T):  # rotary positions are relative, so padding on the left does no harm
        read = ids[rows, :t] != PAD
        logits = model(token, attention_mask=read, past_key_values=cache).logits
        of_vocabulary = logits[:, -1].log_softmax(-1)  # [rows, V]
        probs = of_vocabulary.exp()
        token = probs.multinomial(1)  # [rows, 1]
        ids[rows, t], logprobs[rows, t] = token[:, 0], of_vocabulary.gather(1, token)[:, 0]
        sampled[rows, t] = True
        energy[rows] += (F.one_hot(token[:, 0], probs.shape[1]) - probs).double().square().sum(1)
        going = token[:, 0] != END
        if not going.any():
            break
        rows, token = rows[going], token[going]
        cache.batch_select_indices(going)
    given = tokenizer.batch_decode(ids[:, W:], skip_special_tokens=True)
    right = [text.rpartition("=")[2] == answer for text, answer in zip(given, answers, strict=True)]
    return ids, sampled, logprobs, energy, torch.tensor(right, dtype=torch.float64)


def loss(model, ids, sampled, old_logprobs, advantage, multiplier):
    """The sum of n completions' clipped terms, each times its multiplier [n]."""
    used = (sampled | (ids != PAD)).any(0)  # [W + T], the L columns that are not all padding
    ids, sampled, old_logprobs = ids[:, used], sampled[:, used], old_logprobs[:, used]  # [n, L]
    logits = model(ids, attention_mask=ids != PAD).logits[:, :-1]  # [n, L - 1, V]
    logprobs = -F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")  # [n, L - 1]
    # With one update a batch, as here, the ratio is 1, and the clip does not act.
    ratio = (logprobs - old_logprobs[:, 1:]).exp()
    advantage = advantage[:, None]
    term = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return ((term * sampled[:, 1:]).sum(1) * multiplier).sum()


def train(grpo=False, drop_prompts=False, seed=0, steps=STEPS):
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(arithmetic.BASE)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    problems = [arithmetic.problem("train", i) for i in range(PROBLEMS)]
    held_out = [arithmetic.problem("heldout", i) for i in range(HELD_OUT)] * 4
    past = torch.full((PROBLEMS,), torch.nan)  # mean |advantage| of each prompt's last group
    print(f"held-out accuracy before: {sample(model, held_out)[-1].mean():.3f}", flush=True)
    for step in range(1, steps + 1):
        # Choose prompts, and drop some of them before they are sampled.
        prompts = torch.randperm(PROBLEMS)[:Q]  # [Q], in random order
        low = past[prompts] < past[prompts].nanmean()  # [Q]; False where either is NaN
        p = torch.where(low & drop_prompts, LOW, 1.0).double()
        weight = prune(p, torch.arange(Q), random.random())  # [Q]
        prompts, weight = prompts[weight > 0], weight[weight > 0]  # [K]
        groups = [problems[q] for q in prompts for _ in range(G)]  # N = K x G
        ids, sampled, logprobs, energy, rewards = sample(model, groups)
        # Advantages are of full groups, and exactly 0 if all rewards of a group are equal. The
        # denominator, Q x G x T, is the full batch's. Both are Dr. GRPO's. GRPO divides by each
        # group's deviation, too, and by each completion's length in place of T: docs/method.md.
        mean = rewards.view(-1, G).mean(1, keepdim=True)  # [K, 1]
        advantage = (rewards.view(-1, G) - mean).flatten()  # [N]
        factor = weight.repeat_interleave(G) / (Q * G * T)  # [N]
        past[prompts] = advantage.view(-1, G).abs().mean(1).float()
        # Drop completions before they are trained on. The draw's order is by prompt, then by size:
        # every prompt, and every range of sizes in it, gets its fair share.
        cost = (ids != PAD).sum(1).double()  # [N], tokens to train on, with the prompt
        size = completion_size(advantage, factor, energy)  # [N]
        p = torch.ones_like(size) if grpo else keep_prob(size, cost)  # [N]
        by_size = size.argsort(stable=True)
        order = by_size[(by_size // G).argsort(stable=True)]  # i // G is the prompt of i
        multiplier = factor * prune(p, order, random.random())  # [N], weights over denominator
        kept = multiplier.nonzero()[:, 0]
        kept = kept[cost[kept].argsort()]  # similar lengths share a pass, so little is padding
        for n in (kept[i : i + ROWS] for i in range(0, len(kept), ROWS)):
            loss(model, ids[n], sampled[n], logprobs[n], advantage[n], multiplier[n]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        falling = (steps + 1 - step) / max(1, steps + 1 - WARMUP)
        optimizer.param_groups[0]["lr"] = LR * min(step / WARMUP, falling)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # if nothing is kept, a gradient of 0, not none
        reward = weight @ mean[:, 0] / weight.sum()
        print(f"step {step:3} | reward {reward:.3f} | kept {len(kept):3}/{len(p)}", end=" | ")
        print(f"tokens trained on {cost[kept].sum():4.0f}/{cost.sum():.0f}", flush=True)
    print(f"held-out accuracy after: {sample(model, held_out)[-1].mean():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0] + ". Takes a minute.")
    parser.add_argument("--grpo", action="store_true", help="train on everything, with weight 1")
    parser.add_argument("--prompts", action="store_true", dest="drop_prompts", help="drop them too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    torch.set_num_threads(1)  # beside other programs, more threads would wait for each other
    train(**vars(parser.parse_args()))
