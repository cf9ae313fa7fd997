"""The device that a run executes on: one CPU with gloo or one CUDA device with NCCL. The only file with torch.cuda."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Dense bf16 peak of the devices we know, TFLOP/s (vendors' datasheets); MFU is n/a on others.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "V100": 125.0}

MARK = "spin_kernel"
"""What a profile calls the kernel that `Device.mark` starts."""


@dataclass(frozen=True)
class Device:
    """The device of this rank and everything that depends on its kind."""

    torch: torch.device
    backend: str

    @classmethod
    def choose(cls, kind: str = "auto", local_rank: int = 0, backend: str = "auto") -> Device:
        """`kind` is auto, cpu or cuda; a CUDA device is the local rank's.

        Errors: ValueError if cuda is asked for and absent, or the node has fewer devices than local ranks.
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
            # Tensors of many sizes would leave holes in fixed segments: 3 GiB of them for Llama-2 7B.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            # What a recorded graph sends, NCCL would map into its peers as one piece; such segments are several, and
            # context ranks would wait for each other for ever.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            # Nothing of ours uses NVLink multicast, which torch would set up for all memory that ranks map, and which
            # some hosts refuse.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            torch.cuda.set_device(local_rank)
            # torch says so once, of autograd's own thread, and sets the context itself.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
            return cls(torch.device("cuda", local_rank), "nccl" if backend == "auto" else backend)
        return cls(torch.device("cpu"), "gloo" if backend == "auto" else backend)

    @property
    def threads(self) -> int | None:
        """That compute on a CPU, and so decide the order of its sums; None on a GPU."""
        return None if self.is_cuda else torch.get_num_threads()

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else "CPU"

    def library_versions(self) -> dict[str, str]:
        """Of what only GPUs have."""
        if not self.is_cuda:
            return {}
        found = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError, StopIteration):
            words = Path("/proc/driver/nvidia/version").read_text().split()
            found["the NVIDIA driver"] = next(word for word in words if word.count(".") >= 1 and word[0].isdigit())
        if self.backend == "nccl":
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return found

    @property
    def peak_tflops(self) -> float | None:
        """Dense bf16 peak, or None where the device is not known."""
        return next((peak for model, peak in PEAK_TFLOPS.items() if self.is_cuda and model in self.name), None)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def mark(self) -> None:
        """A kernel named MARK, by which a profile shows when all that was asked for before was done."""
        if self.is_cuda:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def memory_peak(self) -> int | None:
        """Most bytes allocated so far, or None on a CPU (see `resident`)."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_cuda else None

    def reset_memory_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def resident(self) -> int:
        """Bytes this rank holds: allocated on CUDA, resident on a CPU."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.torch)
        try:
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def room(self) -> int:
        """Bytes that can be had on this device, what we hold included; on a CPU the host's memory."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch)[0] + torch.cuda.memory_reserved(self.torch)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def release(self) -> None:
        """Give cached memory back, so that what comes next finds one whole piece."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def deterministic(self, only: bool = True) -> None:
        """Only algorithms that give the same bits on every run, from here on; or again all of them."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(only)
        if self.is_cuda:
            torch.backends.cudnn.deterministic = only
            torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """What a run sets for its whole process, threads and deterministic algorithms, is afterwards as it was."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    only, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    of_cudnn = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(only, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = of_cudnn


