"""What `mega reshard` and `mega convert-llama` read and write, as their sections. No torch, and no form is loaded."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.checkpoint.forms.form import Verb, targets_of
from mega.core.config.option import REQUIRED, VerbSection, option


class Targets(Collection[str]):
    """The targets of a verb, listed when they are needed, because forms may be registered after this module is
    loaded."""

    def __init__(self, verb: Verb) -> None:
        self._verb = verb

    def __contains__(self, name: object) -> bool:
        return name in targets_of(self._verb)

    def __iter__(self) -> Iterator[str]:
        return iter(targets_of(self._verb))

    def __len__(self) -> int:
        return len(targets_of(self._verb))


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(VerbSection):
    """Which checkpoint is cut again, and in which form it is written; flags of Megatron-LM's tool that steer its two
    processes are accepted and do nothing."""

    title: ClassVar[str] = "Checkpoints"

    load_dir: Path = option(
        REQUIRED,
        "a run's directory, one step-NNNNNNN in it, what others have written, or a name of the Hub",
        hub="model",
    )
    save_dir: Path = option(REQUIRED, "directory of the new checkpoint")
    saver: str = option(
        "mega",
        "form to write: ours; for Megatron-LM of 2023 megatron, megatron-23.06; for Megatron-core mcore, mcore-local, "
        "torch_dist",
        choices=Targets("reshard"),
    )
    loader: str | None = option(None, "accepted; what is read is recognised by its files")
    true_vocab_size: int | None = option(None, "vocabulary of a Megatron-LM tree without its padding")
    vocab_file: Path | None = option(None, "a vocab.json whose length is the true vocabulary")
    num_attention_heads: int | None = option(None, "of a torch_dist folder that carries no arguments")
    model_type: Literal["GPT"] = option("GPT", "accepted; the files say it")
    megatron_path: str | None = option(None, "accepted; not needed")
    tokenizer_type: str | None = option(None, "what a Megatron-LM tree says of its tokenizer")
    use_distributed_optimizer: bool = option(False, "write a Megatron-LM optimizer's state as that one reads it")
    tokenizer_model: str | None = option(None, "accepted; not needed")
    max_queue_size: int = option(50, "accepted; not needed")
    upcycle: int | None = option(None, "make a mixture of so many experts a layer out of a dense model's weights")
    upcycle_chosen: int = option(2, "experts that each token of that mixture passes")
    upcycle_granularity: int = option(1, "experts of that mixture that make up one dense network")
    load_optim: bool = option(True, "read or write a Megatron-LM optimizer's state")
    verify: bool = option(False, "read back what was written and compare it with its source, bit for bit")
    checking: bool = option(True, "accepted; tensors are always checked")

    @property
    def flags(self) -> dict[str, object]:
        """Flags that only some forms read or write, with their values."""
        return {
            "--true-vocab-size": self.true_vocab_size,
            "--vocab-file": self.vocab_file,
            "--num-attention-heads": self.num_attention_heads,
            "--no-load-optim": not self.load_optim,
            "--use-distributed-optimizer": self.use_distributed_optimizer,
            "--tokenizer-type": self.tokenizer_type,
        }


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(VerbSection):
    """Which weights are converted, and into what."""

    title: ClassVar[str] = "Weights"

    load_dir: Path = option(
        REQUIRED,
        "Hugging Face, Meta or fairseq folder, llama2.c or GGUF file, run directory, step-NNNNNNN, name of the Hub",
        hub="model",
    )
    save_dir: Path = option(REQUIRED, "where to write; a folder, complete or absent")
    to: str | None = option(
        None, "what to write [mega; hf where a checkpoint is read]", choices=Targets("convert-llama")
    )
    base: Path | None = option(None, "of a peft adapter: the weights it was trained on; the name to write")
    parts: int = option(1, "files of a Meta folder")
    outtype: Literal["f32", "f16", "bf16", "q8_0"] | None = option(
        None, "of --to gguf: how matrices are stored [as the weights are]"
    )
    verify: bool = option(
        False, "Hugging Face's decoders: run both models on random tokens; others: read back, compare bits"
    )
