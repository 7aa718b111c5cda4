"""Compile `kernels.c` once a machine, load it, and say when it may be used."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.files import cache_dir, fsync_path, sha256

SOURCE = Path(__file__).with_name("kernels.c")
# Most first. The last needs nothing of the compiler but its vectors.
FLAGS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-march=native"], ["-mcpu=native"], [])
ALWAYS = ["-O3", "-std=gnu11", "-fno-math-errno", "-shared", "-fPIC"]
POINTERS, SIZES = ctypes.POINTER(c_void_p), ctypes.POINTER(c_int64)
_TYPES = (Tensor, nn.Parameter)
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "width": (c_int, []),
    "parallel": (c_int, []),
    "gelu_forward": (None, [c_void_p, c_void_p, c_int64, c_int]),
    "gelu_backward": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int]),
    "attention_forward": (None, [c_void_p] * 3 + [c_int] * 5),
    "attention_backward": (None, [c_void_p] * 5 + [c_int] * 5),
    "use_sgemm": (None, [c_void_p]),
    "block_keeps": (c_int64, [c_int, c_int, c_int64, c_int64, c_int64, c_int, c_int]),
    "block_room": (c_int64, [c_int, c_int, c_int64, c_int64, c_int]),
    "block_forward": (None, [c_void_p, POINTERS, c_void_p, c_void_p] + [c_int] * 5 + [c_float] * 2 + [c_int] * 2),
    "block_backward": (None, [c_void_p] * 2 + [POINTERS] + [c_void_p] * 3 + [POINTERS] + [c_int] * 6),
    "squares": (c_double, [c_int, SIZES] + [POINTERS] * 2 + [ctypes.POINTER(c_double)] * 2),
    "scale": (None, [c_int, SIZES, POINTERS, c_float]),
    "average": (None, [c_int, SIZES, POINTERS, POINTERS, c_float]),
    "adamw": (None, [c_int, SIZES] + [POINTERS] * 4 + [c_float] * 6),
}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernels, or None where there is no compiler, where they are switched off, or where they are wrong."""
    if os.environ.get("SCALELONG_KERNELS", "1") == "0" or not SOURCE.is_file():
        return None
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        loaded = _load(_built(compiler))
        return loaded if _right(loaded) else None
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None


@lru_cache(maxsize=1)
def has_products() -> bool:
    """Whether the kernels were given the matrix product that torch itself has: MKL's, in its usual packages for x86."""
    loaded, found = library(), sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    if loaded is None or not found or not torch.backends.mkl.is_available():
        return False
    try:
        loaded.use_sgemm(ctypes.cast(ctypes.CDLL(str(found[0])).sgemm_, c_void_p))
    except (OSError, AttributeError):
        return False
    return _right_block(loaded)


def available() -> bool:
    """Whether the kernels can be used on this machine; compiles them where that was not done."""
    return library() is not None


def usable(*tensors: Tensor) -> bool:
    """Whether kernels may work on these: plain float32 on the CPU that nothing but autograd watches."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # other types: a fake tensor, one inside vmap, a tracer's
        if type(x) not in _TYPES or not x.is_cpu or x.dtype is not torch.float32 or not x.is_contiguous():
            return False
    if (
        torch._C._are_functorch_transforms_active()
        or (torch._C._len_torch_dispatch_stack() and _operators_are_watched())
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return False
    loaded = library()
    return loaded is not None and (torch.get_num_threads() == 1 or bool(loaded.parallel()))


def _operators_are_watched() -> bool:
    """A counter of FLOP, for example, sees operators only; one of memory sees what kernels ask for as well."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return not all(getattr(mode, "watches_memory_only", False) for mode in modes)


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])


def sizes(tensors: Sequence[Tensor]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tensors))(*[tensor.numel() for tensor in tensors])


