"""A Tinker service in this process: a table of next-token logits in float64 and an optimizer,
whose losses have a denominator of one's choice. See exact.py.

The SDK converts what it sends to float32, so exact tests use the few types below in its place, and
need no SDK.
"""

import importlib
import sys
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import exact
import torch
from exact import G, completion, number, tables

import dppo

PROMPTS = [[1], [6], [4, 5, 6], [3, 3]]  # of tokens 0 to 6; 0 ends a completion
ANSWERS = ["good", "unscorable", "mixed", "mixed"]  # see `reward`
PROBLEMS = list(zip(PROMPTS, ANSWERS, strict=True))
V, LONGEST = 7, 6  # tokens, tokens of a completion
MEANS = {"sum": (0, 0), "tokens": (1, 0), "datums": (0, 1), "both": (1, 1)}


@dataclass
class ModelInput:
    ids: list

    from_ints = classmethod(lambda cls, ids: cls(list(ids)))
    length = property(lambda self: len(self.ids))


class TinkerError(Exception):
    pass


SDK = SimpleNamespace(  # the SDK's other types are their fields
    ModelInput=ModelInput, Datum=SimpleNamespace, AdamParams=SimpleNamespace,
    SamplingParams=SimpleNamespace, TinkerError=TinkerError,
)  # fmt: skip
try:
    dppo_tinker = importlib.import_module("dppo_tinker")
except ModuleNotFoundError:  # without the SDK
    with mock.patch.dict(sys.modules, tinker=SDK):
        dppo_tinker = importlib.import_module("dppo_tinker")


def toy_sdk():
    return mock.patch.object(dppo_tinker, "tinker", SDK)


class Tokenizer:
    eos_token_id = 0

    def decode(self, tokens, skip_special_tokens):
        return " ".join(str(token) for token in tokens if token)


def reward(text, answer):
    """Always 1 for good, else 0 or 1 by the text, and None for some unscorable texts."""
    if answer == "good":
        return 1.0
    lot = number(text, "|", answer)
    return None if answer == "unscorable" and lot % 3 == 0 else float(lot % 2)


def token_losses(theta, loss_fn, ids, targets, logprobs, advantages):
    """The server's losses [T], as Tinker's documentation has them."""
    table = theta.log_softmax(dim=-1)  # [V, V]; a larger vocabulary is folded
    now = table[torch.tensor(ids) % V, torch.tensor(targets) % V]
    before, A = (torch.tensor(x, dtype=torch.float64) for x in (logprobs, advantages))
    ratio = (now - before).exp()
    if loss_fn == "importance_sampling":
        return -ratio * A
    if loss_fn == "ppo":
        return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    assert loss_fn == "cispo"
    return -ratio.clamp(0.8, 1.2).detach() * now * A


# ---------------------------------------------------------------------------- the service


@dataclass
class Future:
    value: object = None
    error: Exception | None = None

    def result(self, timeout=None):
        assert timeout == dppo_tinker.TIMEOUT
        if self.error:
            raise self.error
        return self.value


@dataclass
class Server:
    """What lives as long as the server: saved weights."""

    denominator: str = "both"
    norm: str | None = "skyrl.ai/grad_norm"
    fixed: bool = False  # a prompt's completions are always the same
    saved: dict = field(default_factory=dict)
    clients: list = field(default_factory=list)
    dies_at: int = -1  # the request number (of optimizer steps) that fails

    def create_lora_training_client(self, base_model, rank, seed):
        generator = torch.Generator().manual_seed(seed)
        theta = torch.randn(V, V, generator=generator, dtype=torch.float64)
        self.clients.append(Client(self, theta, torch.zeros(V * V, dtype=torch.float64)))
        return self.clients[-1]

    def create_training_client_from_state_with_optimizer(self, path):
        self.clients.append(Client(self, *self.saved[path]))
        return self.clients[-1]

    def create_sampling_client(self, path):
        assert self.saved[path][0] is self.clients[-1].theta, "samples are of other weights"
        return SimpleNamespace(sample=self.sample)

    def sample(self, prompt, count, options):
        key = prompt.ids if self.fixed else options.seed
        (end,) = options.stop
        found = [completion(key, g, end, options.max_tokens) for g in range(count)]
        sequences = [SimpleNamespace(tokens=ids, logprobs=logprobs) for ids, logprobs in found]
        return Future(SimpleNamespace(sequences=sequences))


