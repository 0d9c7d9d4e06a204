"""
GRPO with unbiased pruning on one page: train on a fraction, keep the expected gradient.

    python minimal.py           drops prompts before rollout and completions after reward
    python minimal.py --grpo    keeps all 32 prompts and all completions, with weight 1

The loss of a full GRPO batch is a sum of terms l_i, one for each completion. Keep l_i with
probability p_i, and multiply it by 1 / p_i if it is kept: then the expected sum is the full sum,
and the expected gradient is the full gradient (Horvitz and Thompson, 1952). Four conditions:
    - advantages and denominators are those of the full groups and batch, whatever is dropped
    - p_i > 0 wherever l_i is not 0; a term that is exactly 0 (advantage 0) may go for free
    - p_i is the true probability of keeping l_i
    - each update has its own draw, because the first one moves the parameters
This is the gradient before it is clipped by norm: clipping and Adam are not linear. Pruning only
adds variance. Completions are kept by train.py's default rule, adaptive: p_i grows with the size of
l_i, an estimate of its gradient norm, and the slower training is beside the rest of a step, the
fewer are kept. Prompts are drawn before the rollout, when sizes are not known, so p depends on the
past: the mean |advantage| of the prompt's last group. This is the paper's rule (arXiv:2603.04135),
as we reconstruct it. The two weights multiply.

By default train.py keeps all prompts, its loss is Dr. GRPO's (docs/method.md), and it measures its
times again, because lengths change.
"""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache, set_seed

from tasks import arithmetic

Q, G, T = 32, 8, 64  # prompts of a step, completions each, tokens at most
LOW = 0.5  # keep prompts whose past |advantage| is below the candidates' mean with this probability
MEASURED = 4  # the first steps drop only zeros, and measure how long all but training takes
FLOOR = 0.1  # lowest size, relative to the mean size, so that no weight is too large
STEPS, WARMUP, LR, CLIP, ROWS = 60, 5, 6e-4, 0.2, 64  # ROWS: completions in one backward pass
PROBLEMS, HELD_OUT, EVAL_EVERY = 512, 200, 5

tokenizer = arithmetic.make_tokenizer()  # one token per character; pads on the left
PAD, END = tokenizer.pad_token_id, tokenizer.eos_token_id


def completion_size(advantage, factor, logprobs):
    """Estimated gradient norm [N] of each completion's term, exactly 0 where the term is. `factor`
    is its prompt's weight / denominator. At the logits, the gradient of a token's log-prob is
    onehot - softmax, of squared norm at most 2 (1 - prob)^2. The sum of these is the energy: the
    gradients of different tokens are uncorrelated, so their squared norms add up."""
    energy = 2 * logprobs.expm1().square().sum(1)  # [N]; expm1 of a log-prob is prob - 1
    size = factor * advantage.abs() * energy.sqrt()
    live = advantage != 0
    return torch.where(live, size.clamp(min=FLOOR * size[live].mean()), 0.0)


def keep_prob(size, cost, rest):
    """Keep probabilities p [n] of the least time x variance. Terms of size 0 get p = 0.

    A step takes the time rest + sum(p cost), all in tokens trained on, and the variance of its
    gradient is about sum(size^2 / p). The product is least at p = min(1, tau size / sqrt(cost)).
    Sort by size / sqrt(cost). The first m terms have p = 1, and over them tau^2 is
    (rest + sum(cost)) / sum(size^2). m is the least that leaves the next p below 1.
    """
    priority = size / cost.sqrt()
    order = priority.argsort(descending=True)
    time_of_first = rest + cost[order].cumsum(0)
    taus = (time_of_first / size[order].square().cumsum(0).clamp(min=1e-30)).sqrt()
    m = 1 + (taus[:-1] * priority[order][1:] >= 1).sum()
    return (taus[m - 1] * priority).clamp(max=1.0)


def prune(p, start):
    """Weights [n]: 1 / p with probability p, else 0. So they are 1 on average wherever p > 0.

    Add up the p from `start`, and keep each whose sum passes an integer: from 0.3, p = 0.5, 0.5, 1
    give the sums 0.8, 1.3, 2.3, so the last two are kept. If `start` is uniform in [0, 1), each is
    kept with probability p. Their number is sum(p), rounded up or down.
    """
    integers = (start + p.cumsum(0)).floor()  # how many were reached so far
    return torch.where(integers.diff(prepend=torch.zeros(1)) > 0, 1 / p, 0.0)


