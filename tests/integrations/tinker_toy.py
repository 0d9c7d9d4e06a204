"""A Tinker service in this process: a policy of 60 parameters in float64, with Adam, whose losses
have a denominator of one's choice. See exact.py.

The SDK converts what it sends to float32, so exact tests use the few types below in its place, and
need no SDK.
"""

import copy
import importlib
import os
import sys
import tempfile
import types
from dataclasses import dataclass, field
from unittest import mock

import exact
import torch
from exact import G, noise, number

import dppo

PROMPTS = [[1], [2, 3], [4, 5, 6], [2, 1]]  # of tokens 0 to 6; 0 ends a completion
PROBLEMS = [(ids, f"answer {k}") for k, ids in enumerate(PROMPTS)]
V, D, LONGEST = 7, 5, 5  # tokens, width, tokens of a completion
MEANS = {"sum": (0, 0), "tokens": (1, 0), "datums": (0, 1), "both": (1, 1)}


@dataclass
class ModelInput:
    ids: list

    from_ints = classmethod(lambda cls, ids: cls(list(ids)))
    length = property(lambda self: len(self.ids))


class TinkerError(Exception):
    pass


Columns = types.SimpleNamespace  # the SDK's other types are their fields
SDK = Columns(
    ModelInput=ModelInput, Datum=Columns, AdamParams=Columns, SamplingParams=Columns,
    TinkerError=TinkerError,
)  # fmt: skip
try:
    dppo_tinker = importlib.import_module("dppo_tinker")
except dppo.RuleError:  # without the SDK
    with mock.patch.dict(sys.modules, tinker=SDK):
        dppo_tinker = importlib.import_module("dppo_tinker")


class Tokenizer:
    eos_token_id = 0

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(str(token) for token in tokens if token)


def reward(text, answer):
    """0 or 1, and None for some texts of the second prompt."""
    lot = number(text, "|", answer)
    if answer == "dull":
        return 1.0
    return None if answer == "answer 1" and lot % 7 == 0 else float(lot % 2)


# ---------------------------------------------------------------------------- the policy


def log_probs(theta, ids):
    """[T, V] after each of ids [T]; causal."""
    embedding, head = theta.split(D * V)
    hidden = embedding.view(V, D)[ids % V].cumsum(0).tanh()  # a larger vocabulary is folded
    return (hidden @ head.view(D, V)).log_softmax(-1)


def token_losses(theta, loss_fn, ids, targets, logprobs, advantages):
    """The server's losses [T], as Tinker's documentation has them."""
    targets = torch.tensor(targets)[:, None] % V
    now = log_probs(theta, torch.tensor(ids)).gather(1, targets)[:, 0]
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
    """What lives as long as the server: saved weights. In place of tinker.ServiceClient."""

    __name__ = "ServiceClient"

    denominator: str = "both"
    norm: str | None = "skyrl.ai/grad_norm"
    fixed: bool = False  # a prompt's completions are always the same, and not quite of the policy
    saved: dict = field(default_factory=dict)
    clients: list = field(default_factory=list)
    dies_at: int = -1  # the request number (of optimizer steps) that fails
    logprobs: bool = True

    def __call__(self, base_url):
        self.base_url = base_url
        return self

    def create_lora_training_client(self, base_model, rank, seed):
        generator = torch.Generator().manual_seed(seed)
        theta = 0.7 * torch.randn(2 * D * V, generator=generator, dtype=torch.float64)
        self.clients.append(Client(self, theta))
        return self.clients[-1]

    def create_training_client_from_state_with_optimizer(self, path):
        self.clients.append(Client(self, *copy.deepcopy(self.saved[path])))
        return self.clients[-1]

    def create_sampling_client(self, path):
        return Policy(self, self.saved[path][0])


