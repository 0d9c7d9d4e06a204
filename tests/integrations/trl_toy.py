"""TRL's trainers of a GPT-2 in float64, see exact.py.

TRL's head computes log-probs in float32, whatever the model's type, and Llama's norm does too. So
the head is replaced by log_softmax, and the model is a GPT-2.
"""

import contextlib
import copy
import functools
import tempfile
from unittest import mock

import exact
import torch
import transformers
import trl
from accelerate.utils import gather_object
from datasets import Dataset
from exact import NONE, G, noise, number
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from trl.trainer import utils

import dppo_trl
from dppo import energy_bound

LETTERS = "abcdefgh"
PROMPTS = ["f", "bb", "ccc", "ee"]  # 0, 2, 1 and 3 of their fixed completions are right
SAME_LENGTH = ["ab", "cd", "ef", "gh"]  # padding shifts the positions of a GPT-2
MANY = [a + b for a in LETTERS for b in LETTERS]
REAL_GENERATE = trl.GRPOTrainer._generate_and_score_completions


class DoubleHead:
    """TRL's ChunkedLogProbFunction, in the model's precision."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_ignored):
        table = (hidden @ weight.T / temperature).log_softmax(dim=-1)
        entropy = -(table.exp() * table).sum(dim=-1)
        return table.gather(1, labels[:, None])[:, 0], entropy, None, None, None


@functools.cache
def model_folder(kind):
    """The folder of an untrained model of ten tokens and its tokenizer: a gpt2 in float64 or a
    llama in float32."""
    folder = tempfile.mkdtemp()
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    shared = {
        "vocab_size": len(vocab), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
        "initializer_range": 0.4,
    }  # fmt: skip
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=8, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, **shared,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, **shared,
        )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float64 if kind == "gpt2" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def toy_reward(completions, **columns):
    """0 or 1, by the letters."""
    return [float(number(text, ".") % 3 == 0) for text in completions]


def make_trainer(kind=dppo_trl.DPPOTrainer, prompts=PROMPTS, model="gpt2", **options):
    folder = model_folder(model)
    options = {
        "output_dir": f"{folder}/out", "use_cpu": True, "bf16": False, "report_to": "none",
        "num_generations": G, "max_completion_length": 6, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "temperature": 0.8, "gradient_checkpointing": False,
        "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "max_grad_norm": 0.0, "shuffle_dataset": False,
    } | options  # fmt: skip
    return kind(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
        toy_reward,
        args=dppo_trl.DPPOConfig(**options),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )


make = make_trainer

# ---------------------------------------------------------------------------- a fixed batch


def completion(prompt, g):
    """The token ids of a prompt's g-th completion, 1 to 6 of them; the longest are cut off."""
    length = 1 + number(prompt, g) % 6
    ids = [2 + number(prompt, g, t) % len(LETTERS) for t in range(length)]
    return [*ids[:-1], 1] if length < 6 else ids


def sampled_logprobs(prompt, g):
    return [-2 + noise(prompt, g, t) for t in range(len(completion(prompt, g)))]


def fixed_completions(trainer, prompts):
    """In place of TRL's _generate, as if vLLM had sampled: a prompt's g-th completion is always the
    same, whichever rank it is on, and whatever other prompts are sampled."""
    first = trainer.accelerator.process_index * len(prompts)
    numbers = [place % G for place in range(first, first + len(prompts))]
    completions = list(map(completion, prompts, numbers))
    logprobs = list(map(sampled_logprobs, prompts, numbers))
    tokenizer = trainer.processing_class
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return ids, completions, None, texts, logprobs, {}, None, []


def old_policy(trainer, inputs):
    """TRL's _generate_and_score_completions, with old log-probs of a policy somewhat different. The
    same inputs of all ranks are rolled out once."""
    known = vars(trainer).setdefault("known", {})
    if (key := repr(gather_object(inputs))) not in known:
        rows = REAL_GENERATE(trainer, inputs)
        ids, old = rows["completion_ids"], rows["old_per_token_logps"]
        shift = [[noise(t, int(token)) for t, token in enumerate(row)] for row in ids]
        rows["old_per_token_logps"] = old + 0.4 * torch.tensor(shift, dtype=old.dtype)
        known[key] = rows, vars(trainer).get("rewards")
    rows, trainer.rewards = copy.deepcopy(known[key])
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


# ---------------------------------------------------------------------------- for test_exact.py

