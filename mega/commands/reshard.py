"""`mega reshard`: write a checkpoint again, cut for another number of tensor ranks and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    load_dir: Annotated[
        Path,
        typer.Option("--load-dir", help="a run's directory (its newest step), or one step-NNNNNNN in it"),
    ],
    save_dir: Annotated[Path, typer.Option("--save-dir", help="directory of the new checkpoint")],
    target_tp: Annotated[int, typer.Option("--target-tensor-parallel-size", "--tp", help="tensor ranks")] = 1,
    target_pp: Annotated[int, typer.Option("--target-pipeline-parallel-size", "--pp", help="pipeline stages")] = 1,
    model_type: Annotated[
        Literal["GPT"], typer.Option("--model-type", help="accepted; the checkpoint knows it")
    ] = "GPT",
    loader: Annotated[Literal["mega"], typer.Option("--loader", help="kind of checkpoint to read")] = "mega",
    saver: Annotated[Literal["mega"], typer.Option("--saver", help="kind of checkpoint to write")] = "mega",
) -> int:
    """Cut a checkpoint anew: weights, masters and moments, on the CPU, one tensor at a time.

    Checkpoints load into any layout without this; it makes files that fit their ranks.
    """
    from mega.core.checkpoint.reshard import reshard

    report = reshard(load_dir, save_dir, target_tp, target_pp)
    print(
        f"{report.path}: {report.tensors:,} tensors, {report.elements:,} elements, "
        f"each read once and written once; {report.bytes:,} bytes in {report.seconds:.1f} s"
    )
    return 0