class Client:
    def __init__(self, server, theta, moments=None):
        self.server, self.theta = server, theta
        self.moments = moments or [torch.zeros_like(theta), torch.zeros_like(theta), 0]
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
                assert {len(column) for column in columns.values()} == {T}
                loss = token_losses(
                    theta, loss_fn, datum.model_input.ids, columns["target_tokens"],
                    columns["logprobs"], columns["advantages"],
                ).sum()  # fmt: skip
                live = sum(a != 0 for a in columns["advantages"])
                total = total + loss / {
                    "sum": 1, "tokens": T, "datums": n, "both": T * n, "all tokens": tokens,
                    "live tokens": max(live, 1), "call": T * len(call), "scaled": largest or 1,
                }[kind]  # fmt: skip
        (found,) = torch.autograd.grad(total, theta)
        return found

    def optim_step(self, adam):
        if len(self.gradients) == self.server.dies_at:
            return Future(error=TinkerError("connection\nrefused"))
        self.gradients.append(gradient := self.gradient())
        self.calls = []
        m, v, count = self.moments
        m, v = (b * x + (1 - b) * g for b, x, g in
                ((adam.beta1, m, gradient), (adam.beta2, v, gradient**2)))  # fmt: skip
        self.moments = [m, v, count + 1]
        m, v = m / (1 - adam.beta1 ** (count + 1)), v / (1 - adam.beta2 ** (count + 1))
        self.theta = self.theta - adam.learning_rate * m / (v.sqrt() + adam.eps)
        norm = {self.server.norm: gradient.norm().item()} if self.server.norm else None
        return Future(types.SimpleNamespace(metrics=norm))

    def save_state(self, name):
        path = f"tinker://toy/weights/{name}"
        if path in self.server.saved:
            return Future(error=TinkerError(f"409: {name} exists"))
        self.server.saved[path] = copy.deepcopy((self.theta, self.moments))
        return Future(types.SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name, ttl_seconds):
        return self.save_state(f"sampler-{name}")


class Policy:
    def __init__(self, server, theta):
        self.server, self.theta = server, theta

    def sample(self, prompt, count, options):
        assert len(options.stop) == 1
        key = prompt.ids if self.server.fixed else options.seed
        generator = torch.Generator().manual_seed(number(key))
        sequences = [self.one(prompt.ids, options, generator) for _ in range(count)]
        return Future(types.SimpleNamespace(sequences=sequences))

    def one(self, prompt, options, generator):
        tokens, logprobs = [], []
        while len(tokens) < options.max_tokens and tokens[-1:] != options.stop:
            table = log_probs(self.theta, torch.tensor(prompt + tokens))[-1]
            token = table.exp().multinomial(1, generator=generator).item()
            tokens.append(token)
            off = 0.5 * noise(prompt, tokens) if self.server.fixed else 0.0
            logprobs.append(min(0.0, table[token].item() + off))
        return types.SimpleNamespace(
            tokens=tokens, logprobs=logprobs if self.server.logprobs else None
        )


# ---------------------------------------------------------------------------- one step


KEY = {"TINKER_API_KEY": "tml-toy"}


def make_trainer(folder, server, problems=PROBLEMS, held_out=(), **options):
    """A Trainer of `server`; the types of the SDK are those above."""
    options = {
        "prompts_per_step": len(problems), "group_size": G, "max_new_tokens": LONGEST, "lr": 0.1,
        "prompt_rule": "none", "completion_rule": "none", "out_dir": str(folder),
    } | options  # fmt: skip
    SDK.ServiceClient = server
    with mock.patch.dict(os.environ, KEY), mock.patch.object(dppo_tinker, "tinker", SDK):
        return dppo_tinker.Trainer(
            problems, list(held_out), reward, Tokenizer(), "toy", "http://toy", **options
        )


def make(**options):
    """Refusals come before the server is asked for anything."""
    server = Server()
    try:
        return make_trainer(tempfile.mkdtemp(), server, **options)
    except dppo.RuleError:
        assert not server.clients
        raise


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
FEW = {"problems": PROBLEMS[:2]}
PLAIN = {}
DULL = {"problems": [(ids, "dull") for ids in PROMPTS]}
STOCK = []  # its loop is dppo_tinker's
REFUSED = [
    ({"loss": "gspo"}, "loss='gspo' is not exact .*'grpo', 'dr_grpo', 'dapo', 'cispo'"),
    ({"loss_fn": "dro"}, "loss_fn='dro' is not exact .*'importance_sampling', 'ppo', 'cispo'"),
    ({"prompts_per_step": 5}, "prompts_per_step=5: only 4 problems"),
    ({"scale_rewards": "std"}, "unknown scale_rewards 'std': .*none, group, variance, mean"),
]
INEXACT = []


