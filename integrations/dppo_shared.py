"""
What the trainers in this folder share: dppo_trl.py and dppo_verl.py.

Here is what does not depend on the library. Rules, draws and weights come from dppo.py and
sampler.py.

Letters: Q prompts of a batch, K of them rolled out, G completions each.
"""

from pathlib import Path

import torch

import dppo
import dppo_sampler as sampler  # a link to sampler.py, because `sampler` may be the user's
from dppo import RuleError

# ---------------------------------------------------------------------------- options


def require(condition, sentence: str) -> None:
    """RuleError unless the condition holds. The sentence names the option and the way out."""
    if not condition:
        raise RuleError(sentence)


def check_rules(options) -> None:
    """RuleError for an unknown or a biased rule, and for a rate or a rest out of range."""
    require(options.rest > 0, f"rest={options.rest}: choose a value above 0")
    for level, rules in (("completion", dppo.COMPLETION_RULES), ("prompt", sampler.PROMPT_RULES)):
        unbiased = [name for name, rule in rules.items() if isinstance(rule, dppo.Rule)]
        dppo.check_known(f"{level}_rule", getattr(options, f"{level}_rule"), unbiased)
        rate = getattr(options, f"{level}_prune_rate")
        require(0 <= rate < 1, f"{level}_prune_rate={rate}: choose a rate from 0 to below 1")


# ---------------------------------------------------------------------------- completions


def energy_of(logprobs: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """The energy [n] of completions whose tokens with loss are those of `mask` [n, T], from the
    sampled tokens' log-probs. Without these, as if all tokens were equally surprising."""
    if logprobs is None:
        return mask.sum(dim=1)
    return (dppo.energy_bound(logprobs.nan_to_num()) * mask).sum(dim=1)


def size_of(
    advantages: torch.Tensor,
    tokens: torch.Tensor,
    energy: torch.Tensor,
    divides_by_length: bool,
    beta: float,
) -> torch.Tensor:
    """Estimated gradient norms [K, G], up to a constant, of completions with so many tokens with
    loss. `divides_by_length`: the loss is a mean over each completion's own tokens."""
    scale = (tokens > 0).double()
    if divides_by_length:
        scale /= tokens.clamp(min=1)
    return dppo.contribution_size(advantages, scale, energy, beta)


# ---------------------------------------------------------------------------- prompts


def remember(trainer, prompts: list, logs: str | None) -> None:
    """Give the trainer a history of the data set's prompts, which it finds by their text. `logs` is
    the folder where the library logs completions. From these prompts are missing, so a mark lets
    dppo-ceiling refuse them."""
    trainer.index = {dppo.seed_for(prompt): row for row, prompt in enumerate(prompts)}
    trainer.history = sampler.PromptHistory(len(prompts))
    trainer.mean_tokens = None
    if logs:
        Path(logs).mkdir(parents=True, exist_ok=True)
        Path(logs, "dppo-pruned").touch()


def find_prompts(trainer, prompts: list) -> torch.Tensor:
    """The rows [n] of these prompts in the data set."""
    return torch.tensor([trainer.index[dppo.seed_for(prompt)] for prompt in prompts])


# Some losses divide by the tokens of their batch. If prompts are dropped, that number is unknown,
# and an estimate of it would make the gradient biased. So they divide by a number that was known
# before the draw: the mean over earlier batches. As long as it is None, a batch keeps all of its
# prompts, and its tokens are counted.
MEMORY = 8  # about how many batches the mean remembers


def learn(
    trainer,
    prompts: torch.Tensor,
    weights: torch.Tensor,
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """The trainer's history and its mean of tokens learn from the prompts [K] that were rolled out,
    of weights [K], by their full groups [K, G].

    TRL's and verl's advantages of equal rewards, such as 0.1, can be rounding errors over a tiny
    deviation. The score is made exactly 0 there, because a rule may tell by it which prompts were
    dead.
    """
    dead = dppo.dead_groups(rewards)[:, None]  # [K, 1]
    trainer.history.update(prompts, torch.where(dead, 0.0, advantages))
    estimate = (weights[:, None] * tokens).sum().item()  # of all Q prompts
    mean = estimate if trainer.mean_tokens is None else trainer.mean_tokens
    # Nothing can be divided by 0, so a mean of 0 is not known either.
    trainer.mean_tokens = mean + (estimate - mean) / MEMORY or None


# ---------------------------------------------------------------------------- checkpoints

FILE = "dppo.pt"  # in the folder of the library's own checkpoint


def save(folder: Path, trainer) -> None:
    """Write what a resumed run needs: the trainer's prompt history and its mean of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = dppo.seed_for(*trainer.index)
    torch.save((prompts, vars(trainer.history), trainer.mean_tokens), folder / FILE)


def load(folder: Path, trainer, option: str) -> None:
    """Bring back what `save` wrote. Without the file, the library's own trainer made this
    checkpoint, and its run goes on with pruning. `option` is the one that names the data set."""
    if not (folder / FILE).exists():
        return
    prompts, history, mean_tokens = torch.load(folder / FILE, weights_only=True)
    require(
        prompts == dppo.seed_for(*trainer.index),
        f"{folder / FILE}: its history is of other prompts; resume with the {option} of that run, "
        "or delete the file to forget them",
    )
    trainer.history.restore(history)
    trainer.mean_tokens = mean_tokens


# ---------------------------------------------------------------------------- figures


def completion_figures(
    weights: torch.Tensor, prompt_weights: torch.Tensor, cost: torch.Tensor, num_completions: int
) -> dict[str, float]:
    """What a draw kept. The weights of completions [K, G] include those of their prompts [K, 1],
    and are 0 for what was dropped; num_completions are those of the un-pruned batch."""
    kept = weights > 0
    expected = (prompt_weights * cost).sum()  # tokens of the un-pruned batch
    return {
        "kept_completions": kept.sum().item() / num_completions,
        "kept_tokens": (cost[kept].sum() / expected).item(),
        "weight_max": weights.max().item(),
    }


def mean_reward(rewards: torch.Tensor, weights: torch.Tensor, prompts_per_step: int) -> float:
    """Estimate of the mean reward of all Q prompts, from the rewards [K, G] and weights [K] of
    those that were rolled out. A group that has no reward at all counts as 0."""
    return ((weights * rewards.nanmean(dim=1)).nansum() / prompts_per_step).item()