class Client:
    def __init__(self, server, theta, momentum):
        self.server, self.theta, self.momentum = server, theta, momentum
        self.calls, self.gradients = [], []

    def forward_backward(self, datums, loss_fn):
        assert datums
        self.calls.append([(datum, loss_fn) for datum in datums])
        return Future()

    def gradient(self):
        """Of all calls since the last one, over the server's denominator."""
        theta, kind = self.theta.clone().requires_grad_(), self.server.denominator
        total, n = 0.0, sum(map(len, self.calls))
        tokens = sum(datum.model_input.length for call in self.calls for datum, _ in call)
        for call in self.calls:
            largest = max(abs(a) for datum, _ in call for a in datum.loss_fn_inputs["advantages"])
            for datum, loss_fn in call:
                columns, T = datum.loss_fn_inputs, datum.model_input.length
                loss = token_losses(
                    theta, loss_fn, datum.model_input.ids, columns["target_tokens"],
                    columns["logprobs"], columns["advantages"],
                ).sum()  # fmt: skip
                live = sum(a != 0 for a in columns["advantages"])
                total = total + loss / {
                    "sum": 1, "tokens": T, "datums": n, "both": T * n, "all tokens": tokens,
                    "live tokens": max(live, 1), "call": T * len(call), "scaled": largest or 1,
                }[kind]  # fmt: skip
        return torch.autograd.grad(total, theta)[0].flatten()

    def optim_step(self, adam):
        """With momentum, which stands for Adam's moments."""
        if len(self.gradients) == self.server.dies_at:
            return Future(error=TinkerError("connection\nrefused"))
        self.gradients.append(gradient := self.gradient())
        self.calls = []
        self.momentum = 0.9 * self.momentum + gradient
        self.theta = self.theta - adam.learning_rate * self.momentum.view(V, V)
        norm = {self.server.norm: gradient.norm().item()} if self.server.norm else None
        return Future(SimpleNamespace(metrics=norm))

    def save_state(self, name):
        path = f"tinker://toy/weights/{name}"
        if path in self.server.saved:
            return Future(error=TinkerError(f"409: {name} exists"))
        self.server.saved[path] = self.theta, self.momentum
        return Future(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name, ttl_seconds):
        return self.save_state(f"sampler-{name}")


# ---------------------------------------------------------------------------- for test_exact.py


def make(server=None, folder=None, problems=PROBLEMS, held_out=(), **options):
    """A Trainer of `server`; the types of the SDK are those above."""
    options = {
        "prompts_per_step": len(problems), "group_size": G, "max_new_tokens": LONGEST, "lr": 0.1,
        "prompt_rule": "none", "completion_rule": "none",
        "out_dir": str(folder or tempfile.mkdtemp()),
    } | options  # fmt: skip
    SDK.ServiceClient = lambda base_url: server or Server()
    with toy_sdk():
        return dppo_tinker.Trainer(
            problems, list(held_out), reward, Tokenizer(), "toy", "http://toy", **options
        )