def mistaken(means):
    """Datums for a server with other means than were measured."""
    make = dppo_tinker.make_datums
    wrong = lambda rows, *rest: make(rows, *((means, *rest[1:]) if rest else ()))
    return mock.patch.object(dppo_tinker, "make_datums", wrong)


MISTAKES = {
    f"{denominator}-{means}": (mistaken(means), {"denominator": denominator})
    for denominator, means in (
        ("sum", (1, 1)), ("both", (0, 0)), ("tokens", (0, 0)), ("datums", (0, 0)), ("both", (1, 0))
    )
}  # fmt: skip


class Toy(exact.Toy):
    """A trainer whose completions come from a policy somewhat different, and whose lr is 0."""

    kept = ("history", "mean_tokens", "number")

    def __init__(self, folder=None, denominator="both", problems=PROBLEMS, **options):
        folder = folder or tempfile.mkdtemp()
        server = Server(denominator, fixed=True)
        self.trainer = make_trainer(folder, server, problems, lr=0.0, **options)
        self.scale = options.get("scale_rewards") or dppo.LOSSES[self.trainer.loss].scale_rewards
        self.denominator, self.trainer.number = DENOMINATORS[self.trainer.loss], 1
        policy = Policy(server, self.trainer.client.theta)
        options = Columns(max_tokens=LONGEST, stop=[0], seed=0)
        sample = lambda prompt: policy.sample(ModelInput(prompt), G, options).value.sequences
        self.rows = [sample(prompt) for prompt, _answer in problems]
        scores = [[reward(Tokenizer().decode(x.tokens, True), answer) for x in row]
                  for row, (_prompt, answer) in zip(self.rows, problems, strict=True)]  # fmt: skip
        scores = [[torch.nan if x is None else x for x in row] for row in scores]
        lengths = torch.tensor([[len(one.tokens) for one in row] for row in self.rows])
        costs = lengths + self.trainer.prompt_tokens[:, None]
        energy = torch.tensor(
            [[dppo.energy_bound(torch.tensor(one.logprobs)).sum() for one in row]
             for row in self.rows]
        )  # fmt: skip
        self.tables = torch.tensor(scores, dtype=torch.float64), lengths, costs, energy
        self.beta = 0.0
        self.remember()

    def figures(self):
        names = {"kept/prompts": "kept_prompts", "kept/completions": "kept_completions"}
        names |= {"kept/tokens": "kept_tokens", "weight/max": "weight_max", "reward": "reward"}
        return {new: self.row[name] for name, new in names.items()}

    def step(self):
        """What a step sends to Adam."""
        self.trainer.service.saved.clear()  # so that its names are free again
        with mock.patch.object(dppo_tinker, "tinker", SDK):
            self.row = self.trainer.step(self.trainer.number)
        self.trainer.number += 1
        return self.trainer.client.gradients[-1]

    def stock(self):
        """The gradient of all Q x G completions: the sum of A x loss / denominator(length, Q x G,
        their tokens), by dppo.py's own losses."""
        loss_fn, theta = self.trainer.loss_fn, self.trainer.client.theta.clone().requires_grad_()
        rewards, lengths, _costs, _energy = self.tables
        advantages, total = dppo.group_advantages(rewards, self.scale), 0.0
        clip = {"eps_low": 0.2, "eps_high": 0.2}
        if loss_fn == "importance_sampling":
            clip = {"eps_low": 1.0, "eps_high": torch.inf}
        for (prompt, _answer), row, A in zip(
            self.trainer.problems, self.rows, advantages, strict=True
        ):
            for one, a in zip(row, A.tolist(), strict=True):
                ids, n = torch.tensor(prompt + one.tokens), len(one.tokens)
                now = log_probs(theta, ids[:-1])[-n:].gather(1, ids[-n:, None])[:, 0]
                before = torch.tensor(one.logprobs, dtype=torch.float64)
                rest = torch.full_like(before, a), torch.zeros(n, dtype=torch.long)
                name = "cispo" if loss_fn == "cispo" else "grpo"
                loss, _ = dppo.token_loss(now, before, *rest, **clip, num_sequences=1, loss=name)
                total = total + loss.sum() / self.denominator(
                    n, lengths.numel(), lengths.sum().item()
                )
        return torch.autograd.grad(total, theta)[0]
