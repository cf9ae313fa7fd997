"""The device that a run executes on: one CPU with gloo or one CUDA device with NCCL. No other file uses torch.cuda."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""dtype -> its name as a value of --dtype."""

# Dense bf16 peak in TFLOP/s, from the vendors' datasheets. MFU is n/a on other devices.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "V100": 125.0}

MARK = "spin_kernel"
"""Name, in a profile, of the kernel that `Device.mark` starts."""


@dataclass(frozen=True)
class Device:
    """The device of this rank and everything that depends on its kind."""

    torch: torch.device
    backend: str

    @classmethod
    def choose(cls, kind: str = "auto", local_rank: int = 0, backend: str = "auto") -> Device:
        """Choose the device of a local rank. kind: auto, cpu or cuda.

        Errors: ValueError if `kind` is cuda and the node has fewer CUDA devices than local ranks.
        """
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if local_rank >= count:
                raise ValueError(
                    f"--device cuda: local rank {local_rank} needs {local_rank + 1} CUDA devices, this node has {count}"
                    " (valid: fewer local ranks, or --device cpu)"
                )
            # Tensors of many sizes fragment fixed segments, which wastes 3 GiB for Llama-2 7B.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            # NCCL would register each buffer of a captured graph with its peers as one segment. An expandable segment
            # consists of several segments, so context ranks would deadlock.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            # mega does not use NVLink multicast. torch would set it up for all symmetric memory, which some hosts
            # refuse.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            torch.cuda.set_device(local_rank)
            # torch warns once that autograd's own thread has no context, and then sets the context itself.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
            return cls(torch.device("cuda", local_rank), "nccl" if backend == "auto" else backend)
        return cls(torch.device("cpu"), "gloo" if backend == "auto" else backend)

    @property
    def threads(self) -> int | None:
        """Number of compute threads on a CPU, which determines the order of sums; None on a GPU."""
        return None if self.is_cuda else torch.get_num_threads()

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else "CPU"

    def library_versions(self) -> dict[str, str]:
        """Versions of the libraries that only GPUs use; empty on a CPU."""
        if not self.is_cuda:
            return {}
        versions = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError, StopIteration):
            words = Path("/proc/driver/nvidia/version").read_text().split()
            versions["the NVIDIA driver"] = next(word for word in words if word.count(".") >= 1 and word[0].isdigit())
        if self.backend == "nccl":
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return versions

    @property
    def peak_tflops(self) -> float | None:
        """Dense bf16 peak in TFLOP/s; None for a device that is not in PEAK_TFLOPS."""
        return next((peak for model, peak in PEAK_TFLOPS.items() if self.is_cuda and model in self.name), None)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def mark(self) -> None:
        """Start a kernel named MARK, which shows in a profile when all earlier work of the stream was done."""
        if self.is_cuda:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def memory_peak(self) -> int | None:
        """Peak of allocated bytes; None on a CPU (see `resident`)."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_cuda else None

    def reset_memory_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def resident(self) -> int:
        """Bytes that this rank holds: allocated memory on CUDA, resident memory on a CPU."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.torch)
        try:
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def room(self) -> int:
        """Bytes available to this process, including those that the process holds; on a CPU, the host's memory."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch)[0] + torch.cuda.memory_reserved(self.torch)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def release(self) -> None:
        """Release cached memory, so that the next large allocation finds contiguous memory."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def deterministic(self, only: bool = True) -> None:
        """Use only algorithms whose results are bitwise equal in every run; if `only` is False, allow all algorithms
        again."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _use_deterministic(only, compiler=self.is_cuda)
        if self.is_cuda:
            torch.backends.cudnn.deterministic = only
            torch.backends.cudnn.benchmark = False


def _deterministic_algorithms() -> tuple[bool, bool]:
    """Whether torch uses deterministic algorithms only, and whether it only warns about others."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _use_deterministic(only: bool, warn_only: bool = False, *, compiler: bool) -> None:
    """compiler: import torch's compiler, if it is not imported yet, so that it too measures nothing to choose kernels.
    It measures only on a GPU. The import takes seconds on each rank, and creates a folder in TMPDIR."""
    if compiler or "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(only, warn_only=warn_only)
    else:
        torch.set_deterministic_debug_mode(("warn" if warn_only else "error") if only else "default")


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """Restore the process-wide settings of torch, threads and deterministic algorithms, at the end of the block."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    deterministic = _deterministic_algorithms()
    cudnn_settings = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if _deterministic_algorithms() != deterministic:
            _use_deterministic(*deterministic, compiler=False)
        cudnn.deterministic, cudnn.benchmark = cudnn_settings


def current_stream(device: torch.device) -> int:
    """The address of this thread's current stream; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Timestamp:
    """The time at which a device completes all work submitted so far; on a CPU, the current time."""

    def __init__(self, device: torch.device):
        self._host, self._event = time.monotonic(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: Timestamp) -> float:
        """Seconds between two timestamps; waits for both."""
        if self._event is None or later._event is None:
            return later._host - self._host
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1e3


