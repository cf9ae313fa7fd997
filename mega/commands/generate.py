"""`mega generate`: a model's continuation of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    load: Annotated[Path, typer.Option("--load", help="a run's directory (its newest step), or one step in it")],
    prompt: Annotated[str, typer.Option("--prompt", help="the text to continue [a new document]")] = "",
    tokens: Annotated[int, typer.Option("--tokens", help="most tokens to add", min=1)] = 100,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="draw from the k likeliest; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="draw from the likeliest that make up p; 1 is off")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="the same seed gives the same text")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="where tensors live")] = "auto",
) -> int:
    """Continue a text with a trained model. Any checkpoint, of any layout; the tokenizer is the checkpoint's own."""
    from mega.core.inference.speak import speak

    speak(load, prompt, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, device=device)
    return 0
