"""Does Megatron-core itself continue from what mega writes? Its pretrain_gpt.py runs here on a CPU, from both folders.

    git -C Megatron-LM checkout core_v0.18.2
    python tests/battery/megatron_core_cpu.py --checkout Megatron-LM [NAME ...]

NAME is a recorded run of tests' data (golden/moe_core): its checkpoint of step 3 is read, written back as torch_dist,
and trained on by core for steps 4 to 6, from core's own folder and from mega's. What core prints of the steps, losses,
terms of the mixture and gradient norms, must be equal digit for digit. Nothing in the checkout is changed: torch.cuda
is given CPU functions. Core's folder holds the state of torch's AdamW, mega's that of a fused Adam, which counts steps
by group: one that does is put in its place. Needs pybind11 and a compiler, with which core builds its helpers.

mixtral_ep2-tree is the same at expert parallel size 2, on two ranks, from core's torch_dist folder and from mega's tree
of files whose ranks share the experts; the tree that core saves then, read by mega and written back, has equal tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tarfile
import tempfile
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

NAMES = ("mixtral", "mtp", "mixtral_ep2", "mixtral_ep2-tree")
STEPS = 3
DIGITS = re.compile(r"iteration +\d+|[a-z_0-9]+ ?[a-z]*loss: [-+.\dE]+|grad norm: [.\d]+")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=NAMES)
    asked = parser.parse_args()
    fine = [compared(name, asked.checkout.resolve()) for name in asked.names]
    return int(not all(fine))


def compared(name: str, checkout: Path) -> bool:
    from mega.core.checkpoint.forms.convert import convert
    from mega.core.checkpoint.own.layout import Layout
    from tests.support.archives import unpack
    from tests.support.shared import shared

    ranks, form = (2, "torch") if name.endswith("-tree") else (1, "torch_dist")
    with tempfile.TemporaryDirectory(prefix="mega-core-") as folder:
        home = Path(folder)
        with tarfile.open(shared(f"golden/moe_core/{name.removesuffix('-tree')}.tar.xz")) as archive:
            unpack(archive, home / "theirs")
        convert(home / "theirs" / "torch_dist", home / "ours", "mega", Layout())
        convert(home / "ours", home / "back", "torch_dist" if ranks == 1 else "mcore-local", Layout(ep=ranks))
        argv = json.loads((home / "theirs/record.json").read_text())["argv"]
        data = str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin")
        places = {"bytes_document": data, "cache": str(home / "cache"), "unused": str(home / "saved")}
        line = [places.get(Path(word).name, word) if "/" in word else word for word in argv]
        line += ["--expert-model-parallel-size", str(ranks), "--no-load-rng", "--no-save-rng"]
        sources = {"torch": ("torch_dist", home / "theirs" / "torch_dist"), "fused": (form, home / "back")}
        found = [
            steps(checkout, kind, [*line, "--ckpt-format", of, "--load", str(place)], ranks)
            for kind, (of, place) in sources.items()
        ]
        fine = len(found[0]) == STEPS and found[0] == found[1]
        fine = fine and (ranks == 1 or written_back(home / "saved", home))
    print(json.dumps({"item": name, "ok": fine, "from core's": found[0], "from mega's": found[1]}), flush=True)
    return fine


def written_back(saved: Path, home: Path) -> bool:
    """Whether a tree that core saved at two expert ranks is the same after mega has read and written it."""
    from mega.core.checkpoint.forms.convert import convert
    from mega.core.checkpoint.forms.pickles import read_pickled
    from mega.core.checkpoint.own.layout import Layout

    convert(saved, home / "own", "mega", Layout())
    convert(home / "own", home / "again", "mcore-local", Layout(ep=2))
    files = sorted(path.relative_to(saved) for path in saved.glob("*/*/model_optim_rng.pt"))
    pairs = [[dict(tensors(read_pickled(place / file))) for place in (saved, home / "again")] for file in files]
    return len(files) == 2 and all(
        theirs.keys() == ours.keys() and all(bool((theirs[key] == ours[key]).all()) for key in theirs)
        for theirs, ours in pairs
    )


def tensors(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The weights and the optimizer's state in the content of a file, by their place in it."""
    if hasattr(content, "numel"):
        yield name, content
    elif isinstance(content, dict):
        for key, value in content.items():
            if name or key in ("model", "optimizer"):
                yield from tensors(value, f"{name}/{key}")
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from tensors(value, f"{name}/{number}")