def _built(compiler: str) -> Path:
    """The compiled file, from the cache where this source was compiled for this processor."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{compiler} {FLAGS} {ALWAYS} {_processor()}".encode()).hexdigest()
    folder = _place()
    for found in sorted(folder.glob(f"{key[:16]}-*.so")):
        if _is_ours(found) and found.stem.endswith(sha256(found)[:16]):  # half a library would end the process
            return found
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / "kernels.so"
        for flags in FLAGS:
            command = [compiler, *ALWAYS, *flags, "-o", str(made), str(SOURCE), "-lm"]
            if subprocess.run(command, capture_output=True, timeout=120).returncode == 0:
                break
        else:
            raise OSError("kernels.c does not compile here")
        target = folder / f"{key[:16]}-{sha256(made)[:16]}.so"
        os.chmod(made, 0o600)
        fsync_path(made)
        os.replace(made, target)  # at once: others may be looking
    return target


def _place() -> Path:
    """The cache, or a folder of this process where others may write to the cache: what lies there would be run."""
    folder = cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        folder = Path(tempfile.mkdtemp(prefix="scalelong-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have written it."""
    status = path.stat()
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _processor() -> str:
    """What `-march=native` depends on; a cache folder may be shared between machines."""
    described = Path("/proc/cpuinfo")
    if described.is_file():
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
        chosen = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
        return "\n".join(sorted(set(chosen)))
    return f"{platform.platform()} {platform.processor()}"


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _ramp(low: float, high: float, n: int) -> Tensor:
    """Numbers to try the kernels with, whatever the caller's defaults are."""
    return torch.linspace(low, high, n, dtype=torch.float32, device="cpu")


def _right(loaded: ctypes.CDLL) -> bool:
    """GELU and attention of a few numbers beside torch's, so that a compiler's mistake stays without effect."""
    width, L = loaded.width(), 11
    x = 3.0 * _ramp(-9.0, 9.0, 3 * L * width).cos()
    y, z, ones = torch.empty_like(x), torch.empty_like(x), torch.ones_like(x)
    loaded.gelu_forward(x.data_ptr(), y.data_ptr(), x.numel(), 1)
    loaded.gelu_backward(ones.data_ptr(), x.data_ptr(), z.data_ptr(), x.numel(), 1)
    out, logs, back = x.new_empty(L * width), x.new_empty(L), torch.empty_like(x)
    g = _ramp(-1.0, 2.0, L * width)
    loaded.attention_forward(x.data_ptr(), out.data_ptr(), logs.data_ptr(), 1, L, 1, width, 1)
    loaded.attention_backward(
        g.data_ptr(), x.data_ptr(), out.data_ptr(), logs.data_ptr(), back.data_ptr(), 1, L, 1, width, 1
    )
    with torch.enable_grad():
        exact = x.double().requires_grad_()
        expected = F.gelu(exact)
        (slope,) = torch.autograd.grad(expected.sum(), exact)
        q, k, v = exact.view(L, 3, width).unbind(1)
        attended = (q @ k.T / width**0.5).softmax(-1) @ v
        (pulled,) = torch.autograd.grad(attended, exact, g.double().view(L, width))
    pairs = [(y, expected), (z, slope), (out, attended.flatten()), (back, pulled)]
    return all(torch.allclose(mine, theirs.detach().float(), rtol=1e-4, atol=1e-5) for mine, theirs in pairs)


def _right_block(loaded: ctypes.CDLL) -> bool:
    """A block of few numbers, forwards, beside the formula in float64."""
    L, D, hidden = 3, loaded.width(), 5
    shapes = [(D,), (D,), (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (hidden, D), (hidden,), (D, hidden), (D,)]
    given = [_ramp(-1.0, 1.0 + k, math.prod(shape)).sin().view(shape) for k, shape in enumerate(shapes)]
    x = _ramp(-3.0, 5.0, L * D).cos().view(L, D)
    kept, z = x.new_empty(loaded.block_keeps(1, L, D, hidden, 1, 0, 1)), torch.empty_like(x)
    places = x.data_ptr(), pointers(given), kept.data_ptr(), z.data_ptr()
    loaded.block_forward(*places, 1, L, D, hidden, 1, 1e-5, 1e-5, 0, 1)
    n1w, n1b, qkvw, qkvb, projw, projb, n2w, n2b, fc1w, fc1b, fc2w, fc2b = (p.double() for p in given)
    layer_norm, linear, gelu = F.layer_norm, F.linear, F.gelu
    q, k, v = linear(layer_norm(x.double(), (D,), n1w, n1b), qkvw, qkvb).view(L, 3, D).unbind(1)
    y = x + linear((q @ k.T / D**0.5).softmax(-1) @ v, projw, projb)
    expected = y + linear(gelu(linear(layer_norm(y, (D,), n2w, n2b), fc1w, fc1b)), fc2w, fc2b)
    return torch.allclose(z, expected.float(), rtol=1e-4, atol=1e-4)
