"""`mega reshard`: write a checkpoint again, cut for other ranks; from and to Megatron-LM's trees too.

Every flag of Megatron-LM's own tool (tools/checkpoint) is taken; those that only steer its two processes do nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega.core.checkpoint.forms.form import targets_of

if TYPE_CHECKING:
    Target = str
else:
    Target = Literal[tuple(targets_of("reshard"))]

STATED_BY = "the checkpoint says it"
"""Why options of a training that are given here change nothing."""


def run(
    load_dir: Annotated[
        Path,
        typer.Option("--load-dir", help="a run's directory, one step-NNNNNNN in it, or what others have written"),
    ],
    save_dir: Annotated[Path, typer.Option("--save-dir", help="directory of the new checkpoint")],
    target_tp: Annotated[int, typer.Option("--target-tensor-parallel-size", "--tp", help="tensor ranks")] = 1,
    target_pp: Annotated[int, typer.Option("--target-pipeline-parallel-size", "--pp", help="pipeline stages")] = 1,
    chunks: Annotated[int, typer.Option("--chunks", help="model chunks per pipeline rank")] = 1,
    stage_layers: Annotated[
        list[int] | None, typer.Option("--stage-layers", help="blocks of each stage, where they are not equal")
    ] = None,
    saver: Annotated[
        Target,
        typer.Option(
            "--saver",
            help="form to write: ours; for Megatron-LM of 2023 megatron, megatron-23.06; for Megatron-core mcore, "
            "mcore-local, torch_dist",
        ),
    ] = "mega",
    loader: Annotated[
        str | None, typer.Option("--loader", help="accepted; what is read is recognised by its files")
    ] = None,
    true_vocab_size: Annotated[
        int | None, typer.Option("--true-vocab-size", help="vocabulary of a Megatron-LM tree without its padding")
    ] = None,
    vocab_file: Annotated[
        Path | None, typer.Option("--vocab-file", help="a vocab.json whose length is the true vocabulary")
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option("--num-attention-heads", help="of a torch_dist folder that carries no arguments")
    ] = None,
    model_type: Annotated[Literal["GPT"], typer.Option("--model-type", help="accepted; the files say it")] = "GPT",
    megatron_path: Annotated[str | None, typer.Option("--megatron-path", help="accepted; not needed")] = None,
    tokenizer_type: Annotated[
        str | None, typer.Option("--tokenizer-type", help="what a Megatron-LM tree says of its tokenizer")
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--use-distributed-optimizer", help="write a Megatron-LM optimizer's state as that one reads it"),
    ] = False,
    tokenizer_model: Annotated[str | None, typer.Option("--tokenizer-model", help="accepted; not needed")] = None,
    max_queue_size: Annotated[int, typer.Option("--max-queue-size", help="accepted; not needed")] = 50,
    no_load_optim: Annotated[
        bool, typer.Option("--no-load-optim", help="leave out a Megatron-LM optimizer's state, read or written")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="read back what was written and compare it with its source, bit for bit")
    ] = False,
    no_checking: Annotated[bool, typer.Option("--no-checking", help="accepted; tensors are always checked")] = False,
) -> int:
    """Cut a checkpoint again, on the CPU: weights, masters and moments; to and from Megatron-LM Adam's state goes too.

    Checkpoints of ours load into any layout without this; it makes files that fit their ranks.
    """
    from mega.core.files import check_save_dir, check_source

    check_source("--load-dir", load_dir)
    check_save_dir(save_dir)
    from mega.core.checkpoint.forms.convert import convert
    from mega.core.checkpoint.forms.form import check_flags, writer_of
    from mega.core.checkpoint.forms.read_back import check_comparable, read_back
    from mega.core.checkpoint.forms.recognise import form_at
    from mega.core.checkpoint.own.layout import Layout
    from mega.core.checkpoint.own.tables import progress_bar

    if verify:
        check_comparable(load_dir, to_ours=saver == "mega")
    layout = Layout(target_tp, target_pp, chunks, tuple(stage_layers or ()))
    given = {
        **layout.flags,
        "--true-vocab-size": true_vocab_size,
        "--vocab-file": vocab_file,
        "--num-attention-heads": num_heads,
        "--no-load-optim": no_load_optim,
        "--use-distributed-optimizer": distributed,
        "--tokenizer-type": tokenizer_type,
    }
    check_flags(form_at(load_dir), writer_of(saver), given)
    if vocab_file is not None:
        pieces = _pieces_of(vocab_file)
        if true_vocab_size not in (None, pieces):
            raise ValueError(f"--true-vocab-size {true_vocab_size}: --vocab-file {vocab_file} has {pieces} pieces")
        true_vocab_size = pieces
    with progress_bar("reshard") as progress:
        report = convert(
            load_dir,
            save_dir,
            saver,
            layout,
            vocab=true_vocab_size,
            heads=num_heads,
            optimizer=not no_load_optim,
            distributed=distributed,
            tokenizer_type=tokenizer_type,
            progress=progress,
        )
    for note in report.notes:
        print(note)
    print(
        f"{report.path}: {report.tensors:,} tensors, {report.elements:,} elements, "
        f"each with one origin and none left over; {report.bytes:,} bytes"
    )
    if verify:
        print(read_back(load_dir, report.path, num_heads))
    return 0


def _pieces_of(path: Path) -> int:
    """How many pieces a vocab.json has."""
    from mega.core.text.gpt2 import read_vocab

    if not path.is_file():
        raise ValueError(f"--vocab-file {path}: no such file")
    return len(read_vocab(path))
