"""
vLLM as the sampling engine, in this process, one engine per rank: `--engine vllm`. Optional;
docs/running.md says how to install it, and tests/vllm.sh runs its tests on a CPU.

vLLM samples from the trainer's policy only if all of these hold: the weights are sent after every
update, including a head that is tied to the embedding; prefixes cached under the old weights are
dropped; log-probs are those after the temperature. Each omission fails silently, so `Engine.check`
moves the weights before the first step and compares.

vLLM returns the log-prob of the sampled token and no more. The entropy of its Rollouts is NaN, and
their energy is the bound dppo.energy_bound. Pruning stays unbiased: any size that is fixed before
the draw will do.
"""

import contextlib
import dataclasses
import os

import numpy
import torch

import dppo
import lora
import rollout
from runtime import InputError, NotFiniteError, ranks

# Mean |log-prob difference|, in nats; bfloat16 alone causes about 0.02.
MAX_GAP = {"float32": 0.01, "bfloat16": 0.3}
# The same for perturbed weights, as a share of the mean change of the log-probs.
MAX_MOVED_GAP = 0.25
# How far each tensor is moved, relative to its norm. Deep layers would amplify more too much.
NOISE = 0.1
VOCABULARY_NOISE = 1.0  # embedding and head


class Engine:
    """A vLLM engine that holds a copy of the trainer's policy."""

    def __init__(
        self,
        folder: str,
        *,
        vocab_size: int,
        max_tokens: int,
        sequences: int,
        dtype: str,
        device: str,
        memory: float | None,
    ):
        """`folder` is a hub id or folder, used for its config only. `vocab_size` excludes padding.
        `max_tokens` bounds prompt plus completion, `sequences` how many are sampled at once.
        `memory` is a share of the GPU's, by default 0.3."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors are handed over in-process
        if device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            # The trainer uses the same threads, so do not pin them.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.sleeps = device == "cuda"  # between two calls, when the trainer needs the memory
        from vllm import LLM, SamplingParams

        self.make_params = SamplingParams
        self.llm = LLM(
            folder,
            load_format="dummy",  # `load` brings the weights
            hf_overrides={"vocab_size": vocab_size},  # the head's padding is not sampled
            dtype=dtype,
            max_model_len=max_tokens,
            max_num_seqs=sequences,
            gpu_memory_utilization=memory or 0.3,
            enable_sleep_mode=self.sleeps,
            enforce_eager=device == "cpu",
            # Not "if there is a process group": a vLLM of one process leaves one of its own.
            distributed_executor_backend="external_launcher" if ranks.world() > 1 else None,
            logprobs_mode="processed_logprobs",  # after the temperature
            generation_config="vllm",  # not the model's own temperature, top-k and top-p
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def sample(
        self, model, prompt_ids, sampling: rollout.Sampling, *, group_size: int, seed: int, keys
    ) -> rollout.Rollouts:
        """Send the weights of `model`, then sample from them. See rollout.sample."""
        self.load(model)
        seed = dppo.seed_for(seed, *keys)
        torch.manual_seed(seed)  # one of vLLM's runners draws from this generator
        numpy.random.seed(seed % 2**32)  # noqa: NPY002  the other runner seeds itself from this one
        params = self.make_params(
            n=group_size,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=sampling.eos_ids,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # one list, not a dict for each token
            detokenize=False,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompt_ids]
        options = {"use_tqdm": sampling.show_progress}
        outputs = self.llm.generate(requests, params, **options) if requests else []
        if self.sleeps:
            self.llm.sleep(level=2)  # frees all of its memory

        K, G, T = len(prompt_ids), group_size, sampling.max_new_tokens
        ids = torch.full((K * G, T), sampling.pad_id)
        logprobs = torch.zeros(K * G, T)
        lengths = torch.zeros(K * G, dtype=torch.long)
        truncated = torch.zeros(K * G, dtype=torch.bool)
        for row, completion in enumerate(text for output in outputs for text in output.outputs):
            length = lengths[row] = len(completion.token_ids)
            ids[row, :length] = torch.tensor(completion.token_ids)
            logprobs[row, :length] = torch.tensor(completion.logprobs.logprobs)
            truncated[row] = completion.finish_reason != "stop"
        if not logprobs.isfinite().all():
            raise NotFiniteError("vLLM's log-probs are not finite")
        entropy = torch.full((K * G,), torch.nan)
        energy = dppo.energy_bound(logprobs).sum(dim=1)  # padding adds 0: its log-prob is 0
        columns = (ids, logprobs, entropy, energy, lengths, truncated)
        return rollout.Rollouts(prompt_ids, *(column.unflatten(0, (K, G)) for column in columns))

    def load(self, model) -> None:
        """Send the weights of `model`, and drop what vLLM cached under the previous ones."""
        asleep = self.sleeps and self.llm.llm_engine.is_sleeping()
        if asleep:
            torch.cuda.empty_cache()  # vLLM takes memory beside PyTorch, which keeps what it freed
            self.llm.wake_up(tags=["weights"])
        dtype = getattr(torch, self.dtype)
        vocabulary = [
            module.weight.data_ptr()
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
        ]

        def sent(tensor):
            rows = tensor[: self.vocab_size] if tensor.data_ptr() in vocabulary else tensor
            return rows.to(dtype)

        # The state dict holds a tied head under its own name as well.
        weights = ((name, sent(tensor)) for name, tensor in lora.plain_state(model))
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Stop vLLM. Its process group stays, for the next engine of this process."""
        self.llm.llm_engine.engine_core.shutdown()

    def check(self, model, prompt_ids, sampling: rollout.Sampling, logprobs_of) -> None:
        """InputError unless vLLM's log-probs are the trainer's, both for the current weights and,
        on the same prompts, for perturbed ones. `logprobs_of(rollouts)` returns the trainer's,
        [K, G, T]. Leaves the weights unchanged."""
        sampling = dataclasses.replace(sampling, max_new_tokens=4, show_progress=False)
        for moved in (False, True):
            with moved_weights(model) if moved else contextlib.nullcontext():
                rollouts = rollout.sample(model, prompt_ids, sampling, group_size=2, seed=0)
                ours = logprobs_of(rollouts)
            tokens = rollouts.lengths.sum().item()
            gap = (ours - rollouts.logprobs).abs().sum().item() / tokens
            bound = MAX_GAP[self.dtype]
            if moved:
                bound = MAX_MOVED_GAP * (ours - logprobs_of(rollouts)).abs().sum().item() / tokens
            if not gap <= bound:
                weights = "weights that were changed and sent" if moved else "the same weights"
                raise InputError(
                    f"--engine vllm: its log-probs are {gap:.2g} nats a token from the trainer's "
                    f"for {weights}, more than {bound:.2g} ({self.dtype}): it samples another "
                    "policy. Use --engine loop"
                )


@contextlib.contextmanager
def moved_weights(model):
    """Other signs for some weights of every tensor, drawn where the weights are. On exit they are
    drawn again, so the weights are exact and none was copied."""
    flip_signs(model)
    try:
        yield
    finally:
        flip_signs(model)


@torch.no_grad()
def flip_signs(model) -> None:
    generator = torch.Generator(model.device).manual_seed(0)
    for weight in model.parameters():
        # Flipping a share s of the weights moves a tensor by 2 sqrt(s) of its norm.
        moved = VOCABULARY_NOISE if len(weight) == model.config.vocab_size else NOISE
        chosen = torch.rand(weight.shape, generator=generator, device=model.device)
        weight.copy_(torch.where(chosen < (moved / 2) ** 2, -weight, weight))
