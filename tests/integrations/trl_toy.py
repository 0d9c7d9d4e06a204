"""TRL's trainers of a small model in float64, see exact.py.

TRL's head computes log-probs in float32, whatever the model's type, so log_softmax is in its place.
The model rotates nothing: padding does not even change its rounding.
"""

import contextlib
import functools
import tempfile
from unittest import mock

import exact
import torch
import transformers
import trl
from datasets import Dataset
from exact import NONE, G, completion, noise, number, tables
from trl.trainer import utils

import dppo_trl
from tasks import arithmetic

PROMPTS = ["f", "bb", "ccc", "gg"]  # 0 to 3 of their 4 completions are right
MANY = [a + b for a in "abcdefgh" for b in "abcdefgh"]
REAL_GENERATE = trl.GRPOTrainer._generate_and_score_completions
TOKENIZER = transformers.AutoTokenizer.from_pretrained(arithmetic.BASE)


class DoubleHead:
    """TRL's ChunkedLogProbFunction, in the model's precision."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_ignored):
        table = (hidden @ weight.T / temperature).log_softmax(dim=-1)
        entropy = -(table.exp() * table).sum(dim=-1)
        return table.gather(1, labels[:, None])[:, 0], entropy, None, None, None


@functools.cache
def model_folder():
    """The folder of an untrained model and its tokenizer."""
    folder = tempfile.mkdtemp()
    TOKENIZER.save_pretrained(folder)
    config = transformers.GPTNeoXConfig(
        vocab_size=len(TOKENIZER), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, rotary_pct=0.0, initializer_range=0.4,
        pad_token_id=TOKENIZER.pad_token_id, eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def toy_reward(completions, **columns):
    """0 or 1, by the text."""
    return [float(number(text, ".") % 3 == 0) for text in completions]


def make(kind=dppo_trl.DPPOTrainer, prompts=PROMPTS, dtype="float64", **options):
    folder, adapters = model_folder(), options.pop("peft_config", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.manual_seed(0)  # of adapters
    options = {
        "output_dir": f"{folder}/out", "use_cpu": True, "bf16": False, "report_to": "none",
        "num_generations": G, "max_completion_length": 6, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "temperature": 0.8, "gradient_checkpointing": False,
        "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "max_grad_norm": 0.0, "shuffle_dataset": False,
    } | options  # fmt: skip
    return kind(
        model,
        toy_reward,
        args=dppo_trl.DPPOConfig(**options),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=TOKENIZER,
        peft_config=adapters,
    )


# ---------------------------------------------------------------------------- a fixed batch


def sampled(prompt, g):
    """(tokens, log-probs, text) of a prompt's g-th completion."""
    tokens, logprobs = completion(prompt, g, end=TOKENIZER.eos_token_id)
    return tokens, logprobs, TOKENIZER.decode(tokens, skip_special_tokens=True)


def fixed_completions(trainer, prompts):
    """In place of TRL's _generate, as if vLLM had sampled: a prompt's g-th completion is always the
    same, whichever rank it is on, and whatever other prompts are sampled."""
    first = trainer.accelerator.process_index * len(prompts)
    rows = [sampled(prompt, place % G) for place, prompt in enumerate(prompts, first)]
    completions, logprobs, texts = map(list, zip(*rows, strict=True))
    ids = [TOKENIZER(prompt)["input_ids"] for prompt in prompts]
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


# ---------------------------------------------------------------------------- for test_exact.py

LOSSES = {loss: {"loss_type": loss} for loss in (*dppo_trl.PER_ROW, *dppo_trl.PER_TOKEN)}
LOSSES["dr_grpo"]["scale_rewards"] = "none"
PER_TOKEN, OWN_LENGTH = dppo_trl.PER_TOKEN, ("grpo", "sapo")
DULL = {"beta": 0.0, "prompts": ["f"] * 4}
STOCK = trl.GRPOTrainer, {}
INEXACT = [
    {"loss_type": "bnpo"}, {"scale_rewards": "batch"}, {"num_iterations": 2},
    {"steps_per_generation": 8},
]  # fmt: skip


class Toy(exact.Toy):
    """Off-policy, and away from the reference model."""

    def __init__(self, kind=dppo_trl.DPPOTrainer, **options):
        options = {"beta": 0.04, "vllm_importance_sampling_mode": "token_truncate"} | options
        self.options, self.trainer = options, make(kind, **options)
        trainer = self.trainer
        trainer.use_vllm = True  # so that its correction takes part; nothing else of it is used
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model = trainer.accelerator.prepare_model(trainer.model)

        prompts = list(trainer.train_dataset["prompt"])
        rows = [{"prompt": text} for text in prompts for _ in range(G)]
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        n = trainer.args.generation_batch_size // world
        self.inputs = rows[rank * n : (rank + 1) * n]

        def row(prompt, g):
            tokens, logprobs, text = sampled(prompt, g)
            return toy_reward([text])[0], len(prompt) + len(tokens), logprobs

        self.tables, self.beta = tables(prompts, row), trainer.beta
        self.scale = trainer.scale_rewards

    def stock(self):
        """Both rules none, which is TRL's trainer: test_none_is_the_library."""
        return Toy(**self.options | NONE).step()

    def log(self):
        rows = self.trainer._metrics["train"].items()
        return {name: x for name, x in rows if name not in ("step_time", "dppo/rest")}

    def figures(self):
        rows = self.trainer._metrics["train"].items()
        return {name[5:]: x[-1] for name, x in rows if name.startswith("dppo/")}

    def plan(self):
        """The micro-batches that computed something."""
        return [x for x in self.trainer.plan if x is not None]

    def step(self):
        """[P] on the generation batch, as HF's loop adds it up from micro-steps."""
        trainer, micro_steps = self.trainer, self.trainer.args.gradient_accumulation_steps
        trainer._step, trainer._buffered_inputs = 0, None
        trainer.current_gradient_accumulation_steps = micro_steps
        torch.manual_seed(0)  # of TRL's shuffle
        for step in range(micro_steps):
            last = step == micro_steps - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            wait = contextlib.nullcontext() if last else trainer.accelerator.no_sync(self.model)
            with wait, exact_world():
                trainer.training_step(self.model, self.inputs, None)
        trainer.state.global_step += 1
        trained = [x for x in trainer.model.parameters() if x.requires_grad]
        found = torch.cat([x.grad.flatten() for x in trained])
        self.model.zero_grad()
        return found
