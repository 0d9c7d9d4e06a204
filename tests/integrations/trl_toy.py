"""TRL trainers of a GPT-2 in float64, whose gradients and draws the tests enumerate.

TRL's head computes log-probs in float32, whatever the model's type, and Llama's norm does too. So
the head is replaced by log_softmax, and the model is a GPT-2.
"""

import contextlib
import copy
import itertools
import os
import signal
import zlib
from unittest import mock

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from trl.trainer import utils

import dppo
import dppo_trl
import proof
import sampler

LETTERS = "abcdefgh"
PROMPTS = ["f", "bb", "ccc", "ee"]  # 0, 2, 1 and 3 of their fixed completions are right
SAME_LENGTH = ["ab", "cd", "ef", "gh"]  # padding shifts the positions of a GPT-2
G = 4  # completions of a prompt
REAL_GENERATE = trl.GRPOTrainer._generate_and_score_completions


class DoubleHead:
    """TRL's ChunkedLogProbFunction, in the model's precision."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_ignored):
        table = (hidden @ weight.T / temperature).log_softmax(dim=-1)
        entropy = -(table.exp() * table).sum(dim=-1)
        return table.gather(1, labels[:, None])[:, 0], entropy, None, None, None


def save_model(folder, kind="gpt2", dtype=torch.float64):
    """An untrained model of ten tokens and its tokenizer."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(vocab), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    if kind == "gpt2":
        nothing = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            n_embd=8, n_layer=1, n_head=2, n_positions=32, initializer_range=0.4, **nothing, **sizes
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, **sizes,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)


def toy_reward(completions, **columns):
    """0 or 1, by the letters."""
    return [float(zlib.crc32(f"{text}.".encode()) % 3 == 0) for text in completions]


def make_trainer(folder, kind=dppo_trl.DPPOTrainer, prompts=None, rules=None, callbacks=(), **own):
    """A trainer of save_model's model; `rules` are options of DPPOConfig, `own` those of TRL."""
    prompts = prompts or PROMPTS
    options = {
        "output_dir": f"{folder}-out", "use_cpu": True, "bf16": False, "report_to": "none",
        "num_generations": G, "max_completion_length": 6, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "temperature": 0.8, "gradient_checkpointing": False,
        "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "max_grad_norm": 0.0, "shuffle_dataset": False,
    } | own  # fmt: skip
    if issubclass(kind, dppo_trl.DPPOTrainer):
        args = dppo_trl.DPPOConfig(**options, **(rules or {}))
    else:
        args = trl.GRPOConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return kind(
        model,
        toy_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=list(callbacks),
    )


# ---------------------------------------------------------------------------- a fixed batch


def noise(*key):
    """A number from -1 to 1, always the same for a key."""
    return zlib.crc32(repr(key).encode()) % 2001 / 1000 - 1


def fixed_completions(trainer, prompts):
    """In place of TRL's _generate, as if vLLM had sampled: a prompt's g-th completion is always the
    same, whichever rank it is on, and whatever other prompts are sampled."""
    first, completions, logprobs = trainer.accelerator.process_index * len(prompts), [], []
    for place, prompt in enumerate(prompts, first):
        g = place % G
        length = 1 + zlib.crc32(f"{prompt}{g}".encode()) % 6
        ids = [2 + zlib.crc32(f"{prompt}{g}{t}".encode()) % len(LETTERS) for t in range(length)]
        completions.append([*ids[:-1], 1] if length < 6 else ids)  # the longest are cut off
        logprobs.append([-2 + noise(prompt, g, t) for t in range(length)])
    tokenizer = trainer.processing_class
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return ids, completions, None, texts, logprobs, {}, None, []


def old_policy(trainer, inputs):
    """TRL's _generate_and_score_completions, with old log-probs of a policy somewhat different."""
    rows = REAL_GENERATE(trainer, inputs)
    ids, old = rows["completion_ids"], rows["old_per_token_logps"]
    shift = [[noise(t, int(token)) for t, token in enumerate(row)] for row in ids]
    rows["old_per_token_logps"] = old + 0.4 * torch.tensor(shift, dtype=old.dtype)
    return rows