def current_stream(device: torch.device) -> int:
    """The address of the stream to which this thread gives work; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Timestamp:
    """When a device has done all that it had been asked for so far; on a CPU, now."""

    def __init__(self, device: torch.device):
        self._host, self._event = time.monotonic(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: Timestamp) -> float:
        """Waits for both."""
        if self._event is None or later._event is None:
            return later._host - self._host
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1e3


class Reading:
    """Named numbers of a device on their way to the host, which may give the device more work before it reads them.

    A number that is read as it stands (`float`) is copied after everything that the device was given since: the host
    waits for all of that, and then the device for the host.
    """

    def __init__(self, values: Mapping[str, torch.Tensor]):
        self._names = tuple(values)
        there = torch.stack([value.detach().double() for value in values.values()])
        if there.is_cuda:
            there = torch.empty_like(there, device="cpu", pin_memory=True).copy_(there, non_blocking=True)
        self._there = there
        self.moment = Timestamp(next(iter(values.values())).device)

    def numbers(self) -> dict[str, float]:
        """Waits until the device is as far as it had been asked to go when this was made."""
        self.moment.wait()
        return dict(zip(self._names, self._there.tolist(), strict=True))


class HostArray:
    """A tensor of a device on its way to the host, which may give the device more work before it reads it."""

    def __init__(self, there: torch.Tensor):
        self._here = there
        if there.is_cuda:
            self._here = torch.empty_like(there, device="cpu", pin_memory=True).copy_(there, non_blocking=True)
        self._moment = Timestamp(there.device)

    def numpy(self) -> NDArray[Any]:
        """Waits until the device is as far as it had been asked to go when this was made."""
        self._moment.wait()
        return self._here.numpy()


class Upload:
    """A tensor of whole numbers on a device that the host fills again and again, and does not wait for.

    upload.array()[...] = ...       what was sent before is not in it any more
    upload.send()                   work that the device is given from here on finds it in `there`

    Two pieces of page-locked memory take turns: one is filled while the device may still read the other.
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
    """The array on a device, which the host does not wait for: it would wait for all work before."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


class Recording:
    """Work of a CUDA device as one graph: written down while `work` asks for it, done whenever it is played.

    Nothing is computed while it is recorded. What it reads and writes lies where it lay then; what it allocates stays.
    memory: of a `Recorder`.
    """

    def __init__(self, work: Callable[[], None], memory: Any = None):
        self._graph = torch.cuda.CUDAGraph()
        failed: Exception | None = None
        try:
            # Other threads keep querying the device about work of their own: NCCL's watchdog.
            with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
                try:
                    work()
                except Exception as error:
                    failed = error
                    raise
        except RuntimeError:
            if failed is not None:
                raise failed from None  # what an unfinished recording complains of comes of it
            raise

    def play(self) -> None:
        self._graph.replay()


class Recorder:
    """Recordings that share memory: one is played after the other, and what it gives is used before the next one is."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, work: Callable[[], None]) -> Recording:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        return Recording(work, self._memory)