def steps(checkout: Path, kind: str, line: list[str], ranks: int) -> list[list[str]]:
    """What core prints of each step. kind: whose Adam it has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    every = {"LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    every |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, __file__, "core", str(checkout), kind, *line]
    running = [
        subprocess.Popen(
            command, env={**os.environ, **every, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as threads:  # the last rank prints the steps
        *_, (out, error) = threads.map(lambda each: each.communicate(), running)
    rows = [row for row in out.decode().splitlines() if "lm loss" in row and "iteration" in row]
    if len(rows) != STEPS:  # it may fail afterwards, where it saves
        print(error.decode()[-1500:], file=sys.stderr)
    return [DIGITS.findall(row) for row in rows]


# Megatron-core on a CPU


def core(checkout: str, kind: str, line: list[str]) -> None:
    import torch

    extensions: Any = importlib.import_module("typing_extensions")
    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = extensions.override  # type: ignore[attr-defined]
    cuda_on_the_cpu(torch)
    sys.path.insert(0, checkout)
    os.chdir(checkout)
    states: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    states._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    states._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    dispatchers: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = dispatchers.maybe_move_tensor_to_cpu
    dispatchers.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.tolist() if as_numpy and torch.is_tensor(tensor) else move(tensor, as_numpy, record_stream)
    )
    if kind == "fused":
        importlib.import_module("megatron.core.optimizer")
        optimizers: Any = torch.optim
        optimizers.AdamW = fused_adam(torch)
    sys.argv = ["pretrain_gpt.py", *line]
    runpy.run_path("pretrain_gpt.py", run_name="__main__")


class Nothing:
    """A stream or an event of a device that has none."""

    cuda_stream = 0

    def __init__(self, *arguments: object, **named: object) -> None: ...

    def record_event(self, *arguments: object) -> Nothing:
        return Nothing()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *a, **k: None


class Properties:
    major, minor, name, multi_processor_count, total_memory = 8, 0, "cpu", 1, 1 << 33


def cuda_on_the_cpu(torch: Any) -> None:
    """torch.cuda's functions that core calls, for one CPU device."""
    cuda, cpu = torch.cuda, torch.device("cpu")
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "manual_seed_all", "init"):
        setattr(cuda, name, lambda *a, **k: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *a, **k: 0)
    values = {"is_available": True, "current_device": cpu, "device_count": 1, "get_device_capability": (8, 0)}
    values |= {"is_bf16_supported": True, "get_device_name": "cpu", "get_device_properties": Properties}
    values |= {"mem_get_info": (1 << 33, 1 << 33), "memory_stats": defaultdict(int)}
    for name, value in values.items():
        setattr(cuda, name, partial(lambda value, *a, **k: value, value))
    for place in (cuda, cuda.random):
        place.get_rng_state = lambda *a, **k: torch.get_rng_state()
        place.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed, cuda.default_generators = torch.manual_seed, (torch.default_generator,)
    cuda._lazy_call = cuda._lazy_init = lambda *a, **k: None
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = cuda.default_stream = lambda *a: Nothing()
    cuda.stream = cuda.device = lambda each: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: None
    _tensors(torch, cpu)
    _groups(torch)


def _tensors(torch: Any, cpu: Any) -> None:
    """Tensors that are asked for on a GPU are on the CPU."""
    tensor = torch.Tensor
    for name in ("cuda", "pin_memory", "record_stream"):
        setattr(tensor, name, lambda self, *a, **k: self)
    torch.nn.Module.cuda = lambda self, *a, **k: self
    plain, to = tensor.type, tensor.to

    def named(self: Any, dtype: Any = None, *a: Any, **k: Any) -> Any:
        return plain(self).replace("torch.", "torch.cuda.") if dtype is None else plain(self, dtype, *a, **k)

    def there(named: dict[str, Any]) -> dict[str, Any]:
        device = named.get("device")
        found = {key: value for key, value in named.items() if key != "pin_memory"}
        return found | ({"device": cpu} if isinstance(device, int) or "cuda" in str(device) else {})

    def moved(self: Any, *a: Any, **k: Any) -> Any:
        a = tuple(cpu if isinstance(each, str | torch.device) and "cuda" in str(each) else each for each in a)
        return to(self, *a, **there(k))

    tensor.type, tensor.to = named, moved
    factories = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "as_tensor", "eye")
    for name in (*factories, "empty_like", "zeros_like", "ones_like"):
        make = getattr(torch, name)
        setattr(torch, name, partial(lambda make, *a, **k: make(*a, **there(k)), make))


def _groups(torch: Any) -> None:
    """All of gloo."""
    start, group = torch.distributed.init_process_group, torch.distributed.new_group

    def bare(named: dict[str, Any], backend: str | None) -> dict[str, Any]:
        return {key: value for key, value in named.items() if key not in ("pg_options", "device_id")} | {
            "backend": backend
        }

    torch.distributed.init_process_group = lambda *a, **k: start(*a, **bare(k, "gloo"))
    torch.distributed.new_group = lambda *a, **k: group(*a, **bare(k, None))


def fused_adam(torch: Any) -> type:
    """Adam with decoupled decay that counts steps by group, as apex's and Transformer Engine's do."""

    class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **others: Any) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = count = group.get("step", 0) + 1
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._update(weight, group, count)

        def _update(self, weight: Any, group: dict[str, Any], count: int) -> None:
            state, (first, second), grad = self.state[weight], group["betas"], weight.grad
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(weight))
            mean = state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
            square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
            scale = (square / (1 - second**count)).sqrt() + group["eps"]
            change = mean / (1 - first**count) / scale + group["weight_decay"] * weight
            weight.add_(change, alpha=-group["lr"])

    return FusedAdam


if __name__ == "__main__":
    if sys.argv[1:2] == ["core"]:
        core(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