@contextlib.contextmanager
def exact_world():
    """float64 log-probs, and fixed completions."""
    with (
        mock.patch.object(utils, "_ChunkedLogProbFunction", DoubleHead),
        mock.patch.object(trl.GRPOTrainer, "_generate", fixed_completions),
        mock.patch.object(trl.GRPOTrainer, "_generate_and_score_completions", old_policy),
    ):
        yield


class Measured:
    """A trainer, and the gradients of its updates at fixed parameters: off-policy, and away from
    the reference model."""

    def __init__(self, folder, kind=dppo_trl.DPPOTrainer, **options):
        options = {"beta": 0.04, "vllm_importance_sampling_mode": "token_truncate"} | options
        self.trainer = trainer = make_trainer(folder, kind, **options)
        trainer.use_vllm = True  # so that its correction takes part; nothing else of it is used
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                moved = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(moved, alpha=0.1)
        self.model = trainer.accelerator.prepare_model(trainer.model)
        rows = [{"prompt": text} for text in trainer.train_dataset["prompt"] for _ in range(G)]
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        n = trainer.args.generation_batch_size // world
        self.inputs = rows[rank * n : (rank + 1) * n]
        if history := vars(trainer).get("history"):
            teach(history)
        self.state = {name: vars(trainer).get(name) for name in ("so_far", "history")}

    def gradients(self):
        """The gradient of each update on the generation batch, [updates, P], as HF's loop adds it
        up from micro-steps."""
        trainer, args = self.trainer, self.trainer.args
        vars(trainer).update(copy.deepcopy(self.state))
        trainer._step, trainer._buffered_inputs, trainer.rows, trainer.plan = 0, None, None, None
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        torch.manual_seed(0)  # of TRL's shuffle
        found = []
        for step in range(micro_steps(args)):
            last = (step + 1) % args.gradient_accumulation_steps == 0
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            wait = contextlib.nullcontext() if last else trainer.accelerator.no_sync(self.model)
            with wait:
                trainer.training_step(self.model, self.inputs, None)
            if last:
                parameters = list(trainer.model.parameters())
                found.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
                self.model.zero_grad()
        return torch.stack(found)


def micro_steps(args):
    """Of at least one update and one generation batch."""
    return max(args.gradient_accumulation_steps, args.steps_per_generation * args.num_iterations)


def teach(history):
    """Different scores of four prompts, and different lengths, by which pps draws."""
    scores = torch.tensor([0.0, 0.3, 0.5, 0.7], dtype=torch.float64)
    lengths = torch.tensor([6, 12, 4, 9])
    history.update(torch.arange(4), scores[:, None].expand(4, G), lengths[:, None].expand(4, G))


# ---------------------------------------------------------------------------- every outcome


class Outcome:
    """In place of dppo.prune_completions: in the chosen window the number-th outcome of the rule;
    in others everything is kept, with weight 1."""

    def __init__(self, window, number):
        self.window, self.number, self.seen = window, number, 0

    def __call__(self, rule, rate, batch, _generator):
        self.seen += 1
        if self.seen != self.window + 1:
            ones = torch.ones_like(batch.size)
            return ones > 0, ones
        outcomes = list(proof.outcomes(rule, rate, batch))
        self.more = self.number + 1 < len(outcomes)
        self.rows = (batch.cost > 0).sum().item()
        keep, weights, self.chance = outcomes[self.number]
        return keep, weights


class PromptOutcome:
    """In place of PromptHistory.prune: its number-th outcome."""

    def __init__(self, number):
        self.number = number

    def prune(self, history, rule, rate, prompts, _generator):
        outcomes = list(proof.prompt_outcomes(rule, rate, history, prompts).values())
        self.more = self.number + 1 < len(outcomes)
        weights, self.chance = outcomes[self.number]
        return weights > 0, weights


