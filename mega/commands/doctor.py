"""`mega doctor`: report what works on this machine and what does not, without changing anything."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mega.core.processes.world import cores
from mega.core.terminal import print_whole

if TYPE_CHECKING:
    from rich.text import Text

    from mega.core.ops.mask import AttentionMask

Row = tuple[str, str, str]
"""(name, version or value, remark)"""

NAMES = ("name", "value", "remark")


class Package(NamedTuple):
    """An optional library."""

    package: str
    """Name on the package index."""
    module: str
    """Name of the imported module."""
    use: str
    """The library's purpose, for the report."""
    cuda: bool = False
    """Whether the library can be tested only on a CUDA device."""
    tried: bool = True
    """Whether mega has ever been tested with the library."""
    extra: str = ""
    """The extra of mega that installs the library."""


TOKENS = 1024
"""Sequence length for which the choice of attention implementation is shown."""

REQUIRED = ("torch", "numpy", "safetensors", "typer", "rich")
PACKAGES = (
    Package("fastokens", "fastokens", "fast tokenizers, where they agree with the reference"),
    Package("tokenizers", "tokenizers", "tokenizer.json, and fast GPT-2"),
    Package("sentencepiece", "sentencepiece", "SentencePiece and Llama-2 tokenizers"),
    Package("regex", "regex", "the GPT-2 tokenizer without a fast library"),
    Package("orjson", "orjson", "reading JSON lines"),
    Package("zstandard", "zstandard", "reading .zst", extra="data"),
    Package("pyarrow", "pyarrow", "reading parquet", extra="data"),
    Package("tensorboard", "tensorboard", "--tensorboard-dir", extra="track"),
    Package("matplotlib", "matplotlib", "plots", extra="track"),
    Package("transformers", "transformers", "comparing conversions with the originals", extra="hf"),
    Package("prometheus-client", "prometheus_client", "--metrics-port, mega serve", extra="track"),
    Package("wandb", "wandb", "--wandb-project", extra="wandb"),
    Package("mlflow-skinny", "mlflow", "--mlflow-uri", extra="mlflow"),
    Package("lm-eval", "lm_eval", "mega eval --tasks", extra="lm-eval"),
    Package("fastapi", "fastapi", "mega serve", extra="serve"),
    Package("s3fs", "s3fs", "--save s3://", extra="remote"),
    Package("triton", "triton", "compiled GPU operators", cuda=True),
    Package("nvidia-cudnn-frontend", "cudnn", "attention with a window", cuda=True, extra="cudnn"),
    Package("flash-attn", "flash_attn", "attention by --ops flash-attn", cuda=True, tried=False),
    Package("apex", "apex", "norms by --ops apex", cuda=True, tried=False),
)