DENOMINATORS = {
    "grpo": lambda length, n, tokens: length * n,
    "dr_grpo": lambda length, n, tokens: n * LONGEST,
    "dapo": lambda length, n, tokens: tokens,
    "cispo": lambda length, n, tokens: tokens,
}
LOSSES = {
    f"{loss}-{loss_fn}-{denominator}": {
        "loss": loss, "loss_fn": loss_fn, "denominator": denominator
    }
    for loss, loss_fn, denominators in (
        ("grpo", "ppo", MEANS), ("grpo", "importance_sampling", ["both"]),
        ("grpo", "cispo", ["tokens"]), ("dr_grpo", "ppo", ["sum"]), ("dapo", "ppo", ["both"]),
        ("cispo", "cispo", ["datums"]),
    )
    for denominator in denominators
}  # fmt: skip
PER_TOKEN = [name for name in LOSSES if name.startswith(("dapo", "cispo"))]
OWN_LENGTH = [name for name in LOSSES if name.startswith("grpo")]
MEMORY = dppo_tinker.MEMORY
SCALES = {scale: {"scale_rewards": scale} for scale in dppo.SCALES}
FEW = {"problems": PROBLEMS[2:]}
PLAIN = {}
DULL = {"problems": [(ids, "good") for ids in PROMPTS]}
STOCK = []  # its loop is dppo_tinker's
REFUSED = [
    ({"loss": "gspo"}, "loss='gspo' is not exact .*'grpo', 'dr_grpo', 'dapo', 'cispo'"),
    ({"loss_fn": "dro"}, "loss_fn='dro' is not exact .*'importance_sampling', 'ppo', 'cispo'"),
    ({"prompts_per_step": 5}, "prompts_per_step=5: only 4 problems"),
    ({"scale_rewards": "std"}, "unknown scale_rewards 'std': .*none, group, variance, mean"),
]
INEXACT = []


class Toy(exact.Toy):
    """A trainer with fixed completions, whose lr is 0."""

    kept = (*exact.Toy.kept, "number")  # of the step, by which candidates are shuffled

    def __init__(self, denominator="both", problems=PROBLEMS, **options):
        server = Server(denominator, fixed=True)
        self.trainer = make(server, problems=problems, lr=0.0, **options)
        self.trainer.number = 1
        self.scale = options.get("scale_rewards") or dppo.LOSSES[self.trainer.loss].scale_rewards

        def row(problem, g):
            prompt, answer = problem
            tokens, logprobs = completion(prompt, g, end=0)
            score = reward(Tokenizer().decode(tokens, True), answer)
            return torch.nan if score is None else score, len(prompt + tokens), logprobs

        self.tables = tables(problems, row)
        self.remember()

    def figures(self):
        names = {"kept/prompts": "kept_prompts", "kept/completions": "kept_completions"}
        names |= {"kept/tokens": "kept_tokens", "weight/max": "weight_max", "reward": "reward"}
        return {new: self.row[name] for name, new in names.items()}

    def step(self):
        """What a step sends to Adam."""
        self.trainer.service.saved.clear()  # so that its names are free again
        with toy_sdk():
            self.row = self.trainer.step(self.trainer.number)
        self.trainer.number += 1
        return self.trainer.client.gradients[-1]

    def stock(self):
        """The gradient of all Q x G completions: the sum of A x loss / denominator(length, Q x G,
        their tokens)."""
        theta, total = self.trainer.client.theta.clone().requires_grad_(), 0.0
        rewards, _costs, lengths, _energy = self.tables
        advantages = dppo.group_advantages(rewards, self.scale)
        for (prompt, _answer), row in zip(self.trainer.problems, advantages.tolist(), strict=True):
            for g, A in enumerate(row):
                tokens, logprobs = completion(prompt, g, end=0)
                ids, n, zeros = prompt + tokens, len(tokens), [0.0] * (len(prompt) - 1)
                columns = ids[:-1], ids[1:], [*zeros, *logprobs], [*zeros, *[A] * n]
                losses = token_losses(theta, self.trainer.loss_fn, *columns)
                denominator = DENOMINATORS[self.trainer.loss]
                total = total + losses.sum() / denominator(n, lengths.numel(), lengths.sum().item())
        return torch.autograd.grad(total, theta)[0].flatten()