@torch.no_grad()
def sample(model, problems):
    """A completion of each of N problems at temperature 1: token ids, which of them were sampled,
    their log-probs, all [N, W + T] with W tokens of padded prompt, and rewards [N]."""
    texts, answers, _ = zip(*problems, strict=True)
    token = tokenizer(list(texts), padding=True, return_tensors="pt").input_ids
    N, W = token.shape
    ids, logprobs = F.pad(token, (0, T), value=PAD), torch.zeros(N, W + T)
    sampled = torch.zeros(N, W + T, dtype=torch.bool)
    rows, cache = torch.arange(N), DynamicCache()  # the rows that go on
    for t in range(W, W + T):  # rotary positions are relative, so padding on the left does no harm
        read = ids[rows, :t] != PAD
        logits = model(token, attention_mask=read, past_key_values=cache).logits
        of_vocabulary = logits[:, -1].log_softmax(-1)  # [rows, V]
        token = of_vocabulary.exp().multinomial(1)  # [rows, 1]
        ids[rows, t], logprobs[rows, t] = token[:, 0], of_vocabulary.gather(1, token)[:, 0]
        sampled[rows, t] = True
        going = token[:, 0] != END
        if not going.any():
            break
        rows, token = rows[going], token[going]
        cache.batch_select_indices(going)
    given = tokenizer.batch_decode(ids[:, W:], skip_special_tokens=True)
    ends = [text.rpartition("=")[2] for text in given]
    right = [end == answer for end, answer in zip(ends, answers, strict=True)]
    return ids, sampled, logprobs, torch.tensor(right, dtype=torch.float64)


def loss(model, ids, sampled, old_logprobs, advantage, multiplier):
    """The sum of n completions' clipped terms, each times its multiplier [n]: both weights over the
    denominator."""
    used = (sampled | (ids != PAD)).any(0)  # [W + T], the L columns that are not all padding
    ids, sampled, old_logprobs = ids[:, used], sampled[:, used], old_logprobs[:, used]  # [n, L]
    logits = model(ids, attention_mask=ids != PAD).logits[:, :-1]  # [n, L - 1, V]
    logprobs = -F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")  # [n, L - 1]
    # With one update a batch, as here, the ratio is 1, and the clip does not act.
    ratio = (logprobs - old_logprobs[:, 1:]).exp()
    advantage = advantage[:, None]
    term = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return ((term * sampled[:, 1:]).sum(1) * multiplier).sum()


def train(grpo=False, seed=0, steps=STEPS):
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(arithmetic.BASE)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    problems = [arithmetic.problem("train", i) for i in range(PROBLEMS)]
    held_out = [arithmetic.problem("heldout", i) for i in range(HELD_OUT)] * 4
    past = torch.full((PROBLEMS,), torch.nan)  # mean |advantage| of each prompt's last group
    seconds, training = 0.0, 0.0  # of all steps so far, and of their training
    trained = 0.0  # tokens that they trained on
    rest = 1e9  # tokens that are trained on in the time of all else; at first huge, so that p = 1
    for step in range(steps):
        started = time.perf_counter()
        # Drop prompts, before their completions are sampled.
        prompts = torch.randperm(PROBLEMS)[:Q]  # the candidates [Q], in random order
        low = past[prompts] < past[prompts].nanmean()  # [Q]; False where either is NaN
        p = torch.where(low, LOW, 1.0).double()
        weight = prune(torch.ones_like(p) if grpo else p, random.random())  # [Q]
        prompts, weight = prompts[weight > 0], weight[weight > 0]  # [K]
        # Sample and reward. Advantages are of full groups, and exactly 0 if all rewards are equal.
        groups = [problems[q] for q in prompts for _ in range(G)]
        ids, sampled, logprobs, rewards = sample(model, groups)  # N = K x G
        # GRPO divides by the standard deviation. Dr. GRPO does not: docs/method.md, section 3.
        std, mean = torch.std_mean(rewards.view(-1, G), 1, keepdim=True)  # [K, 1]
        advantage = ((rewards.view(-1, G) - mean) / (std + 1e-4)).flatten()  # [N]
        past[prompts] = advantage.view(-1, G).abs().mean(1).float()
        # The denominator, own length x Q x G, is the full batch's: Q prompts, kept or not.
        factor = weight.repeat_interleave(G) / (sampled.sum(1) * Q * G)  # [N]
        # Drop completions, before they are trained on: by size, and those of size 0 always.
        cost = (ids != PAD).sum(1).double()  # [N], tokens to train on, with the prompt
        p = keep_prob(completion_size(advantage, factor, logprobs), cost, rest)
        multiplier = factor * prune(torch.ones_like(p) if grpo else p, random.random())  # [N]
        kept = multiplier.nonzero()[:, 0]
        kept = kept[cost[kept].argsort()]  # similar lengths share a pass, so little is padding
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)  # a gradient of 0, not none, if nothing is kept
        for n in (kept[i : i + ROWS] for i in range(0, len(kept), ROWS)):
            loss(model, ids[n], sampled[n], logprobs[n], advantage[n], multiplier[n]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / WARMUP, 1 - step / steps)
        optimizer.step()
        ended = time.perf_counter()
        seconds += ended - started
        training += ended - began
        trained += cost[kept].sum().item()
        if step + 1 == MEASURED:  # seconds of all else in a step x tokens trained on per second
            rest = (seconds - training) / MEASURED * trained / training
        line = f"step {step + 1:2} | reward {weight @ mean[:, 0] / weight.sum():.3f} | "
        line += f"kept {len(kept):3} | tokens {cost[kept].sum():5.0f} | {seconds:5.1f} s"
        if (step + 1) % EVAL_EVERY == 0:
            line += f" | held-out accuracy {sample(model, held_out)[3].mean():.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0] + ". Takes a minute.")
    parser.add_argument("--grpo", action="store_true", help="keep everything, with weight 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    torch.set_num_threads(1)  # beside other programs, more threads would wait for each other
    train(**vars(parser.parse_args()))
