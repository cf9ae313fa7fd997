"""The option sections of `mega reshard` and `mega convert-llama`. Importing this module imports neither torch nor the
module of any format."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.checkpoint.forms.form import Verb, targets_of
from mega.core.config.option import REQUIRED, VerbSection, option


class Targets(Collection[str]):
    """The target formats of a command. The list is computed on each use, because formats may be registered after this
    module is imported."""

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
    """The checkpoint to convert and the format to write. Flags that control the two processes of Megatron-LM's
    conversion tool are accepted and have no effect."""

    title: ClassVar[str] = "Checkpoints"

    load_dir: Path = option(
        REQUIRED,
        "a run's directory, a step-NNNNNNN in it, weights in another format, or a name on the Hub",
        hub="model",
    )
    save_dir: Path = option(REQUIRED, "directory of the new checkpoint")
    saver: str = option(
        "mega",
        "format to write: mega; for Megatron-LM of 2023 megatron, megatron-23.06; for Megatron-core mcore, "
        "mcore-local, torch_dist",
        choices=Targets("reshard"),
    )
    loader: str | None = option(None, "accepted without effect; the format is recognised by its files")
    true_vocab_size: int | None = option(None, "vocabulary size of a Megatron-LM checkpoint, without padding")
    vocab_file: Path | None = option(None, "a vocab.json, whose length is the true vocabulary size")
    num_attention_heads: int | None = option(
        None, "number of attention heads, for a torch_dist folder that does not contain the model's arguments"
    )
    model_type: Literal["GPT"] = option("GPT", "accepted without effect; the model type is determined from the files")
    megatron_path: str | None = option(None, "accepted; not needed")
    tokenizer_type: str | None = option(
        None, "tokenizer type to record in a Megatron-LM checkpoint [the checkpoint's, else NullTokenizer]"
    )
    use_distributed_optimizer: bool = option(False, "write optimizer state for Megatron-LM's distributed optimizer")
    tokenizer_model: str | None = option(None, "accepted; not needed")
    max_queue_size: int = option(50, "accepted; not needed")
    upcycle: int | None = option(None, "experts per layer of an MoE model made from a dense model's weights")
    upcycle_chosen: int = option(2, "experts chosen for each token in this MoE model")
    upcycle_granularity: int = option(1, "number of experts that one dense network is split into")
    load_optim: bool = option(True, "read or write a Megatron-LM optimizer's state")
    verify: bool = option(False, "read the written checkpoint back and compare it bit for bit with its source")
    checking: bool = option(True, "accepted without effect; tensors are always checked")

    @property
    def flags(self) -> dict[str, object]:
        """Flag -> value, for flags that apply only to some formats."""
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
    """The weights to convert and the format to write."""

    title: ClassVar[str] = "Weights"

    load_dir: Path = option(
        REQUIRED,
        "weights to convert: a Hugging Face, Meta or fairseq folder, a llama2.c or GGUF file, the directory of a run "
        "or of a step, or a name on the Hub",
        hub="model",
    )
    save_dir: Path = option(REQUIRED, "folder to write; it appears only when it is complete")
    to: str | None = option(None, "format to write [mega; hf for a mega checkpoint]", choices=Targets("convert-llama"))
    base: Path | None = option(
        None, "base weights of a peft adapter; when writing an adapter, the name of its base model"
    )
    parts: int = option(1, "number of files of a Meta folder")
    outtype: Literal["f32", "f16", "bf16", "q8_0", "fp8"] | None = option(
        None,
        "type of the matrices: fp8 (in blocks) with --to hf; f32, f16, bf16 or q8_0 with --to gguf [the type of the "
        "weights]",
    )
    verify: bool = option(
        False,
        "check the result: for decoders in Hugging Face's format, compare both models' outputs on random tokens; "
        "otherwise read the files back and compare bits",
    )
