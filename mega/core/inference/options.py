"""Decoding options for all commands that generate text, and options of `mega generate` and `mega chat`.

`serve`, `generate` and `bench serve` derive their flags and TOML tables from these sections; the engine uses
`EngineOptions` directly. This module does not import torch, so options that depend on a device or a model are checked
when the device or model is opened.
"""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mega.core.config.option import COUNT, FROM_0, VALUE, Range, VerbSection, like, option
from mega.core.config.sections import ParallelConfig, RuntimeConfig, TokenizerConfig
from mega.core.text.kind import kind_of_files
from mega.core.untrusted import Json

BLOCK = 16
"""Number of tokens in a block of the cache."""

NGRAM = "ngram"
"""Value of --speculate for guessing tokens from the preceding text."""

MTP = "mtp"
"""Value of --speculate for guessing tokens with the model's own multi-token prediction layers."""

NOTHING = "none"
"""Value of --retro for running a model with a retriever without neighbours."""


@dataclass(frozen=True, kw_only=True)
class DecodingLayout(VerbSection):
    """Options for the layout of ranks, the device and the precision."""

    title: ClassVar[str] = "Layout"

    tp: int = like(ParallelConfig, "tp", help="tensor-parallel ranks")
    pp: int = like(ParallelConfig, "pp", help="pipeline stages")
    ep: int = like(ParallelConfig, "ep", help="ranks over which experts are split, chosen from the tensor ranks")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        None, "dtype of the computation [fp32 on a CPU, else the dtype of the weights]"
    )
    device: Literal["auto", "cpu", "cuda"] = like(RuntimeConfig, "device", help="device of the tensors")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(VerbSection):
    """Options for batching, caching and computation in an engine."""

    title: ClassVar[str] = "Engine"

    max_requests: int = option(64, "maximum number of concurrent sequences; others wait", within=COUNT)
    prefill_chunk: int | None = option(
        None, "maximum number of prompt tokens in a step [depends on the device]", within=COUNT
    )
    cache_tokens: int | None = option(
        None, "capacity of the KV cache in tokens, shared by all sequences [as many as fit]", within=COUNT
    )
    batch_invariant: bool = option(False, "make every answer bitwise independent of other requests")
    cuda_graph: bool | None = option(None, "use CUDA graphs on a GPU [on]")
    fp8_weights: bool = option(False, "store the weights of linear layers in 8 bits, with one scale per output feature")
    speculate: str | None = option(
        None,
        "speculative decoding, with guesses from the text itself, from the model's own --mtp-layers, or from a "
        "small model [off]",
        metavar="ngram|mtp|DIR",
    )
    block: int = BLOCK
    """Number of tokens in a block of the cache."""
    tile: int = 32
    """Number of tokens in each tile of a step if `batch_invariant` is set."""
    vocab: int | None = None
    """Only ids below this value can be chosen; None to allow all ids of the model."""
    ahead: int | None = None
    """Number of steps to launch ahead of the oldest step whose results are still pending. None: 1 on a CUDA device (0
    otherwise), plus 1 for each pipeline stage after the first."""

    def check(self, device: str = "auto", adapter: Collection[str] = ()) -> None:
        """Check flags. Errors: ValueError naming flags that exclude each other."""
        excluded = {"--batch-invariant": self.batch_invariant, "--adapter": adapter, "--device cpu": device == "cpu"}
        for flag, is_given in excluded.items():
            if self.cuda_graph and is_given:
                raise ValueError(f"--cuda-graph: excludes {flag}")

    def check_speculation(self, adapter: Collection[str] = ()) -> None:
        """Check --speculate. Errors: ValueError if the draft model does not exist, or if --speculate cannot be combined
        with another flag that was given."""
        excluded = {
            "--batch-invariant": self.batch_invariant,
            "--adapter": self.speculate == MTP and bool(adapter),
        }
        for flag, is_given in excluded.items():
            if self.speculate is not None and is_given:
                raise ValueError(f"--speculate {self.speculate}: excludes {flag}")
        if self.speculate not in (None, NGRAM, MTP) and not Path(str(self.speculate)).exists():
            rule = "no such model; valid: ngram, mtp, or a model's directory"
            raise ValueError(f"--speculate {self.speculate}: {rule}")


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(VerbSection):
    """Options for the neighbour database of a model with a retriever."""

    title: ClassVar[str] = "Neighbours"

    retro: str | None = option(
        None, "for a model with a retriever: database built by mega retro build; none disables retrieval"
    )
    embedder: str | None = option(None, "with --retro: the BERT that embedded the database's chunks", metavar="<path>")
    index: str | None = option(None, "with --retro: search this index of the database [exact search]")
    probes: int = option(256, "with --index: number of lists to search", within=COUNT)

    def check(self) -> None:
        """Check flags. Errors: ValueError if only one of --retro and --embedder is given."""
        if self.retro not in (None, NOTHING) and self.embedder is None:
            raise ValueError(f"--embedder is missing: give the BERT that made the vectors of --retro {self.retro}")
        if self.retro in (None, NOTHING) and self.embedder is not None:
            raise ValueError(f"--embedder {self.embedder}: needs --retro, the database whose vectors it made")
        if self.retro in (None, NOTHING) and self.index is not None:
            raise ValueError(f"--index {self.index}: needs --retro, the database that it is of")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(VerbSection):
    """Options for the prompts of `mega generate` and the output file."""

    title: ClassVar[str] = "Texts"

    load: Path | None = option(
        None,
        "a run's directory (its newest step), one step in it, weights in another format, or a model on the Hub",
        hub="model",
    )
    url: str | None = option(None, "use PUT /api of a running server, such as mega serve", metavar="HOST:PORT")
    prompt: str | None = option(
        None, "text to continue [prompts from the terminal; without a terminal, a new document]", text=True
    )
    input: Path | None = option(
        None, "file of prompts: JSON lines (.jsonl), else one prompt per line", megatron="--sample-input-file"
    )
    output: Path | None = option(
        None,
        "file for the texts, as JSON lines [printed]",
        megatron=dict.fromkeys(("--sample-output-file", "--genfile"), VALUE),
    )
    num_samples: int = option(0, "number of new documents to generate, as JSON lines", within=FROM_0)
    unconditional: bool = option(False, "with --num-samples: also write all_text and id, as Megatron-LM does")
    tokens: int = option(100, "maximum number of generated tokens", megatron="--out-seq-length", within=COUNT)
    beams: int = option(
        0,
        "width of a beam search; 0 samples instead",
        megatron="--beam-width",
        within=Range("0 to 128", lambda value: 0 <= value <= 128),
    )
    length_penalty: float | None = option(None, "with --beams: divide scores by length raised to this power [1]")
    adapter: tuple[str, ...] = option(
        (), "LoRA adapter; the key `adapter` in a row of --input selects one by NAME [the first]", metavar="NAME=DIR"
    )
    nproc: int | None = like(RuntimeConfig, "nproc", help="number of local ranks to start [tp x pp]")
    chat_template: str | None = option(None, "not supported: use mega serve to answer with a chat template")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(VerbSection):
    """Options of `mega chat` for the model or server, and for the answers."""

    title: ClassVar[str] = "Chat"

    url: str | None = option(None, "use a running server, such as mega serve", metavar="HOST:PORT")
    name: str | None = option(None, "with --url: name of the model on the server")
    system: str | None = option(None, "system message", text=True)
    tokens: int | None = option(
        None, "maximum number of tokens in an answer [512; with --url, the server's default]", within=COUNT
    )
    adapter: tuple[str, ...] = option((), "LoRA adapter to use", metavar="NAME=DIR")
    chat_template: str | None = option(None, "llama2, llama3, chatml, plain or a Jinja file [the model's]")
    dtype: Literal["fp32", "bf16", "fp16"] | None = like(DecodingLayout, "dtype")
    device: Literal["auto", "cpu", "cuda"] = like(RuntimeConfig, "device", help="device of the tensors")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(VerbSection):
    """Sampling options of `mega generate`. Options that were not given are None, because beam search does not sample
    and a server applies its own defaults."""

    title: ClassVar[str] = "Sampling"

    temperature: float | None = option(None, "temperature; 0 takes the most likely token [1]")
    greedy: bool = option(False, "same as --temperature 0")
    top_k: int | None = option(None, "sample from the k most likely tokens [0: off]")
    top_p: float | None = option(None, "sample from the most likely tokens whose probabilities add up to p [1: off]")
    top_p_decay: float | None = option(None, "multiply top-p by this factor after each token [0: off]")
    top_p_bound: float | None = option(None, "lower bound of top-p with --top-p-decay [0]")
    min_p: float | None = option(None, "minimum probability, relative to that of the most likely token [0]")
    repetition_penalty: float | None = option(
        None, "make tokens that already occur in the text less likely; 1 is off [1]"
    )
    seed: int | None = option(None, "random seed; the same seed gives the same text [0]")

    def given(self) -> dict[str, Any]:
        """Return the options that were given, under the field names of `Sampling`. Errors: ValueError if one of the
        options cannot be combined with --greedy."""
        if self.greedy and self.temperature:
            raise ValueError(
                f"--temperature {self.temperature:g}: excludes --greedy, which draws nothing; give one of them"
            )
        values = {name: value for name, value in asdict(self).items() if value is not None and name != "greedy"}
        return {**values, "temperature": 0.0} if self.greedy else values


