"""
A pretend CUDA device, so that the code for GPUs runs, and its waits are counted, without a GPU.

    pretend_cuda.install()
    torch.ones(2, device="cuda") + torch.ones(2)  # RuntimeError: ... tensors ... on the same device
    with pretend_cuda.counting() as seen:
        ...
    print(seen)  # a Counter

A CPU build of PyTorch has everything of CUDA but its kernels. pretend_cuda.cpp adds a device guard,
an allocator whose memory says cuda:0, and a fallback for every operator that reaches the CUDA key:
it checks devices as CUDA's own operator would, counts, and runs the CPU kernel on the same memory.
Everything above that is PyTorch's own code: autograd, autocast, modules, optimizers, torch.save.

torch.cuda.graph keeps the operators of a capture and takes back what they wrote; a replay runs them
again, on the same memory, with the numbers that they had. What waits is refused in a capture.

What is counted, by kind and operator:

    d2h      copies to the CPU and .item(): the host waits for all that was queued
    h2d      blocking copies from pageable memory: the host waits too
    copy     copies with non_blocking=True that do not wait (to the CPU: into pinned memory)
    hidden   operators whose CUDA kernel reads a size or a flag back: nonzero, x[mask], equal, ...
    sync     torch.cuda.synchronize()

It cannot show times, streams, races, CUDA's random numbers and rounding, NCCL, torch.compile, or
what real kernels lack. A NotImplementedError that names the 'CUDA' backend, and "DispatchStub:
missing CUDA kernel", are faults of this file.
"""

import collections
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_suffix(".cpp")
TORCH = Path(torch.__file__).parent
WAITS = ("d2h", "h2d", "hidden", "sync")

# ------------------------------------------------------------------------- counting


_active = []  # a Counter for each `with counting()` that is open
_capturing = []  # the torch.cuda.graph that is open
_quiet = threading.local()
_aten = torch.library.Library("aten", "IMPL")  # what it implements ends with this object


@contextlib.contextmanager
def counting():
    """Count what happens inside: a Counter of (kind, operator)."""
    seen = collections.Counter()
    _active.append(seen)
    try:
        yield seen
    finally:
        _active.pop()


def total(seen, *kinds: str) -> int:
    return sum(count for (kind, _op), count in seen.items() if kind in kinds)


@contextlib.contextmanager
def _silence():
    before, _quiet.on = getattr(_quiet, "on", False), True
    try:
        yield
    finally:
        _quiet.on = before


def _note(kind: str, op: str) -> None:
    if _capturing and kind in (*WAITS, "copy"):
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({op})")
    if not getattr(_quiet, "on", False):
        for seen in _active:
            seen[kind, op] += 1


# ------------------------------------------------------------------------- installation

SYNCS = {  # operators whose CUDA implementation reads something back, and how often
    "_local_scalar_dense": 1, "nonzero": 1, "masked_select": 1, "equal": 1, "bincount": 2,
    "_unique2": 1, "unique_dim": 1, "unique_consecutive": 1, "unique_dim_consecutive": 1,
    "repeat_interleave.Tensor": 1, "histc": 1, "_linalg_check_errors": 1,
}  # fmt: skip
INDEXING = {"index.Tensor", "index.Tensor_out", "_index_put_impl_", "index_put_", "index_put"}
MOVING = {"copy_", "resize_", "set_", "set_.source_Tensor", "record_stream", "is_set_to"}


def unavailable() -> str | None:
    """Why this machine can have no pretend device, or None."""
    if torch.version.cuda or torch.version.hip:
        return "this PyTorch is built for GPUs; the pretend device needs a CPU build"
    if not sys.platform.startswith("linux"):
        return "the pretend device needs Linux"
    return None if shutil.which("g++") else "the pretend device needs g++"


def install() -> None:
    """Make this process believe that it has one CUDA device; there is no way back.

    Call it once, before anything asks for CUDA or runs a backward pass."""
    _patch_torch_cuda()
    # The CPU kernels' results are aliases, which PyTorch refuses to make of inference tensors.
    torch.inference_mode = lambda on=True: torch.no_grad() if on else contextlib.nullcontext()
    if not _native().start(_note, *_operators()):
        raise RuntimeError("this PyTorch does not take the hooks of the pretend device")
    _implement_norm()