def run(
    everything: Annotated[
        bool, typer.Option("--all", help="also list every version, operator and optional library")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> int:
    """Report in ten lines what works on this machine, and why something does not work; --all lists everything."""
    if as_json:
        tables = {title: [dict(zip(NAMES, row, strict=True)) for row in rows] for title, rows in _tables().items()}
        print_whole(json.dumps(tables, indent=2) + "\n")
        return 0
    for line in _summary():
        print(line)
    if everything:
        print()
        _print_tables()
    return 0


def _tables() -> dict[str, list[Row]]:
    """Return the rows of each table, by title. This function imports all installed optional libraries."""
    cuda = _cuda_devices()
    return {
        "Versions": list(_versions()),
        "Devices": [*_host(), *cuda],
        "Backends": list(_backends(bool(cuda))),
        "Operators of a bf16 run": list(_operators()),
        "Optional parts": list(_parts(bool(cuda))),
    }


def _summary() -> Iterator[str]:
    """Yield a summary of ten lines. Optional libraries are located without importing them."""
    devices = _cuda_devices()
    versions = {name: value for name, value, _ in _versions()}
    yield f"mega {versions['mega']}, Python {versions['python']}, {platform.platform()}"
    yield ", ".join(f"{name} {versions[name]}" for name in REQUIRED)
    yield f"CPU: {', '.join(value for _, value, _ in _host())}"
    kinds = Counter(f"{value} ({remark.removeprefix('live; ')})" for _, value, remark in devices)
    yield f"GPU: {', '.join(f'{count} x {name}' for name, count in kinds.items()) or 'none, so ranks are on the CPU'}"
    yield f"ranks: {'; '.join(f'{name}: {remark or value}' for name, value, remark in _backends(bool(devices)))}"
    operators = {name: value for name, value, _ in _operators()}
    yield f"attention: {operators.get('attention, causal', 'torch is absent')}"
    yield f"matmuls: {operators.get('matmuls', 'torch is absent')}"
    installed = [part.package for part in PACKAGES if importlib.util.find_spec(part.module) is not None]
    yield f"optional parts: {', '.join(installed) or 'none'}"
    absent = [part.package for part in PACKAGES if part.package not in installed]
    yield f"absent, and not needed: {', '.join(absent) or 'none'}"
    yield "more, and how to install what is absent: mega doctor --all"


def _print_tables() -> None:
    from rich.console import Console
    from rich.table import Table

    from mega.core.terminal import print_table

    console = Console()
    for title, rows in _tables().items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        for column in NAMES:
            table.add_column(column, overflow="fold")
        for row in rows:
            # rich would interpret brackets in a string as markup, so remarks are passed as `Text`.
            table.add_row(*row[:2], _styled(row[2]))
        print_table(console, table)


def _styled(remark: str) -> Text:
    from rich.text import Text

    style = "green" if remark.startswith("live") else "red" if "fails" in remark else ""
    return Text(remark, style=style)


def _versions() -> Iterator[Row]:
    from mega import __version__

    yield "mega", __version__, ""
    yield "python", platform.python_version(), platform.platform()
    for package in REQUIRED:
        yield package, _version(package) or "-", "" if _version(package) else "absent, though mega needs it"


def _host() -> Iterator[Row]:
    yield "CPU", f"{cores()} cores", f"{os.cpu_count()} in all, {platform.machine()}"
    memory = _memory()
    if memory is not None:
        yield "memory", f"{memory / 2**30:.0f} GiB", ""


def _memory() -> int | None:
    """Return the size of main memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cuda_devices() -> list[Row]:
    """Return one row per CUDA device; empty if torch finds none or is not installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    from mega.core.device import Device

    rows: list[Row] = []
    while True:
        try:
            device = Device.choose("cuda", len(rows))
        except (ValueError, RuntimeError):
            return rows
        peak = device.peak_tflops
        remark = f"live; {peak:.0f} TFLOP/s in bf16" if peak else "live; peak unknown, so MFU is n/a"
        rows.append((f"CUDA device {len(rows)}", device.name, remark))


def _backends(cuda: bool) -> Iterator[Row]:
    if importlib.util.find_spec("torch") is None:
        yield "gloo, nccl", "-", "torch is absent"
        return
    import torch
    import torch.distributed as dist

    cuda_version = torch.version.cuda
    yield "CUDA", cuda_version or "-", "" if cuda_version else "this torch is built without CUDA"
    nccl = next((version for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (version := _version(name))), "-")
    if not dist.is_available():
        yield "torch.distributed", "-", "this torch is built without it: one rank only"
        return
    yield "gloo", "-", "live: ranks on CPUs" if dist.is_gloo_available() else "not in this torch"
    if not dist.is_nccl_available():
        yield "nccl", nccl, "not in this torch: ranks on CPUs only"
    else:
        yield (
            "nccl",
            nccl,
            "live: ranks on CUDA devices" if cuda else "present, untested here: no CUDA device",
        )


def _operators() -> Iterator[Row]:
    """Yield the implementation of each op that a run on this machine would use, and the reason."""
    if importlib.util.find_spec("torch") is None:
        return
    from mega.core.device import DTYPES, Device
    from mega.core.ops.suite import attention_advice, attention_words, choose

    device, dtype = Device.choose(), DTYPES["bf16"]
    ops = choose(device.torch, dtype)
    for name, implementation in ops.implementations():
        implementation = ops.matmuls.words if name == "matmuls" else implementation
        yield name, implementation, f"live: {ops.name}, {ops.reason}"
    for features, mask in _masks():
        rows = ops, mask, dtype, TOKENS, 64
        yield f"attention, {features}", attention_words(*rows), attention_advice(*rows) or ""
    graph = "a recorded graph where blocks are small" if device.is_cuda else "one by one: no CUDA device"
    yield "micro batches", graph, "--cuda-graph, --no-cuda-graph"
    overlap = "overlap GEMMs where blocks are large" if device.is_cuda else "do not overlap GEMMs: no CUDA device"
    yield "exchanges of tensor ranks", overlap, "--tp-overlap, --no-tp-overlap"


def _masks() -> Iterator[tuple[str, AttentionMask]]:
    """Yield (name, example mask) for each kind of attention that runs use."""
    import torch

    from mega.core.ops.dropout import AttentionDropout
    from mega.core.ops.mask import AttentionMask

    numbers = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    yield "causal", AttentionMask()
    yield "a window", AttentionMask(window=TOKENS // 2)
    yield "documents", AttentionMask(q_documents=numbers, k_documents=numbers)
    yield "dropout", AttentionMask(dropout=AttentionDropout(numbers, 0, 0, (range(TOKENS),), 0.1))


def _parts(cuda: bool) -> Iterator[Row]:
    for part in PACKAGES:
        version = _version(part.package)
        state = _state(part, cuda)
        advice = f": pip install '.[{part.extra}]' in a clone" if part.extra and state == "absent" else ""
        yield part.package, version or "-", f"{state} ({part.use}){advice}"


def _state(part: Package, cuda: bool) -> str:
    """Return the state of an optional library: live, or the reason why it cannot be used."""
    if importlib.util.find_spec(part.module) is None:
        return "absent"
    if part.cuda and not cuda:
        return "present, untested here: no CUDA device"
    try:
        importlib.import_module(part.module)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        return f"present, but its import fails: {type(error).__name__}: {reason}"
    return "live" if part.tried else "present, untested: mega has not been run with it yet"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
