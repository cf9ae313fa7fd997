"""Options of mega download and mega push. This module does not import torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import VerbSection, option


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(VerbSection):
    """Options for which files of a repository to fetch, and where to store them."""

    title: ClassVar[str] = "Download"

    kind: Literal["model", "tokenizer", "dataset"] = option(
        "model", "what to download: weights with their tokenizer, only the tokenizer, or the rows of a data set"
    )
    to: Path | None = option(None, "also copy the files into this folder [only into the local Hub cache]")


@dataclass(frozen=True, kw_only=True)
class PushOptions(VerbSection):
    """Options for the repository to which a model is uploaded."""

    title: ClassVar[str] = "Push"

    private: bool = option(False, "create the repository as private: only its owners see it")
    message: str = option("Upload a model with mega", "message of the commit", text=True)
    license: str | None = option(None, "license in the model card, such as apache-2.0")
    base_model: str | None = option(None, "base model in the model card: the name of the model that was finetuned")
    card: Path | None = option(None, "upload this file as the model card instead of the generated one")
