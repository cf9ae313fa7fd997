"""`mega reshard`: convert a checkpoint to a different layout, or from and to Megatron-LM's formats.

The subcommand accepts every flag of Megatron-LM's conversion tool (tools/checkpoint). Flags that only control the two
processes of that tool have no effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.checkpoint.forms.options import ReshardOptions
from mega.core.checkpoint.own.options import Layout

if TYPE_CHECKING:
    from mega.core.checkpoint.own.ledger import ConversionReport

STATED_BY = "the checkpoint says it"
"""The reason why training options have no effect, for messages."""


def run(reshard: ReshardOptions, layout: Layout) -> int:
    """Convert a checkpoint to a different layout, or to and from Megatron-LM's formats, on the CPU. Weights, master
    weights and moments are converted.

    A mega checkpoint can be loaded in any layout without this command. After the conversion, the files match the ranks
    of the target layout.
    """
    from mega.core.files import check_save_dir, check_source

    load, save = reshard.load_dir, reshard.save_dir
    check_source("--load-dir", load)
    check_save_dir(save)
    from mega.core.checkpoint.forms.convert import convert
    from mega.core.checkpoint.forms.form import check_flags, writer_of
    from mega.core.checkpoint.forms.read_back import check_comparable, read_back
    from mega.core.checkpoint.forms.recognise import form_at
    from mega.core.checkpoint.own.tables import progress_bar

    if reshard.verify:
        # --verify is checked before the conversion, which may take hours, because not every format can be read back.
        check_comparable(load, to_ours=reshard.saver == "mega")
    check_flags(form_at(load), writer_of(reshard.saver), {**layout.flags, **reshard.flags})
    vocab = _vocab(reshard)
    if reshard.upcycle is not None:
        return _upcycle(reshard, layout, vocab)
    for name in ("upcycle_chosen", "upcycle_granularity"):
        if (value := getattr(reshard, name)) != getattr(ReshardOptions, name):
            raise ValueError(f"--{name.replace('_', '-')} {value}: needs --upcycle")
    with progress_bar() as progress:
        report = convert(
            load,
            save,
            reshard.saver,
            layout,
            vocab=vocab,
            heads=reshard.num_attention_heads,
            optimizer=reshard.load_optim,
            distributed=reshard.use_distributed_optimizer,
            tokenizer_type=reshard.tokenizer_type,
            progress=progress,
        )
    _print_report(report)
    if reshard.verify:
        print(read_back(load, report.path, reshard.num_attention_heads))
    return 0


def _print_report(report: ConversionReport) -> None:
    for note in report.notes:
        print(note)
    print(
        f"{report.path}: {report.tensors:,} tensors, {report.elements:,} elements, "
        f"each with one origin and none left over; {report.bytes:,} bytes"
    )


def _upcycle(reshard: ReshardOptions, layout: Layout, vocab: int | None) -> int:
    """Convert a dense model of any format to a mixture of experts. Errors: ValueError naming a flag that --upcycle
    excludes."""
    from mega.core.checkpoint.forms.convert import upcycle
    from mega.core.checkpoint.forms.form import FormOptions
    from mega.core.checkpoint.forms.upcycle import Upcycling

    assert reshard.upcycle is not None
    if reshard.saver != "mega" or reshard.verify:
        excluded = "--verify" if reshard.verify else f"--saver {reshard.saver}"
        raise ValueError(
            f"{excluded}: excludes --upcycle, which writes a checkpoint of mega that differs from its source"
        )
    upcycling = Upcycling(reshard.upcycle, reshard.upcycle_chosen, reshard.upcycle_granularity)
    given_flags = FormOptions(layout=layout, vocab=vocab, heads=reshard.num_attention_heads, optimizer=False)
    _print_report(upcycle(reshard.load_dir, reshard.save_dir, upcycling, layout, given_flags))
    print("a new run starts from it with --finetune and --balance-loss, or --balance-bias")
    return 0


def _vocab(reshard: ReshardOptions) -> int | None:
    """Return the true vocabulary size, if it was given. Errors: ValueError if the vocabulary file has a different
    size."""
    size, file = reshard.true_vocab_size, reshard.vocab_file
    if file is None:
        return size
    pieces = _pieces_of(file)
    if size not in (None, pieces):
        raise ValueError(f"--true-vocab-size {size}: --vocab-file {file} has {pieces} pieces")
    return pieces


def _pieces_of(path: Path) -> int:
    """Return the number of tokens in a vocab.json."""
    from mega.core.text.gpt2 import read_vocab

    if not path.is_file():
        raise ValueError(f"--vocab-file {path}: no such file")
    return len(read_vocab(path))
