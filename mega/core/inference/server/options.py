"""Option sections of `mega serve` for the address, the model and the answers. The server uses these sections directly.

limits.py defines limits; inference/options.py defines options of the engine and its ranks. This module does not import
torch.
"""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import COUNT, Range, VerbSection, like, option
from mega.core.config.sections import RuntimeConfig
from mega.core.inference.server.limits import ServerLimits


@dataclass(frozen=True, kw_only=True)
class ListenOptions(VerbSection):
    """Options for the address and token of a server, and for the time to wait for its ranks."""

    title: ClassVar[str] = "Address"

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(
        5000, "port to listen on; 0 chooses a free port", within=Range("0 to 65535", lambda value: 0 <= value <= 65535)
    )
    token_file: Path | None = option(None, "file with the token that clients must send [MEGA_TOKEN]")
    timeout_minutes: float = like(
        RuntimeConfig,
        "timeout_minutes",
        help="end the server if a rank does not answer for this long",
        within=Range("0.05 to 35000", lambda value: 0.05 <= value <= 35_000),
    )

    def token(self) -> str | None:
        """The token of --token-file or MEGA_TOKEN. Errors: ValueError if the token is too short, or contains characters
        that cannot be sent."""
        from mega.core.untrusted import read_limited

        source_name = f"--token-file {self.token_file}" if self.token_file is not None else "MEGA_TOKEN"
        text = os.environ.get("MEGA_TOKEN")
        if self.token_file is not None:
            text = read_limited(self.token_file, 4096, source_name).decode("latin-1").strip()
        if text is None:
            return None
        if not 16 <= len(text) <= 1024 or not all("!" <= letter <= "~" for letter in text):
            raise ValueError(f"{source_name}: must be 16 to 1024 letters, digits or signs, without blanks")
        return text


@dataclass(frozen=True, kw_only=True)
class ServedModel(VerbSection):
    """Options for the model that answers, its adapters and its chat template."""

    title: ClassVar[str] = "Model"

    load: Path | None = option(
        None,
        "a run's directory, one step in it, weights in another format, or a model on the Hub; same as CHECKPOINT",
        hub="model",
    )
    adapter: tuple[str, ...] = option(
        (),
        "LoRA adapter: a run with --lora-rank, or an adapter from peft; clients select it as the model NAME",
        metavar="NAME=DIR",
    )
    chat_template: str | None = option(None, "llama2, llama3, chatml, plain or a Jinja file [the model's]")
    pooling: Literal["mean", "cls", "inner"] | None = option(
        None,
        "for a BERT: the embedding of a text is the mean of all its states, the first state, or "
        "the mean without [CLS] and [SEP]",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(VerbSection):
    """Limits, and default values for answers; requests may override the default values."""

    title: ClassVar[str] = "Answers"

    name: str = option("", "name of the model for clients [the directory's name]")
    served_model_name: tuple[str, ...] = option((), "the model's name for clients, followed by its aliases")
    max_length: int | None = option(
        None,
        "maximum number of tokens in prompt and answer together [the model's limit]",
        megatron="--out-seq-length",
        within=COUNT,
    )
    max_tokens_to_oom: int = option(
        12000,
        "maximum number of tokens in one PUT /api request, including padding",
        megatron="--max-tokens-to-oom",
        within=COUNT,
    )
    temperature: float = option(1.0, "default temperature for requests")
    top_k: int = option(0, "default top-k for requests; 0 is off")
    top_p: float = option(1.0, "default top-p for requests; 1 is off")
    seed: int | None = option(None, "default seed for requests [a new seed each time]")
    parse_special_tokens: bool = option(
        False, "encode names of special tokens in a completion's prompt as these tokens, not as text"
    )
    log_prompts: bool = option(False, "log each request, with its prompt")
    legacy_status: bool = option(False, "answer most invalid PUT /api requests with status 200, as Megatron-LM does")
    no_chat: str = "the model has no chat template"
    """Reason why the model cannot chat."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters."""
    token: str | None = None
    """The token that is required for all paths except the web page and the health check; None if no token is
    required."""
    stop_ids: frozenset[int] = frozenset()
    """The model's end tokens in addition to the tokenizer's end token."""
    vector_width: int = 0
    """Number of elements in an embedding; 0 for a text-generation model."""
    limits: ServerLimits = field(default_factory=ServerLimits)