class HostCopy:
    """A copy of some tensors in host memory, taken while the device continues. One at a time; its memory is kept.

    copy = HostCopy(device, bytes)
    there = copy.take(tensors)      # returns at once; the device continues, too
    copy.wait()                     # by the reader of `there`, on a thread of its own: fetches, and waits
    copy.settle()                   # before the tensors change again: the device waits until they have been read

    On a CPU `take` copies before it returns, and there is nothing to wait for. `size` is in bytes, and large enough
    for all tensors, each rounded up to ALIGNMENT. All of it is made, and page-locked for a GPU, here and not later.
    """

    ALIGNMENT = 64

    def __init__(self, device: Device, size: int, memory: torch.Tensor | None = None):
        """memory: uint8 [size] of the host to copy into, which keeps what it holds until then."""
        self._memory = torch.empty(size, dtype=torch.uint8) if memory is None else memory
        self._stream = None
        self._asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fetching = threading.Event()
        if device.is_cuda:
            page_locked(self._memory)
            self._stream = torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]
            self._now = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._fetching.set()
        elif memory is None:
            self._memory.fill_(0)  # the system gives memory when it is first touched

    @classmethod
    def room(cls, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that `tensors` take."""
        return sum(-(-x.numel() * x.element_size() // cls.ALIGNMENT) * cls.ALIGNMENT for x in tensors)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies, valid until the next `take`, and on a GPU once they have arrived."""
        views, self._asked = self._placed(tensors)
        if self._stream is None:
            self._fetch()
        else:
            self._fetching.clear()
            self._now.record(torch.cuda.current_stream(self._stream.device))
        return views

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where `take` puts these tensors, as it left them."""
        return self._placed(tensors)[0]

    def _placed(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """A view for each tensor, and the copies that fill them: place and tensor."""
        views, asked, offset = [], [], 0
        for run in _runs(tensors):
            counts, first = [x.numel() for x in run], run[0].detach()
            size = sum(counts) * first.element_size()
            there = self._memory[offset : offset + size].view(first.dtype)
            views += [part.view(x.shape) for part, x in zip(torch.split(there, counts), run, strict=True)]
            whole = first.as_strided(there.shape, (1,)) if len(run) > 1 else first
            asked.append((there.view(whole.shape), whole))
            offset += self.room([whole])
        return views, asked

    def wait(self) -> None:
        """Fetch what was asked for, and wait until the host can read it. To be called once after each `take`."""
        if self._stream is None:
            return
        # A new thread begins on the first device, where its calls would make a context: half a second for all threads.
        torch.cuda.set_device(self._stream.device)
        try:
            if any(not x.is_cuda for _, x in self._asked):
                self._now.synchronize()  # the host copies these itself, and the device may still be writing them
            self._stream.wait_event(self._now)
            with torch.cuda.stream(self._stream):
                self._fetch()
                self._done.record()
        finally:
            self._fetching.set()  # a fault must not leave `settle` waiting
        self._done.synchronize()

    def _fetch(self) -> None:
        asked, self._asked = self._asked, []
        for place, x in asked:
            place.copy_(x, non_blocking=True)

    def settle(self) -> None:
        """Work that the device is given from here on waits until the tensors have been read."""
        if self._stream is not None:
            self._fetching.wait()
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)


def _runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Neighbours of a list that are neighbours in memory too: one copy takes them all.

    A thread that copies takes turns with the thread that trains, and may wait milliseconds for each.

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
    """`memory` of the host, locked in its place while it lives, so that a device reads and writes it directly.

    Registered, not allocated as pinned memory, which torch rounds up to a power of two. Errors: OSError.
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
    """Where parts of a tensor go: (first byte of it, address, bytes) each. marks: addresses set after all of them."""

    pieces: tuple[tuple[int, int, int], ...]
    marks: tuple[int, ...]


class CopyStream:
    """Copies that overlap what a CUDA device computes, and marks in its memory that streams write and wait for.

    Copy engines and the streams themselves do both, so that neither waits for a multiprocessor that some GEMM takes.
    The driver is called by hand and with many marks at a time: a layer makes dozens of these calls, and the host has as
    long for them as the device for the layer's GEMMs.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, x: torch.Tensor, ways: Sequence[CopyDescriptor], value: int) -> None:
        """Copy pieces of the contiguous `x`, as the current stream leaves it, and then mark each way's with `value`.

        The caller keeps `x`, and does not write to it, until it has been copied.
        """
        self._ready.record()
        self._stream.wait_event(self._ready)
        stream, begin, copy = self._stream.cuda_stream, x.data_ptr(), _driver().cuMemcpyAsync
        for way in ways:
            for first, target, size in way.pieces:
                _done("cuMemcpyAsync", copy(target, begin + first, size, stream))
            _on_marks(stream, _WRITE, way.marks, value)

    def wait(self, marks: tuple[int, ...], value: int) -> None:
        """The current stream continues when at least `value`, in a circle of 32 bits, stands at all of `marks`."""
        _on_marks(torch.cuda.current_stream().cuda_stream, _WAIT, marks, value)

    def join(self) -> None:
        """The current stream continues when all copies that were asked for are done."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def settle(self) -> None:
        """Everything that was asked of the device is done."""
        torch.cuda.synchronize()


class _MarkOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: what a stream does with one word of memory."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 2),
    )


_WAIT, _WRITE = 1, 2
"""Kinds of these operations on words of 32 bits; a wait without flags is for "at least"."""


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
    """Whether this host has a CUDA device for us; none is touched."""
    return torch.cuda.is_available()


def multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent kernel run in parallel; 1 on a CPU, where kernels are only interpreted, and
    an H200's on the meta device."""
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def overlaps_kernels(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it ends: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def fp8_matmuls(device: torch.device) -> bool:
    """Whether the device multiplies in fp8: from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
