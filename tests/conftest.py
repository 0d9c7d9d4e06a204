"""A Qwen3 small enough for hundreds of backward passes, rollouts made by hand, and short runs."""

import importlib.util
import os
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"  # the workers fill the cores; and a run must not choose by load

import pytest
import torch
import torch.nn.functional as F
import toy
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import config
import packing
import rollout
import train
from runtime import plot
from tasks import arithmetic

collect_ignore_glob = ["integrations/verl_*.py"]  # tests/verl.sh
if not importlib.util.find_spec("trl"):
    collect_ignore_glob.append("integrations/trl_*.py")
LONG = (
    "test_notebooks", "test_ranks", "test_stop", "test_trl_ranks",
    "test_train.py::test_several_ranks",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """The long ones first, so that no worker is left alone with one."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Runs draw no run.png, which takes four times as long as the rest of a short run."""
    monkeypatch.setattr(plot, "draw_run", lambda out_dir: None)


@pytest.fixture(scope="session")
def make_policy():
    """Build an untrained two-layer Qwen3 with grouped-query attention, and its byte tokenizer."""

    def make(seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        tokenizer = AutoTokenizer.from_pretrained(arithmetic.BASE)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
            tie_word_embeddings=True, initializer_range=0.2, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        config._attn_implementation = packing.ATTENTION
        model = Qwen3ForCausalLM(config).to(dtype)
        if dtype == torch.float64:  # Qwen3's RMSNorm computes in float32 whatever the input is
            for norm in (module for module in model.modules() if isinstance(module, Qwen3RMSNorm)):
                shape = norm.weight.shape
                norm.forward = partial(
                    F.rms_norm, normalized_shape=shape, weight=norm.weight, eps=1e-6
                )
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        return model, tokenizer

    return make


@pytest.fixture
def policy_folder(make_policy, tmp_path):
    """The same model as a Hugging Face folder, for --model."""
    model, tokenizer = make_policy()
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture
def make_rollouts():
    """Random prompts and completions of ragged lengths; their log-probs are the model's own, moved
    by `drift`."""

    def make(model, num_prompts, group_size, *, drift=0.0, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, generator=generator)

        prompts = [integers(0, 256, int(integers(1, 5, 1))).tolist() for _ in range(num_prompts)]
        completion_ids = integers(0, 256, num_prompts, group_size, 6)
        lengths = integers(1, 7, num_prompts, group_size)
        logprobs = torch.zeros(num_prompts, group_size, 6, dtype=model.dtype)
        with torch.no_grad():
            for q in range(num_prompts):
                for g in range(group_size):
                    completion = completion_ids[q, g, : lengths[q, g]].tolist()
                    pack = packing.build_pack([prompts[q]], [completion])
                    own, _ = packing.packed_logprobs(model, pack)
                    noise = torch.randn(len(completion), generator=generator, dtype=own.dtype)
                    logprobs[q, g, : len(completion)] = own + drift * noise
        nothing = torch.zeros(num_prompts, group_size)
        rest = (nothing, nothing, lengths, nothing.bool())
        return rollout.Rollouts(prompts, completion_ids, logprobs, *rest)

    return make


@pytest.fixture
def run(policy_folder, tmp_path):
    """Train in this process with the toy reward, or another; returns the log's rows."""

    def go(name, reward=toy.toy_reward, until=None, trainer_class=train.Trainer, **changes):
        cfg = config.parse_config(toy.flags(policy_folder, str(tmp_path / name), **changes))
        train.main(cfg, reward=reward, until=until, trainer_class=trainer_class)
        return toy.rows(tmp_path / name)

    return go