@contextlib.contextmanager
def rolled_out_once():
    """Reuse a rollout for every outcome: with the same inputs and parameters it is the same, and
    it takes half of the time."""
    real, known = trl.GRPOTrainer._generate_and_score_completions, {}

    def look_up(trainer, inputs):
        key = repr(inputs)
        if key not in known:
            known[key] = real(trainer, inputs), trainer.rewards
        rows, trainer.rewards = copy.deepcopy(known[key])
        return rows

    with mock.patch.object(trl.GRPOTrainer, "_generate_and_score_completions", look_up):
        yield


@rolled_out_once()
def over_completions(measured):
    """[windows, updates, P]: the expected gradients of all updates, over every outcome of one
    window's draw, for each window. A draw sees the rows of its window only."""
    expected, trainer = [], measured.trainer
    for window in range(micro_steps(trainer.args) // trainer.window):
        total = chances = number = 0
        more = True
        while more:
            outcome = Outcome(window, number)
            with mock.patch.object(dppo, "prune_completions", outcome):
                gradients = measured.gradients()
            total, chances = total + outcome.chance * gradients, chances + outcome.chance
            number, more = number + 1, outcome.more
            windows = trainer.args.steps_per_generation // trainer.window
            assert outcome.rows == trainer.batch.size.numel() // windows
        assert abs(chances - 1) < 1e-9
        expected.append(total)
    return torch.stack(expected)


def over_prompts(gradients):
    """The expectation of gradients() over every outcome of the prompt draw."""
    total = chances = number = 0
    more = True
    while more:
        outcome = PromptOutcome(number)
        prune = lambda history, *args, outcome=outcome: outcome.prune(history, *args)
        with mock.patch.object(sampler.PromptHistory, "prune", prune):
            found = gradients()
        total, chances = total + outcome.chance * found, chances + outcome.chance
        number, more = number + 1, outcome.more
    assert abs(chances - 1) < 1e-9
    return total


def error(found, wanted):
    """Largest difference over the largest entry, of gradients [..., updates, P]."""
    return ((found - wanted).abs().amax(dim=-1) / wanted.abs().amax(dim=-1)).max().item()


# ---------------------------------------------------------------------------- mistakes


class KeptCount(dppo_trl.DPPOTrainer):
    """Divides by what is kept."""

    def correction(self, index):
        return 1.0


class WeightedAdvantages(dppo_trl.DPPOTrainer):
    """Multiplies advantages instead of gradients, which leaves the KL term without weights."""

    def _compute_loss(self, model, inputs):
        if inputs is not None:
            weighted = inputs["advantages"] * inputs["factor"].to(inputs["advantages"])
            inputs = inputs | {"advantages": weighted, "factor": None}
        return super()._compute_loss(model, inputs)


# ---------------------------------------------------------------------------- in processes


MANY = [a + b for a, b in itertools.product(LETTERS, LETTERS)]
BOTH = {"prompt_rule": "pps", "prompt_prune_rate": 0.3}


class Kill(transformers.TrainerCallback):
    """SIGKILL after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **options):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, out, kill, resume, prompts=MANY):
    """Six steps with both levels of pruning; `out` gets all that must repeat."""
    trainer = make_trainer(
        folder, prompts=prompts, rules=BOTH, callbacks=[Kill(kill)], max_steps=6,
        output_dir=out, save_strategy="steps", save_steps=2, shuffle_dataset=True,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    weights = [parameter.detach() for parameter in trainer.model.parameters()]
    torch.save(
        (trainer.so_far, vars(trainer.history), weights, repeatable(trainer)), f"{out}/end.pt"
    )


def repeatable(trainer):
    """The log without its times."""
    times = ("step_time", "train_", "total_flos")
    rows = trainer.state.log_history
    return [{key: row[key] for key in row if not key.startswith(times)} for row in rows]