LOSSES = {loss: {"loss_type": loss} for loss in dppo_trl.LOSSES}
PER_TOKEN, OWN_LENGTH, MEMORY = dppo_trl.PER_TOKEN, ("grpo", "sapo"), dppo_trl.MEMORY
SCALES = {scale: {"scale_rewards": scale} for scale in dppo_trl.OWN_SCALES}
FEW = {"prompts": ["ccc", "ee"], "per_device_train_batch_size": 2}
PLAIN = {"beta": 0.0}
DULL = PLAIN | {"prompts": ["f"] * 4}
STOCK = [(trl.GRPOTrainer, {})]
BY_PROMPT = {"prompt_rule": "uniform"}
SEPARATE = {"multi_objective_aggregation": "normalize_then_sum"}
REFUSED = [
    ({"loss_type": "new"}, "loss_type='new' .*choose 'grpo' or"),
    ({"scale_rewards": "std"}, "unknown scale_rewards 'std': .*batch, none, group, variance"),
    (NONE | SEPARATE | {"scale_rewards": "mean"}, "scale_rewards='mean' .*set multi_objective_agg"),
]
INEXACT = [
    ({"entropy_coef": 0.01}, "entropy_coef=0.01 .*choose 0.0,"),
    ({"use_adaptive_entropy": True}, "use_adaptive_entropy=True .*choose False"),
    ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 .*choose 1.0"),
    ({"steps_per_generation": 3, "per_device_train_batch_size": 8}, "let one divide"),
    (BY_PROMPT | {"loss_type": "bnpo"}, "loss_type='bnpo' .*choose 'grpo' or"),
    (BY_PROMPT | {"scale_rewards": "batch"}, "scale_rewards='batch' .*'none' or 'group' or"),
    (BY_PROMPT | SEPARATE, "normalize_then_sum' .*choose 'sum_then_normalize'"),
    (BY_PROMPT | {"num_iterations": 2}, "num_iterations=2 .*choose 1"),
    (BY_PROMPT | {"steps_per_generation": 8}, "steps_per_generation=8 .*set it to 4"),
    (BY_PROMPT | {"steps_per_generation": 2}, "steps_per_generation=2 .*set it to 4"),
]


class Toy(exact.Toy):
    """Off-policy, and away from the reference model."""

    kept = ("so_far", "history")

    def __init__(self, kind=dppo_trl.DPPOTrainer, **options):
        options = {"beta": 0.04, "vllm_importance_sampling_mode": "token_truncate"} | options
        if options.get("prompt_rule", "none") != "none":
            options = {"prompts": SAME_LENGTH} | options
        self.options, self.trainer = options, make_trainer(kind, **options)
        trainer = self.trainer
        trainer.use_vllm = True  # so that its correction takes part; nothing else of it is used
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                moved = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(moved, alpha=0.1)
        self.model = trainer.accelerator.prepare_model(trainer.model)

        prompts = list(trainer.train_dataset["prompt"])
        rows = [{"prompt": text} for text in prompts for _ in range(G)]
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        n = trainer.args.generation_batch_size // world
        self.inputs = rows[rank * n : (rank + 1) * n]

        table = lambda f: torch.tensor([[f(x, g) for g in range(G)] for x in prompts])
        lengths = table(lambda x, g: len(completion(x, g)))
        energy = table(lambda x, g: energy_bound(torch.tensor(sampled_logprobs(x, g))).sum())
        text = lambda x, g: "".join(LETTERS[i - 2] for i in completion(x, g) if i > 1)
        rewards = table(lambda x, g: toy_reward([text(x, g)])[0]).double()
        costs = lengths + torch.tensor([[len(x)] for x in prompts])
        self.tables, self.beta = (rewards, lengths, costs, energy), trainer.beta
        self.remember()

    def stock(self):
        """Both rules none, which is TRL's trainer: test_none_is_the_library."""
        return Toy(**self.options | NONE).step()

    def state(self):
        return self.trainer.so_far

    def log(self):
        return {name: x for name, x in self.trainer._metrics["train"].items() if "time" not in name}

    def figures(self):
        rows = self.trainer._metrics["train"].items()
        return {name[5:]: x[-1] for name, x in rows if name.startswith("dppo/")}

    def plan(self):
        """The micro-batches that computed something."""
        return [x for x in self.trainer.plan if x is not None]

    def step(self):
        """[updates, P] on the generation batch, as HF's loop adds it up from micro-steps."""
        trainer, args = self.trainer, self.trainer.args
        trainer._step, trainer._buffered_inputs, trainer.rows, trainer.plan = 0, None, None, None
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        torch.manual_seed(0)  # of TRL's shuffle
        found = []
        for step in range(self.micro_steps()):
            last = (step + 1) % args.gradient_accumulation_steps == 0
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            wait = contextlib.nullcontext() if last else trainer.accelerator.no_sync(self.model)
            with wait, exact_world():
                trainer.training_step(self.model, self.inputs, None)
            if last:
                parameters = list(trainer.model.parameters())
                found.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
                self.model.zero_grad()
        return torch.stack(found)

    def micro_steps(self):
        """Of at least one update and one generation batch."""
        args = self.trainer.args
        generated = args.steps_per_generation * args.num_iterations
        return max(args.gradient_accumulation_steps, generated)

    def over_windows(self):
        """[windows, updates, P]: the expected gradients over the draw of one window, for each. A
        draw sees the rows of its window only."""
        expected, trainer = [], self.trainer
        share = trainer.args.steps_per_generation // trainer.window
        for window in range(self.micro_steps() // trainer.window):
            seen = []
            expected.append(exact.over_completions(self.gradient, window, seen))
            for batch in seen:
                assert (batch.cost > 0).sum() * share == batch.cost.numel()
        return torch.stack(expected)