def _operators():
    """({operator: (check, syncs)}, names of operators whose kernel for CUDA replaces a
    composite one). The numbers of checks are those of pretend_cuda.cpp."""
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table, kernels = {}, []
    for function in yaml.load(path.read_text(), loader):
        name = function["func"].split("(")[0]
        keys = [key for keys in function.get("dispatch", {}) for key in keys.split(", ")]
        generated = "CUDA" in keys or "structured_delegate" in function
        exact, iterator, index, anything = range(4)
        check = exact if generated and function.get("device_check") != "NoCheck" else iterator
        if name in INDEXING:
            check = index
        if name in MOVING or name.startswith("_foreach"):
            check = anything
        table[f"aten::{name}"] = (check, SYNCS.get(name, 0))
        composite = any(key.startswith("Composite") for key in keys)
        if "CUDA" in keys and composite and name != "_fused_rms_norm":
            kernels.append(name)
    return table, kernels


@functools.cache
def _native():
    """The compiled part. It takes half a minute, once for each version of it and of PyTorch; other
    processes wait for the one that compiles."""
    recipe = SOURCE.read_text() + torch.__version__ + sys.version
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"pretend-cuda-{key}"
    library = folder / f"pretend_cuda_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = folder / f"{os.getpid()}.so"
            _compile(unfinished)
            unfinished.rename(library)
    spec = importlib.util.spec_from_file_location("pretend_cuda_native", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(library: Path) -> None:
    headers = [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    headers += [sysconfig.get_paths()["include"]]
    command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", str(SOURCE)]
    command += [f"-isystem{path}" for path in headers]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    subprocess.run([*command, "-o", str(library)], check=True)


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    answers = {
        "_lazy_init": None,
        "is_available": True,
        "device_count": 1,
        "get_device_name": "pretend CUDA",
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "empty_cache": None,
        "manual_seed_all": None,  # the CPU's generator draws
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.synchronize = lambda device=None: _note("sync", "torch.cuda.synchronize")
    cuda.reset_peak_memory_stats = lambda device=None: _native().reset_peak()
    cuda.memory_allocated = lambda device=None: _native().allocated()
    cuda.max_memory_allocated = lambda device=None: _native().peak()
    cuda.memory_reserved = lambda device=None: _native().allocated()
    cuda.mem_get_info = lambda device=None: (2**30, 2**31)
    cuda.device = type("device", (contextlib.nullcontext,), {})
    cuda.CUDAGraph, cuda.graph = _Graph, _Capture

    # Storages are made by the name of their device, which a CPU build does not know.
    storage = torch.storage
    to, clone = storage._to, storage._StorageBase.clone
    on_cuda = lambda some: torch.device(getattr(some, "device", some)).type == "cuda"
    whole = lambda own: torch.empty(0, dtype=torch.uint8, device=own.device).set_(own)
    storage._to = lambda own, device, non_blocking=False: (
        whole(own).to(device).untyped_storage()
        if on_cuda(device) and not on_cuda(own)
        else to(own, device, non_blocking)
    )
    storage._StorageBase.clone = lambda own: (
        whole(own).clone().untyped_storage() if on_cuda(own) else clone(own)
    )


# ------------------------------------------------------------------------- graphs


class _Graph:
    def __init__(self):
        self.calls = []

    def pool(self):
        return "a pool"

    def replay(self):
        for call, args, kwargs, out in self.calls:
            found = call(*args, **kwargs)
            with _silence():
                for to, new in zip(_tensors(out), _tensors(found), strict=True):
                    if to.data_ptr() != new.data_ptr():
                        to.copy_(new)


class _Capture(TorchDispatchMode):
    """Operators are computed, as the next ones need shapes, but what they wrote is taken back."""

    def __init__(self, graph, pool=None, *, capture_error_mode="global"):
        super().__init__()
        self.graph, self.before = graph, {}

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(call._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                memory = _native().alias(value).untyped_storage()
                self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        out = call(*args, **kwargs)
        if not any(one.alias_info and not one.alias_info.is_write for one in call._schema.returns):
            self.graph.calls.append((call, args, kwargs, out))  # all but views
        return out

    def __enter__(self):
        _capturing.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _capturing.pop()
        for memory, before in self.before.values():
            memory.copy_(before)


def _tensors(values):
    return [value for value in tree_leaves(values) if torch.is_tensor(value)]


# ------------------------------------------------------------------------- RMSNorm


def _implement_norm() -> None:
    """rms_norm's fused forward and backward, of which the CPU has none."""
    wide = lambda *tensors: [_native().alias(t).float() for t in tensors]

    def forward(x, shape, weight, eps):
        _same_device(x, weight)
        with _silence():
            (own,) = wide(x)
            scale = 1.0 if weight is None else wide(weight)[0]
            rstd = (own.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
            return _native().wrap((own * rstd * scale).to(x.dtype)), _native().wrap(rstd)

    def backward(grad, x, shape, rstd, weight, mask):
        _same_device(grad, x, rstd, weight)
        with _silence():
            grad, own, rstd, scale = wide(grad, x, rstd, weight)
            unit = own * rstd
            scaled = grad * scale
            of_x = rstd * (scaled - unit * (scaled * unit).mean(dim=-1, keepdim=True))
            of_weight = (grad * unit).flatten(0, -2).sum(dim=0)
            return _native().wrap(of_x.to(x.dtype)), _native().wrap(of_weight.to(weight.dtype))

    _aten.impl("_fused_rms_norm", forward, "CUDA")
    _aten.impl("_fused_rms_norm_backward", backward, "CUDA")


# ------------------------------------------------------------------------- attention


def _attend(query, key, value, bias, scale):
    """Attention of query [..., H, n, D] to key, value [..., H_kv, m, D], in float32."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (t.float().repeat_interleave(groups, dim=-3) for t in (key, value))
    scores = query.float() @ key.mT * scale + bias
    return scores.softmax(dim=-1) @ value


def _same_device(*tensors) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_cuda:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and {tensor.device}"
            )


def _varlen(query, key, value, cu_q, cu_k, scale):
    """Segment by segment: [tokens, heads, D], where the last query of a segment sees all keys."""
    queries, keys = (_native().alias(cu).diff().tolist() for cu in (cu_q, cu_k))
    outs = []
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    with torch.autocast("cuda", enabled=False):
        for part in parts:
            q, k, v = (t.transpose(0, 1) for t in part)  # [H, n, D]
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            seen = seen.tril(k.shape[1] - q.shape[1])
            bias = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)
            outs.append(_attend(q, k, v, bias, scale).transpose(0, 1))
    return torch.cat(outs).to(query.dtype)


def _check_varlen(query, key, value, cu_q, cu_k, max_q, max_k):
    """Raise where the kernels would refuse their arguments, or read out of bounds."""
    _same_device(query, key, value, cu_q, cu_k)
    for t in (query, key, value):
        if t.dtype not in (torch.bfloat16, torch.float16) or t.dtype != query.dtype:
            raise RuntimeError(f"flash attention needs one dtype of 16 bits, not {t.dtype}")
        if t.dim() != 3 or t.shape[-1] % 8 or t.shape[-1] > 256 or t.stride(-1) != 1:
            raise RuntimeError(f"{tuple(t.shape)}, strides {t.stride()}: not [tokens, heads, D]")
    for cu, t, longest in ((cu_q, query, max_q), (cu_k, key, max_k)):
        if cu.dtype != torch.int32 or not cu.is_contiguous() or len(cu) != len(cu_q):
            raise RuntimeError(f"cu_seqlens must be contiguous and int32, not {cu.dtype}")
        if not isinstance(longest, int):
            raise TypeError(f"max_seqlen must be an int, not {type(longest)}")
        bounds = _native().alias(cu)
        sizes = bounds.diff()
        if bounds[0] != 0 or bounds[-1] != len(t) or sizes.min() < 0 or sizes.max() > longest:
            raise ValueError(f"cu_seqlens {bounds.tolist()}: {len(t)} tokens, longest {longest}")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("the number of key-value heads must divide the number of heads")


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False,
):  # fmt: skip
    """Stand-in with flash-attn 2's signature; causal is bottom right."""
    _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert causal
    assert not dropout_p
    return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale or q.shape[-1] ** -0.5)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None,
):  # fmt: skip
    """Stand-in of torch.nn.attention.varlen.varlen_attn; window_size (-1, 0) is causal. With
    seqused_k there is one query in each sequence."""
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("query and key have different numbers of heads: enable_gqa")
    scale = scale or query.shape[-1] ** -0.5
    if seqused_k is not None:
        assert max_q == 1
        return _with_cache(query, key, value, cu_seq_q, cu_seq_k, seqused_k, max_k, scale)
    _check_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    assert tuple(window_size) == (-1, 0)
    return _varlen(query, key, value, cu_seq_q, cu_seq_k, scale)


@torch.library.custom_op("pretend::varlen_with_cache", mutates_args=())
def _with_cache(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor,
    cu_k: torch.Tensor, used: torch.Tensor, columns: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """One operator, so that a graph holds it as one."""
    with _silence():
        _check_varlen(query, key, value, cu_q, cu_k, 1, columns)
        _same_device(query, used)
        used = _native().alias(used)
        if used.dtype != torch.int32 or used.shape != (len(query),) or used.max() > columns:
            raise ValueError(f"seqused_k {used}: {len(query)} sequences of {columns} tokens")
        query, key, value = (_native().alias(t) for t in (query, key, value))
        key, value = (t.unflatten(0, (-1, columns)).transpose(1, 2) for t in (key, value))
        hidden = torch.arange(columns) >= used[:, None]
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]
        out = _attend(query[:, :, None], key, value, bias, scale)[:, :, 0]
        return _native().wrap(out.to(query.dtype))
