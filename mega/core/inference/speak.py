"""A prompt and its continuation on stdout, as they come: what `mega generate` does."""

from __future__ import annotations

from pathlib import Path

from mega.core.checkpoint.own.store import locate
from mega.core.device import Device
from mega.core.inference.generate import generate
from mega.core.inference.load import load_model, load_tokenizer
from mega.core.inference.request import RequestError, Sampling


def speak(
    load: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Print `prompt` and up to `tokens` tokens after it. An empty prompt begins a document.

    Errors: ValueError naming flag, file or tensor.
    """
    try:  # found here, before any text is on its way
        how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except RequestError as error:
        raise ValueError(f"--{error.field.replace('_', '-')} {error.value}: {error.rule}") from None
    checkpoint = locate(load)
    tokenizer = load_tokenizer(checkpoint)
    start = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
    ids = tokenizer.encode(prompt) or ([start] if start is not None else [])
    # Decoders drop the blank in front of the first piece, so the new text is what follows the prompt's own pieces.
    # After an empty prompt the first new piece is the text's first.
    before = ids if prompt else []
    start_of_new = len(tokenizer.decode(before))
    stage = load_model(checkpoint, Device.choose(device).torch)
    print(prompt, end="", flush=True)
    found: list[int] = []
    shown = ""
    for token in generate(stage, ids, tokens, how, seed=seed, end=tokenizer.eod, known=tokenizer.vocab_size):
        if token == tokenizer.eod:
            break
        found.append(token)
        text = tokenizer.decode([*before, *found])[start_of_new:]
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character waits for its other half
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode([*before, *found])[start_of_new + len(shown) :])
