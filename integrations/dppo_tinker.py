"""
Unbiased pruning through the Tinker API: a server samples and trains, and is sent less of both.

The server has the model and Adam; the loop and the draws are here, by dppo.py and sampler.py.
Prompts are dropped before they are sampled, completions after reward. The server's losses are
proportional to the advantage, so all factors are sent as part of it: the weight 1 / P(kept), one
over the denominator of the un-pruned batch, and the server's own denominator, which
`measure_denominator` finds, so that it cancels. docs/other-trainers.md has a program.

Letters: Q candidates of a step, K of them sampled, G completions each.
"""

import json
import math
import secrets
from pathlib import Path

import tinker
import torch

import chat_format
import dppo
import dppo_shared
import sampler
from dppo import RuleError
from dppo_shared import require

LOSSES = ("grpo", "dr_grpo", "dapo", "cispo")  # of dppo.LOSSES, all but gspo's ratio of a sequence
LOSS_FNS = ("importance_sampling", "ppo", "cispo")  # the server's, proportional to the advantage
WARMUP = 5  # steps
MEMORY = 10  # how many steps the mean of their tokens remembers
TIMEOUT = 1800  # seconds


def ask(request, *args, **options):
    """A server's answer. The SDK repeats a request for minutes; if it still fails, RuleError."""
    try:
        answer = request(*args, **options)
        return answer.result(TIMEOUT) if hasattr(answer, "result") else answer
    except Exception as error:  # the SDK's own kinds, ValueError and TimeoutError
        said = " ".join(f"{request.__name__} failed with {error!r}".split())[:300]
        raise RuleError(f"{said}; once the server is back, the same program continues") from error


def make_datums(rows: list, means: tuple = (False, False)) -> list:
    """A tinker.Datum of each row (prompt, tokens, logprobs, advantages). Their gradient is the sum
    of the tokens', on a server with the `means` of measure_denominator."""
    datums = []
    for prompt, tokens, logprobs, advantages in rows:
        ids, zeros = [*prompt, *tokens], [0.0] * (len(prompt) - 1)
        factor = (len(ids) - 1 if means[0] else 1) * (len(rows) if means[1] else 1)
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": [*zeros, *logprobs],
            "advantages": [*zeros, *(factor * a for a in advantages)],
        }
        ids = tinker.ModelInput.from_ints(ids[:-1])
        datums.append(tinker.Datum(model_input=ids, loss_fn_inputs=inputs))
    return datums


def update(client, loss_fn: str, calls: list, lr: float) -> float:
    """A step of Adam with the gradients of lists of datums; returns the gradient's norm."""
    for datums in calls:
        ask(client.forward_backward, datums, loss_fn)
    adam = tinker.AdamParams(learning_rate=lr, beta1=0.9, beta2=0.999, eps=1e-8)
    found = (ask(client.optim_step, adam).metrics or {}).items()
    return next((x for name, x in found if "grad_norm" in name or "grad_l2" in name), math.nan)


def measure_denominator(client, loss_fn: str, ids: list) -> tuple:
    """Whether a server's loss is a mean over a datum's tokens, and over the datums of an update.
    A datum of 4 tokens, and one of 8 whose last 4 have no advantage or almost none, have the same
    gradient except for that. In units of the short one's norm, those of the long one and of short
    plus 3 long are 1 and 4 (a sum), 1/2 and 5/2 (tokens), 1 and 2 (datums) or 1/2 and 5/4 (both).
    RuleError for anything else. `ids` are 9 tokens; the client is not to be used afterwards."""
    advantages = [1.0] * 4, [1.0] * 4 + [1e-6] * 4, [3.0] * 4 + [0.0] * 4
    rows = [(ids[:1], ids[1 : len(a) + 1], [0.0] * len(a), a) for a in advantages]
    short, long, triple = make_datums(rows)
    calls = [[short]], [[long]], [[short, triple]], [[short], [triple]]
    norms = torch.tensor([update(client, loss_fn, lists, lr=0.0) for lists in calls])
    for alone, both, *means in (1, 4, 0, 0), (0.5, 2.5, 1, 0), (1, 2, 0, 1), (0.5, 1.25, 1, 1):
        if torch.allclose(norms / norms[0], torch.tensor([1.0, alone, both, both]), rtol=0.02):
            return tuple(map(bool, means))
    raise RuleError(f"{loss_fn}: norms {norms.tolist()} fit no sum and no mean: use another server")