class Reading:
    """An asynchronous copy of named numbers to the host, which may submit more work before it reads the numbers.
    `float(tensor)` would instead copy after all work that was submitted later: the host would wait for that work, and
    the device would then wait for the host.
    """

    def __init__(self, values: Mapping[str, torch.Tensor]):
        self._names = tuple(values)
        stacked = torch.stack([value.detach().double() for value in values.values()])
        if stacked.is_cuda:
            stacked = torch.empty_like(stacked, device="cpu", pin_memory=True).copy_(stacked, non_blocking=True)
        self._stacked = stacked
        self.moment = Timestamp(next(iter(values.values())).device)

    def numbers(self) -> dict[str, float]:
        """Wait for the work submitted before this object was created, and return the numbers by name."""
        self.moment.wait()
        return dict(zip(self._names, self._stacked.tolist(), strict=True))


class HostArray:
    """An asynchronous copy of a tensor to the host, which may submit more work before it reads the copy."""

    def __init__(self, tensor: torch.Tensor):
        self._here = tensor
        if tensor.is_cuda:
            self._here = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        self._moment = Timestamp(tensor.device)

    def numpy(self) -> NDArray[Any]:
        """Wait for the work submitted before this object was created, and return the array."""
        self._moment.wait()
        return self._here.numpy()


class Upload:
    """An int64 tensor on a device; the host fills the tensor repeatedly without waiting.

    upload.array()[...] = ...       the buffer's old content is undefined
    upload.send()                   work submitted from here on reads the new content in `there`

    Two page-locked buffers alternate: the host fills one while the device may still read the other.
    """

    def __init__(self, size: int, device: torch.device):
        self.there = torch.zeros(size, dtype=torch.int64, device=device)
        cuda = device.type == "cuda"
        self._here = [torch.zeros(size, dtype=torch.int64, pin_memory=True) for _ in range(2)] if cuda else [self.there]
        self._sent: list[Timestamp | None] = [None, None]
        self._turn = 0

    def array(self) -> NDArray[np.int64]:
        self._turn = (self._turn + 1) % len(self._here)
        sent = self._sent[self._turn]
        if sent is not None:
            sent.wait()
        return self._here[self._turn].numpy()

    def send(self) -> None:
        if len(self._here) > 1:
            self.there.copy_(self._here[self._turn], non_blocking=True)
            self._sent[self._turn] = Timestamp(self.there.device)