@dataclass(frozen=True, kw_only=True)
class OtherTokenizer(VerbSection):
    """Options for a tokenizer that replaces the checkpoint's tokenizer."""

    title: ClassVar[str] = "Tokenizer"

    tokenizer: str | None = like(TokenizerConfig, "tokenizer", help="kind of tokenizer [the checkpoint's]")
    tokenizer_model: str | None = like(TokenizerConfig, "tokenizer_model", help="model file of the tokenizer")
    vocab_file: str | None = like(TokenizerConfig, "vocab_file", help="vocabulary file of the tokenizer")
    merge_file: str | None = like(TokenizerConfig, "merge_file", help="BPE merges file of the tokenizer")
    vocab_size: int | None = like(TokenizerConfig, "vocab_size", help="number of ids of NullTokenizer", common=True)
    null_eod_last: bool = like(
        TokenizerConfig,
        "null_eod_last",
        help="the last of those ids ends a document; if off, an additional id does",
        common=True,
    )

    def described(self) -> dict[str, Json]:
        """Return the arguments of `text.build`; empty for the tokenizer that came with the model.

        Errors: ValueError if a file does not exist, the tokenizer type is missing and the files fit several types, or
        an option does not belong to this type.
        """
        files = {"tokenizer_model": self.tokenizer_model, "vocab_file": self.vocab_file, "merge_file": self.merge_file}
        given_files = {name: value for name, value in files.items() if value is not None}
        for name, value in given_files.items():
            if not Path(value).exists():
                raise ValueError(f"--{name.replace('_', '-')} {value}: no such file")
        if self.tokenizer != "NullTokenizer" and (self.vocab_size is not None or self.null_eod_last):
            flag = "--null-eod-last" if self.vocab_size is None else "--vocab-size"
            raise ValueError(f"{flag}: needs --tokenizer NullTokenizer")
        kind = self.tokenizer
        if given_files and kind is None:
            kind = kind_of_files(*files.values())
        of_null = {"vocab_size": self.vocab_size, "null_eod_last": self.null_eod_last}
        return {} if kind is None else {"tokenizer": kind, **given_files, **of_null}