class Trainer:
    def __init__(
        self, problems, held_out, reward, tokenizer, base_model, base_url=None, *, steps=60,
        out_dir="out-tinker", prompts_per_step=32, group_size=16, max_new_tokens=256, seed=0,
        prompt_rule="none", prompt_prune_rate=0.3, completion_rule="pps", completion_prune_rate=0.7,
        rest=0.4,
        loss="grpo", loss_fn="ppo", scale_rewards=None, lr=1e-4, lora_rank=32,
        pad_datums=1, eval_every=10, save_every=10,
    ):  # fmt: skip
        """A run, new or from out_dir. problems and held_out are lists of (prompt tokens, answer).
        reward(text, answer) is a number, or None if the answer cannot be scored. scale_rewards is
        one of dppo.SCALES; None: what the loss has."""
        for option, value, exact in (("loss", loss, LOSSES), ("loss_fn", loss_fn, LOSS_FNS)):
            require(
                value in exact, f"{option}={value!r} is not exact through this API: use {exact}"
            )
        scale_rewards = scale_rewards or dppo.LOSSES[loss].scale_rewards
        dppo.check_known("scale_rewards", scale_rewards, dppo.SCALES)
        require(
            len(problems) >= prompts_per_step,
            f"prompts_per_step={prompts_per_step}: only {len(problems)} problems",
        )
        self.problems = problems
        self.held_out = held_out
        self.reward = reward
        self.tokenizer = tokenizer
        self.steps = steps
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.prompt_rule = prompt_rule
        self.prompt_prune_rate = prompt_prune_rate
        self.completion_rule = completion_rule
        self.completion_prune_rate = completion_prune_rate
        self.rest = rest
        dppo_shared.check_rules(self)
        self.loss = loss
        self.loss_fn = loss_fn
        self.scale_rewards = scale_rewards
        self.lr = lr
        self.pad_datums = pad_datums
        self.eval_every = eval_every
        self.save_every = save_every

        self.prompt_tokens = torch.tensor([len(prompt) for prompt, _answer in problems])
        self.history = sampler.PromptHistory(len(problems))
        self.mean_tokens = None  # of a batch; see dppo_shared.update_mean
        self.log = []
        self.start = secrets.token_hex(4)  # ends the names of saved weights, which are used once
        self.path = Path(out_dir, "state.pt")
        self.run_key = dppo.seed_for(base_model, lora_rank, seed, prompts_per_step, problems)
        weights = None  # where the server keeps those of the last checkpoint
        if self.path.exists():
            run_key, history, weights, self.log, self.mean_tokens = torch.load(self.path)
            other = f"{self.path} is of another model, seed or data: set another out_dir"
            require(run_key == self.run_key, other)
            self.history.restore(history)

        self.service = ask(tinker.ServiceClient, base_url=base_url)
        new = self.service.create_lora_training_client, base_model, lora_rank, seed
        self.means = measure_denominator(ask(*new), loss_fn, (problems[0][0] * 9)[:9])
        old = self.service.create_training_client_from_state_with_optimizer, weights
        self.client = ask(*(old if weights else new))

    def sample(self, problems: list, count: int, *key) -> tuple[list, torch.Tensor]:
        """`count` rows (prompt, tokens, logprobs) of each problem, and their rewards [K, count]."""
        name = "-".join(map(str, (*key, self.start)))
        path = ask(self.client.save_weights_for_sampler, name, 3600).path  # kept for an hour
        policy = ask(self.service.create_sampling_client, path)
        end = {"max_tokens": self.max_new_tokens, "stop": chat_format.end_tokens(self.tokenizer)}
        futures = []
        for number, (prompt, _answer) in enumerate(problems):
            seed = dppo.seed_for(self.seed, key, number) >> 33  # servers take 30 bits
            options = tinker.SamplingParams(seed=seed, **end)
            futures.append(policy.sample(tinker.ModelInput.from_ints(prompt), count, options))
        found = [ask(future.result, TIMEOUT).sequences for future in futures]
        rows = [(problems[k][0], x.tokens, x.logprobs) for k, xs in enumerate(found) for x in xs]
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for _, tokens, _ in rows]
        scores = [self.reward(text, problems[i // count][1]) for i, text in enumerate(texts)]
        rewards = torch.tensor([math.nan if s is None else s for s in scores], dtype=torch.float64)
        return rows, rewards.view(-1, count)

    def step(self, step: int) -> dict:
        """One step of DPPO: Q candidates, K of them sampled, G completions each; gives its row."""
        Q, G = self.prompts_per_step, self.group_size
        generator = dppo.generator_for(self.seed, step, "keep")
        window = sampler.candidates(len(self.problems), Q, self.seed, step)  # [Q]
        # --- DPPO, before sampling: drop prompts by history, weight the rest by 1 / P(kept)
        # (dapo and cispo divide by a batch's tokens: their first batch is whole, to count them)
        count_first = dppo.LOSSES[self.loss].denominator == "batch tokens"
        rule = "none" if count_first and self.mean_tokens is None else self.prompt_rule
        kept, weights = self.history.prune(rule, self.prompt_prune_rate, window, generator)
        prompts, weights = window[kept], weights[kept, None]  # [K], [K, 1]

        rows, rewards = self.sample([self.problems[q] for q in prompts], G, "step", step)
        each = lambda f: torch.tensor([f(*row) for row in rows], dtype=torch.float64).view(-1, G)
        lengths = each(lambda prompt, tokens, logprobs: len(tokens))  # [K, G], as all below
        energy = each(lambda *row: dppo.energy_bound(torch.tensor(row[2])).sum())
        cost = self.prompt_tokens[prompts, None] + lengths
        estimate = (weights * lengths).sum().item()  # tokens of all Q x G
        num_tokens = estimate if self.mean_tokens is None else self.mean_tokens
        advantages = dppo.group_advantages(rewards, self.scale_rewards)
        sizes = {"num_sequences": Q * G, "max_new_tokens": self.max_new_tokens}
        scale = dppo.loss_scale(lengths, self.loss, **sizes, num_tokens=num_tokens)
        size = dppo.contribution_size(advantages, weights * scale, energy, beta=0.0)

        # --- DPPO, after reward: drop completions, weight the rest by 1 / P(kept)
        batch = dppo.Completions(advantages, rewards, cost, size, self.rest * cost.sum().item())
        keep, own_weights = dppo.prune_completions(
            self.completion_rule, self.completion_prune_rate, batch, generator
        )

        # --- Send what is kept and, as fillers, the shortest of the others, whose advantage is 0;
        # if there are too few, all of them again
        carried = (advantages * scale * weights * own_weights).flatten().tolist()
        multiple = self.pad_datums
        n = math.ceil(max(1, int(keep.sum())) / multiple) * multiple
        order = torch.where(keep, 0.0, cost).flatten().argsort(stable=True).tolist()
        carried = [carried[i] for i in order] + [0.0] * n
        pairs = zip((order * multiple)[:n], carried, strict=False)
        rows = [(*rows[i], [a] * len(rows[i][1])) for i, a in pairs]
        datums = make_datums(rows, self.means)
        grad_norm = update(self.client, self.loss_fn, [datums], self.lr * min(1, step / WARMUP))

        self.history.update(prompts, advantages, lengths)
        self.mean_tokens = dppo_shared.update_mean(self.mean_tokens, estimate, MEMORY)

        scores = rewards.nanmean(dim=1, keepdim=True)  # [K, 1]; nan: unscorable
        figures = dppo_shared.completion_figures(weights * own_weights, weights, cost, Q * G)
        return {
            "reward": ((weights * scores).nansum() / (weights + 0 * scores).nansum()).item(),
            "grad_norm": grad_norm,
            "kept/prompts": len(prompts) / Q,
            "kept/completions": figures["kept_completions"],
            "kept/tokens": figures["kept_tokens"],
            "weight/max": figures["weight_max"],
            "tokens/prefilled": self.prompt_tokens[prompts].sum().item(),
            "tokens/generated": int(lengths.sum()),
            "tokens/trained": sum(one.model_input.length for one in datums),
        }

    def train(self) -> None:
        """All steps that are left; step 0 only evaluates. A row is logged before the state is
        saved."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for step in range(len(self.log), self.steps + 1):
            row = {"step": step} | (self.step(step) if step else {})
            if self.held_out and step % self.eval_every == 0:
                row["eval/avg@4"] = self.sample(self.held_out, 4, "eval", step)[1].nanmean().item()
            self.log += [json.dumps({k: x if math.isfinite(x) else None for k, x in row.items()})]
            self.path.with_name("log.jsonl").write_text("\n".join([*self.log, ""]))
            print(self.log[-1], flush=True)
            if step % self.save_every == 0 or step == self.steps:
                saved = ask(self.client.save_state, f"step-{step}-{self.start}").path
                state = (self.run_key, vars(self.history), saved, self.log, self.mean_tokens)
                temporary = self.path.with_suffix(".new")
                torch.save(state, temporary)
                temporary.replace(self.path)
