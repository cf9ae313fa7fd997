"""`mega reshard`: write a checkpoint again, cut for other ranks; from and to Megatron-LM's trees too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    load_dir: Annotated[
        Path, typer.Option("--load-dir", help="a run's directory, one step-NNNNNNN in it, or a Megatron-LM tree")
    ],
    save_dir: Annotated[Path, typer.Option("--save-dir", help="directory of the new checkpoint")],
    target_tp: Annotated[int, typer.Option("--target-tensor-parallel-size", "--tp", help="tensor ranks")] = 1,
    target_pp: Annotated[int, typer.Option("--target-pipeline-parallel-size", "--pp", help="pipeline stages")] = 1,
    saver: Annotated[
        Literal["mega", "megatron", "megatron-23.06", "mcore", "mcore-local"],
        typer.Option("--saver", help="kind to write: ours, Megatron-LM's legacy names, or Megatron-core's"),
    ] = "mega",
    loader: Annotated[
        Literal["mega", "megatron", "mcore"] | None,
        typer.Option("--loader", help="accepted; what is read is recognised by its files"),
    ] = None,
    true_vocab_size: Annotated[
        int | None, typer.Option("--true-vocab-size", help="vocabulary of a Megatron-LM tree without its padding")
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option("--num-attention-heads", help="of a torch_dist folder that carries no arguments")
    ] = None,
    model_type: Annotated[Literal["GPT"], typer.Option("--model-type", help="accepted; the files say it")] = "GPT",
) -> int:
    """Cut a checkpoint anew, on the CPU: weights, masters and moments; between Megatron-LM and us, weights.

    Checkpoints of ours load into any layout without this; it makes files that fit their ranks.
    """
    from mega.core.checkpoint.exchange import exchange

    report = exchange(load_dir, save_dir, target_tp, target_pp, saver, true_vocab_size, num_heads)
    print(
        f"{report.path}: {report.tensors:,} tensors, {report.elements:,} elements, "
        f"each with one origin and none left over; {report.bytes:,} bytes"
    )
    return 0
