"""The options of `mega parity`: which layouts the command compares, and the output file for the result rows. This
module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mega.core.config.option import VerbSection, option


@dataclass(frozen=True, kw_only=True)
class ParityOptions(VerbSection):
    """Which layouts `mega parity` compares, and in which precision."""

    title: ClassVar[str] = "Proof"

    layouts: str | None = option(
        None, "compare only these layouts, such as tp2pp2dp2sp,dp4-zero1, with GPT and Llama or with --family"
    )
    all: bool = option(False, "compare every layout, instead of one of each kind")
    family: (
        Literal[
            "gpt",
            "gpt-untied",
            "gpt-experts",
            "gpt-experts-dropping",
            "gpt-retriever",
            "llama",
            "llama-tied",
            "llama-experts",
            "llama-experts-dropping",
            "llama-retriever",
            "bert",
            "bert-post",
            "t5",
        ]
        | None
    ) = option(None, "compare only with this model family, or with a variant of it, such as gpt-experts")
    dtype: Literal["fp64", "fp32"] = option("fp64", "precision of the proof")
    json: str | None = option(
        None, "append each row to this file, and skip layouts that already have a row for this commit"
    )
