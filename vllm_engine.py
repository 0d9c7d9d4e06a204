"""
vLLM as the engine that samples, in this process, one engine per rank: `--engine vllm`. Optional; the README says how
to install it, and how its tests run on a CPU.

Its policy is the trainer's only if nobody forgets anything: the weights after every update, the head as well where it
is tied to the embedding, the cached prefixes of the old weights, the log-probs after the temperature rather than
before. Whatever is forgotten fails silently, so `Engine.check` moves the weights before the first step and compares.

vLLM returns the log-prob of the sampled token and no more: the entropy of its Rollouts is NaN, and their energy is the
bound dppo.energy_bound. Pruning stays unbiased with it: any size that is fixed before the draw does.
"""

import contextlib
import dataclasses
import os

import numpy
import torch
import torch.distributed as dist

import dppo
import rollout
from data import InputError

MAX_GAP = {"float32": 0.01, "bfloat16": 0.3}  # mean |log-prob difference|, nats; bfloat16 alone makes some 0.02
MAX_MOVED_GAP = 0.25  # the same for moved weights, as a share of how far the log-probs moved
NOISE, VOCABULARY_NOISE = 0.1, 1.0  # of moved weights, relative to their size; deep layers amplify what is more


class Engine:
    """A vLLM engine that holds a copy of the trainer's policy."""

    def __init__(
        self, folder: str, *, vocab_size: int, max_tokens: int, sequences: int, dtype: str, device: str, memory: float
    ):
        """`folder` is a hub id or folder, of which only the shape is read; `vocab_size` its tokens without padding;
        `max_tokens` those of prompt and completion, `sequences` as many at once. InputError if vLLM cannot start."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, or tensors cannot be handed over
        if device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads are the same ones
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            message = f"--engine vllm: cannot import it ({error}); install vLLM, or use --engine compact"
            raise InputError(message) from None
        self.make_params, self.vocab_size, self.dtype = SamplingParams, vocab_size, dtype
        self.sleeps = device == "cuda"  # between two calls, when its memory is the trainer's
        try:
            self.llm = LLM(
                folder,
                load_format="dummy",  # `load` brings the weights
                hf_overrides={"vocab_size": vocab_size},  # the head's padding is not sampled
                dtype=dtype,
                max_model_len=max_tokens,
                max_num_seqs=sequences,
                gpu_memory_utilization=memory,
                enable_sleep_mode=self.sleeps,
                enforce_eager=device == "cpu",
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
                logprobs_mode="processed_logprobs",  # after the temperature
                generation_config="vllm",  # not the model's own temperature, top-k and top-p
                skip_tokenizer_init=True,
                disable_log_stats=True,
            )
        except (ValueError, RuntimeError) as error:
            message = str(error).strip().splitlines()[-1]
            raise InputError(
                f"--engine vllm: cannot start it ({message}); see --vllm-memory and --rollout-batch"
            ) from None

    def sample(self, model, prompt_ids: list[list[int]], sampling: rollout.Sampling, *, group_size: int, seed: int):
        """Rollouts by the weights of `model`, which are sent first. See rollout.sample."""
        if 0 < sampling.temperature < 0.01:
            raise InputError(f"--temperature {sampling.temperature}: vLLM samples at 0.01 at least")
        self.load(model)
        torch.manual_seed(seed)  # which one of vLLM's runners draws from
        numpy.random.seed(seed % 2**32)  # noqa: NPY002, and where the other takes its seeds from
        params = self.make_params(
            n=group_size,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=sampling.eos_ids,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        K, G, T = len(prompt_ids), group_size, sampling.max_new_tokens
        ids, logprobs = torch.full((K * G, T), sampling.pad_id), torch.zeros(K * G, T)
        lengths, truncated = torch.zeros(K * G, dtype=torch.long), torch.zeros(K * G, dtype=torch.bool)
        with torch.autocast(model.device.type, enabled=False):  # the trainer's is not vLLM's
            requests = [{"prompt_token_ids": prompt} for prompt in prompt_ids]
            outputs = self.llm.generate(requests, params, use_tqdm=sampling.show_progress) if requests else []
        if self.sleeps:
            self.llm.sleep(level=2)  # keeps nothing
        for row, completion in enumerate(one for output in outputs for one in output.outputs):
            length = lengths[row] = len(completion.token_ids)
            ids[row, :length] = torch.tensor(completion.token_ids)
            steps = zip(completion.logprobs, completion.token_ids, strict=True)
            logprobs[row, :length] = torch.tensor([step[token].logprob for step, token in steps])
            truncated[row] = completion.finish_reason != "stop"
        if not logprobs.isfinite().all():
            raise FloatingPointError("vLLM's log-probs are not finite")
        energy = dppo.energy_bound(logprobs).sum(dim=1)  # 0 beyond the end, where the log-prob is 0
        columns = (ids.view(K, G, T), logprobs.view(K, G, T), torch.full((K, G), torch.nan))
        columns += tuple(column.view(K, G) for column in (energy, lengths, truncated))
        return rollout.Rollouts(prompt_ids, *(column.to(model.device) for column in columns))

    def load(self, model) -> None:
        """Send the weights of `model` and forget what was computed with others."""
        asleep = self.sleeps and self.llm.llm_engine.is_sleeping()
        if asleep:
            self.llm.wake_up(tags=["weights"])
        weights, dtype = model.state_dict(), getattr(torch, self.dtype)  # a tied head is in it, under its own name
        vocabulary = [
            module.weight.data_ptr() for module in (model.get_input_embeddings(), model.get_output_embeddings())
        ]
        weights = (
            (name, (tensor[: self.vocab_size] if tensor.data_ptr() in vocabulary else tensor).to(dtype))
            for name, tensor in weights.items()
        )
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Before the process group goes, in which vLLM has its own; outside of torchrun it made even that."""
        self.llm.llm_engine.engine_core.shutdown()
        if dist.is_initialized() and "RANK" not in os.environ:
            dist.destroy_process_group()

    def check(self, model, prompt_ids, sampling: rollout.Sampling, logprobs_of) -> None:
        """InputError unless vLLM's log-probs are those of the trainer, for the weights as they are and for moved ones
        after the same prompts. `logprobs_of(rollouts)` are the trainer's, [K, G, T]. Leaves the weights unchanged."""
        sampling = dataclasses.replace(sampling, max_new_tokens=4, show_progress=False)
        for moved in (False, True):
            with moved_weights(model) if moved else contextlib.nullcontext():
                rollouts = rollout.sample(model, prompt_ids, sampling, group_size=2, seed=0)
                ours = logprobs_of(rollouts)
            tokens = rollouts.lengths.sum().item()
            gap, bound = (ours - rollouts.logprobs).abs().sum().item() / tokens, MAX_GAP[self.dtype]
            if moved:
                bound = MAX_MOVED_GAP * (ours - logprobs_of(rollouts)).abs().sum().item() / tokens
            if not gap <= bound:
                raise InputError(
                    f"--engine vllm: its log-probs are {gap:.2g} nats a token from the trainer's "
                    f"{'after the weights were changed and sent' if moved else 'for the same weights'}, more than "
                    f"{bound:.2g} ({self.dtype}): it samples another policy. Use --engine compact"
                )


@contextlib.contextmanager
def moved_weights(model):
    """Noise as large as the weights themselves on every one of them; as they were after."""
    kept = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            share = VOCABULARY_NOISE if len(parameter) == model.config.vocab_size else NOISE
            parameter.add_(share * parameter.square().mean().sqrt() * noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), kept, strict=True):
                parameter.copy_(old)