def sent(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to a device from pinned memory, so that the host does not wait for earlier work of the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class _CaptureStream:
    """A stream on which only one `Recorder` captures graphs, until the recorder and all its graphs are deleted.

    A captured GEMM uses the cuBLAS workspace of its stream. New versions of torch free this workspace when any graph
    that was captured on the stream is deleted, and other graphs of the stream would then write to freed memory
    (pytorch/pytorch#193402). Streams are reused, because older versions keep the workspaces of all streams.
    """

    _unused: ClassVar[list[torch.cuda.Stream]] = []

    def __init__(self) -> None:
        unused = self._unused
        self.stream = unused.pop() if unused else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        weakref.finalize(self, unused.append, self.stream)


class Recording:
    """A CUDA graph of `work`, captured once and replayed with `play`.

    Nothing is computed during capture. A replay uses the addresses of the captured tensors; memory allocated during
    capture stays allocated. memory, captured_on: the memory pool and the stream of a `Recorder`; None for its own.
    """

    def __init__(self, work: Callable[[], None], memory: Any = None, captured_on: _CaptureStream | None = None):
        self._graph = torch.cuda.CUDAGraph()
        self._captured_on = captured_on or _CaptureStream()  # deleted after the graph
        failed: Exception | None = None
        try:
            # thread_local: NCCL's watchdog thread queries events during the capture.
            with torch.cuda.graph(
                self._graph, pool=memory, stream=self._captured_on.stream, capture_error_mode="thread_local"
            ):
                try:
                    work()
                except Exception as error:
                    failed = error
                    raise
        except RuntimeError:
            if failed is not None:
                raise failed from None  # the RuntimeError of the unfinished capture is only a consequence
            raise

    def play(self) -> None:
        self._graph.replay()


class Recorder:
    """Captures CUDA graphs that share a memory pool and a stream. The output of one graph must be used before another
    graph is replayed. No graph may be replayed after any of the recorder's graphs has been deleted."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._stream: _CaptureStream | None = None

    def __call__(self, work: Callable[[], None]) -> Recording:
        if self._stream is None:
            self._memory, self._stream = torch.cuda.graph_pool_handle(), _CaptureStream()
        return Recording(work, self._memory, self._stream)


class HostCopy:
    """Copies tensors to host memory while the device continues. Only one copy may be in progress, and its memory is
    reused.

    copy = HostCopy(device, size)
    views = copy.take(tensors)      # returns immediately, and does not stop the device
    copy.wait()                     # called by the reader of `views`, on another thread: copies, and waits
    copy.settle()                   # before the tensors change again: the device waits until they have been read

    On a CPU `take` copies before it returns, and the other calls return immediately. `size` is in bytes, and must hold
    all tensors, each rounded up to ALIGNMENT. The constructor allocates all memory, page-locked for a GPU.
    """

    ALIGNMENT = 64

    def __init__(self, device: Device, size: int, memory: torch.Tensor | None = None):
        """memory: uint8 [size], host memory to use instead of new memory; its content is kept until the first copy."""
        self._memory = torch.empty(size, dtype=torch.uint8) if memory is None else memory
        self._stream = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fetching = threading.Event()
        if device.is_cuda:
            page_locked(self._memory)
            self._stream = torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]
            self._now = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._fetching.set()
        elif memory is None:
            self._memory.fill_(0)  # so that the system maps the pages now, not during the first copy

    @classmethod
    def room(cls, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that `tensors` need in the copy."""
        return sum(-(-x.numel() * x.element_size() // cls.ALIGNMENT) * cls.ALIGNMENT for x in tensors)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies, valid until the next `take`; on a GPU they are filled by `wait`."""
        views, self._copies = self._placed(tensors)
        if self._stream is None:
            self._fetch()
        else:
            self._fetching.clear()
            self._now.record(torch.cuda.current_stream(self._stream.device))
        return views

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the copies that the last `take` made of these tensors."""
        return self._placed(tensors)[0]

    def _placed(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return a view of host memory for each tensor, and the copies that fill the views: (target, source)."""
        views, copies, offset = [], [], 0
        for run in _runs(tensors):
            counts, first = [x.numel() for x in run], run[0].detach()
            size = sum(counts) * first.element_size()
            target = self._memory[offset : offset + size].view(first.dtype)
            views += [part.view(x.shape) for part, x in zip(torch.split(target, counts), run, strict=True)]
            # The tensors of a run are contiguous in memory, so one flat view of the first covers all of them.
            source = first.as_strided(target.shape, (1,)) if len(run) > 1 else first
            copies.append((target.view(source.shape), source))
            offset += self.room([source])
        return views, copies

    def wait(self) -> None:
        """Copy the tensors of the last `take`, and wait until the host can read them. Call it once per `take`."""
        if self._stream is None:
            return
        # A new thread starts on device 0; its first call there would create a context, which stops all threads for
        # half a second.
        torch.cuda.set_device(self._stream.device)
        try:
            if any(not x.is_cuda for _, x in self._copies):
                self._now.synchronize()  # the host copies these tensors; the device may still be writing them
            self._stream.wait_event(self._now)
            with torch.cuda.stream(self._stream):
                self._fetch()
                self._done.record()
        finally:
            self._fetching.set()  # even after an error, so that `settle` does not wait forever
        self._done.synchronize()

    def _fetch(self) -> None:
        copies, self._copies = self._copies, []
        for target, source in copies:
            target.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Make work submitted from here on wait until the tensors have been read."""
        if self._stream is not None:
            self._fetching.wait()
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)


def _runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group consecutive tensors that are also contiguous in memory: each group is one copy.

    The copying thread competes with the training thread for Python's lock, and may wait milliseconds for each copy.

    >>> flat = torch.zeros(10)
    >>> [len(run) for run in _runs([flat[:2], flat[2:6], flat[7:], flat[6:7]])]
    [2, 1, 1]
    """
    runs: list[list[torch.Tensor]] = []
    end = None
    for x in tensors:
        begin = (x.untyped_storage().data_ptr(), x.dtype, x.storage_offset())
        if not (runs and begin == end and x.is_contiguous()):
            runs.append([])
        runs[-1].append(x)
        end = (*begin[:2], begin[2] + x.numel()) if x.is_contiguous() else None
    return runs


def page_locked(memory: torch.Tensor) -> torch.Tensor:
    """Page-lock host memory for its lifetime, so that a device can read and write it directly.

    The memory is registered, because torch rounds allocations of pinned memory up to a power of two. Errors: OSError if
    CUDA refuses.
    """
    begin, size = memory.data_ptr(), memory.nbytes
    if not size:
        return memory
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(begin, size, 0))
    if code:
        raise OSError(f"{size} bytes of host memory could not be page-locked (CUDA error {code})")
    weakref.finalize(memory, runtime.cudaHostUnregister, begin)
    return memory


class CopyDescriptor(NamedTuple):
    """The destinations of the parts of a tensor."""

    pieces: tuple[tuple[int, int, int], ...]
    """The tuple (first byte in the tensor, target address, bytes) for each part."""
    marks: tuple[int, ...]
    """Addresses of the words that are written after all parts."""


class CopyStream:
    """Copies that overlap with the kernels of a CUDA device, and marks, which are words in its memory that streams
    write and wait for.

    Copy engines do the copies and streams handle the marks, so neither takes multiprocessors from a GEMM. The driver
    is called through ctypes, with many marks per call: a layer needs dozens of marks, and the host must submit them
    while the device computes the layer's GEMMs.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, x: torch.Tensor, ways: Sequence[CopyDescriptor], value: int) -> None:
        """Copy pieces of the contiguous `x` after the work of the current stream, then write `value` to the marks.

        The caller keeps `x` alive and unchanged until the copy has ended.
        """
        self._ready.record()
        self._stream.wait_event(self._ready)
        stream, begin, copy = self._stream.cuda_stream, x.data_ptr(), _driver().cuMemcpyAsync
        for way in ways:
            for first, target, size in way.pieces:
                _done("cuMemcpyAsync", copy(target, begin + first, size, stream))
            _on_marks(stream, _WRITE, way.marks, value)

    def wait(self, marks: tuple[int, ...], value: int) -> None:
        """Make the current stream wait until all `marks` hold at least `value` (modulo 2^32)."""
        _on_marks(torch.cuda.current_stream().cuda_stream, _WAIT, marks, value)

    def join(self) -> None:
        """Make the current stream wait for all copies."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def settle(self) -> None:
        """Wait until all work of the device is done."""
        torch.cuda.synchronize()


class _MarkOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: one operation of a stream on one word of memory."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 2),
    )


_WAIT, _WRITE = 1, 2
"""Kinds of operations on 32-bit words; a wait without flags compares by "at least"."""


def _on_marks(stream: int, kind: int, marks: tuple[int, ...], value: int) -> None:
    if not marks:
        return
    operations = _operations(kind, marks)
    for operation in operations:
        operation.value = value % 2**32
    _done("cuStreamBatchMemOp", _driver().cuStreamBatchMemOp_v2(stream, len(marks), operations, 0))


@functools.lru_cache(maxsize=4096)
def _operations(kind: int, marks: tuple[int, ...]) -> ctypes.Array[_MarkOperation]:
    return (_MarkOperation * len(marks))(*[_MarkOperation(kind, mark) for mark in marks])


def _done(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    word = ctypes.c_uint64
    library.cuMemcpyAsync.argtypes = (word, word, ctypes.c_size_t, ctypes.c_void_p)
    library.cuStreamBatchMemOp_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    return library


def has_cuda() -> bool:
    """Whether this host has a CUDA device. No context is created."""
    return torch.cuda.is_available()


def multiprocessors(device: torch.device) -> int:
    """Return the number of programs of a persistent kernel that run in parallel; 1 on a CPU, where kernels are
    interpreted. The meta device returns the number for an H200."""
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def overlaps_kernels(device: torch.device) -> bool:
    """Whether a kernel may start while the previous one ends (programmatic dependent launch): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.0, whose tensor cores read shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def fp8_matmuls(device: torch.device) -> bool:
    """Whether the device supports fp8 matmuls: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def block_scaled_matmuls(device: torch.device) -> bool:
    """Whether cuBLAS supports fp8 matmuls with one scale per block on the device: on Hopper, since CUDA 12.9."""
    if device.type != "cuda" or torch.version.cuda is None or not hasattr(torch.nn.functional, "scaled_mm"):
        return False
    release = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == 9 and release >= (12, 9)
