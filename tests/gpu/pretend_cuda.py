"""
A pretend CUDA device, so that the code for GPUs runs without a GPU.

    pretend_cuda.install()
    torch.ones(2, device="cuda") + torch.ones(2)  # RuntimeError: ... tensors ... on the same device

A CPU build of PyTorch has everything of CUDA but its kernels. DLPack gives a tensor's memory the
name cuda:0, and a fallback takes every operator that reaches the CUDA key: it checks devices, and
runs the CPU kernel on the same memory. Everything above that is PyTorch's own code: autograd,
autocast, modules, optimizers, torch.save.

It cannot show times, waits, streams, races, CUDA's random numbers and rounding, NCCL,
torch.compile, or what real kernels lack.
"""

import ctypes
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

CPU, CUDA = 1, 2  # DLPack's numbers
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
FAR = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
_keep = []  # what ends with its Python object


# ------------------------------------------------------------------------- installation


def install() -> None:
    """Make this process believe that it has one CUDA device; there is no way back.

    Call it once, before anything asks for CUDA or runs a backward pass."""
    assert not torch.version.cuda, "the pretend device needs a CPU build of PyTorch"
    guard = type("Guard", (torch._C._acc.DeviceGuard,), {"type_": lambda _: _kind.CUDA})()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    folder = Path(torch.__file__).parent
    c10, native = (ctypes.CDLL(str(folder / f"lib/lib{name}.so")) for name in ("c10", "torch_cpu"))
    guards = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_kind.CUDA.value], guards[_kind.PrivateUse1.value] = guards[_kind.PrivateUse1.value], 0
    # The first virtual functions of CUDAHooksInterface are two destructors, isBuilt, isAvailable
    # and hasPrimaryContext. These three shall return 1, as Py_IsInitialized does.
    place = ctypes.c_void_p
    native._ZN2at6detail12getCUDAHooksEv.restype = place
    hooks = place.from_address(native._ZN2at6detail12getCUDAHooksEv())
    table = (place * 64)(*(place * 64).from_address(hooks.value))
    table[2:5] = [ctypes.cast(ctypes.pythonapi.Py_IsInitialized, place).value] * 3
    hooks.value = ctypes.addressof(table)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_fallback, "CUDA")
    for name, implementation in OWN.items():
        aten.impl(name, implementation, "CUDA")
    aten.impl("rms_norm", _rms_norm, "AutogradCUDA")
    _keep.extend([guard, everything, aten])
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))  # used until the process has ended

    answers = {
        "_lazy_init": None,
        "is_available": True,
        "is_bf16_supported": True,
        "get_device_name": "pretend CUDA",
        "manual_seed_all": None,  # the CPU's generator draws
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 2**20,
        "max_memory_allocated": 2**20,
        "memory_reserved": 2**20,
        "mem_get_info": (2**30, 2**31),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.Tensor.pin_memory = torch.Tensor.clone
    torch.storage._StorageBase.cpu = _storage_on_cpu
    deepcopy = torch.Tensor.__deepcopy__  # a CPU build makes no storage of another device
    torch.Tensor.__deepcopy__ = lambda own, memo: (
        own.detach().clone() if own.is_cuda else deepcopy(own, memo)
    )


_kind = torch._C._autograd.DeviceType
_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_capsule.restype, _capsule.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _moved(tensor, kind: int):
    """A tensor on that device that shares this one's memory."""
    capsule = torch._C._to_dlpack(tensor)
    ctypes.memset(_capsule(capsule, b"dltensor") + 8, kind, 1)  # DLTensor: its data, its device
    return torch._C._from_dlpack(capsule)


def _storage_on_cpu(storage):
    """For torch.save."""
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(bytearray(memory), dtype=torch.uint8).untyped_storage()


# ------------------------------------------------------------------------- operators


def _fallback(op, *args, **kwargs):
    """The CPU's kernel, on the same memory. Raises where CUDA's operator would: a tensor of the CPU
    may only be a number, or an index."""
    name = op._schema.name.removeprefix("aten::")
    if name in INDEXING:
        _check_index(name, *args)
    given = {}  # the tensor and its alias, by the alias's id

    def to_cpu(value):
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                alias = (
                    _moved(value, CPU) if value.numel() else torch.empty_like(value, device="cpu")
                )
                given[id(alias)] = value, alias
                return alias
            if value.dim() and name not in INDEXING:
                raise RuntimeError(f"{FAR}{value.device} ({name})")
        elif kind in (list, tuple):
            return [to_cpu(part) for part in value]
        elif kind is torch.Generator:
            raise RuntimeError(f"Expected a 'cuda' generator ({name})")
        return torch.device("cpu") if kind is torch.device else value

    def to_cuda(value):
        if isinstance(value, torch.Tensor):
            return given[id(value)][0] if id(value) in given else _moved(value, CUDA)
        return [to_cuda(part) for part in value] if type(value) is list else value

    # A number comes as a Python number, which remainder.Tensor_out refuses.
    kernel = op.overloadpacket if name == "remainder" else op
    found = kernel(*map(to_cpu, args), **{key: to_cpu(value) for key, value in kwargs.items()})
    for tensor, alias in given.values():
        if tensor.shape != alias.shape:  # the kernel resized it
            tensor.data = _moved(alias, CUDA)
    if op.is_view:
        start = args[0].untyped_storage().data_ptr()
        offset = (found.data_ptr() - start) // found.itemsize if found.numel() else 0
        return _as_strided(args[0], found.shape, found.stride(), offset)
    return tuple(map(to_cuda, found)) if type(found) is tuple else to_cuda(found)


def _check_index(name, tensor, indices, values=None, *_) -> None:
    if values is not None and values.is_cuda != tensor.is_cuda and values.dim():
        raise RuntimeError(f"{FAR}cpu ({name})")
    for index in filter(torch.is_tensor, indices):
        if index.is_cuda and not tensor.is_cuda:
            raise RuntimeError("indices should be on cpu or on the same device as the tensor (cpu)")


def _copy_(to, source, non_blocking=False):
    to_cpu = lambda tensor: _moved(tensor, CPU) if tensor.is_cuda else tensor
    to_cpu(to).copy_(to_cpu(source))
    return to


def _as_strided(tensor, size, stride, offset=None):
    return tensor.detach().as_strided_(size, stride, offset)


def _empty(size, dtype=None, device=None, memory_format=None, **_):
    return _moved(torch.empty(size, dtype=dtype, memory_format=memory_format), CUDA)


def _empty_strided(size, stride, dtype=None, **_):
    return _moved(torch.empty_strided(size, stride, dtype=dtype), CUDA)


def _rms_norm(x, shape, weight=None, eps=None):
    wide = x.float()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (1.0 if weight is None else weight)).to(x.dtype)


