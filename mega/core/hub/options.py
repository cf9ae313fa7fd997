"""Options of mega download and mega push. No torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import VerbSection, option


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(VerbSection):
    """What is fetched of a repository, and where it goes."""

    title: ClassVar[str] = "Download"

    kind: Literal["model", "tokenizer", "dataset"] = option(
        "model", "weights with their tokenizer, the tokenizer alone, or a data set's rows"
    )
    to: Path | None = option(None, "copy the files into this folder too [the Hub's cache alone]")


@dataclass(frozen=True, kw_only=True)
class PushOptions(VerbSection):
    """The repository that a model is put into."""

    title: ClassVar[str] = "Push"

    private: bool = option(False, "of a new repository: only its owners see it")
    message: str = option("Upload a model with mega", "of the commit")
    license: str | None = option(None, "of the model card, such as apache-2.0")
    base_model: str | None = option(None, "of the model card: the name of the model that this one was made from")
    card: Path | None = option(None, "a model card to upload instead of the one that is written")