OWN = {
    "copy_": _copy_, "as_strided": _as_strided, "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
}  # fmt: skip


# ------------------------------------------------------------------------- attention


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
    enable_gqa=False,
):  # fmt: skip
    """Stand-in of torch.nn.attention.varlen.varlen_attn, in float32. A segment's last query sees
    all of its keys, the one before it all but one, and so on. Raises where the kernels would refuse
    their arguments, or read out of bounds."""
    assert enable_gqa
    assert tuple(window_size) == (-1, 0), "causal"
    for t in (query, key, value):
        if t.dtype != torch.bfloat16 or t.dim() != 3 or t.shape[-1] % 8 or t.stride(-1) != 1:
            raise RuntimeError(f"flash attention has no {t.dtype} {tuple(t.shape)} {t.stride()}")
    sizes = []
    for cu, t, longest in ((cu_seq_q, query, max_q), (cu_seq_k, key, max_k)):
        bounds = _moved(cu, CPU).tolist()
        sizes.append([end - start for start, end in itertools.pairwise(bounds)])
        fits = bounds[0] == 0 and bounds[-1] == len(t) and min(sizes[-1]) >= 0
        if cu.dtype != torch.int32 or not fits or not max(sizes[-1]) <= longest:
            raise RuntimeError(f"cu_seqlens {cu.dtype} {bounds}: {len(t)} tokens, {longest}")
    out, (query_sizes, key_sizes) = [], sizes
    segments = query.split(query_sizes), key.split(key_sizes), value.split(key_sizes)
    for segment in zip(*segments, strict=True):
        q, k, v = (t.float().transpose(0, 1) for t in segment)  # [heads, tokens, D]
        shape = q.shape[1], k.shape[1]
        seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
        with torch.autocast("cuda", enabled=False):
            attended = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        out.append(attended.transpose(0, 1))
    return torch.cat(out).to(query.dtype)
