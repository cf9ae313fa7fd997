"""What becomes of a tokenizer, or a manner of speaking, other than the one that belongs to weights or token files.

A model is its weights, its tokenizer and its chat template. Which tokenizer it is, is a fingerprint of its kind, its
vocabulary and its behaviour (`Tokenizer.identity`). Token files note it next to them as they are made; that of weights
is computed from the tokenizer files that came with them. The template of weights is its text.

RULES is the only place that decides; verbs ask `judge`. This file knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mega.core.text.probes import PROBES
from mega.core.text.tokenizer import Tokenizer, TokenizerIdentity

Verdict = Literal["refused", "reported", "taken"]
Case = Literal["token files", "tokenizer", "earlier version", "template", "no template"]
"""Other token files: made by another tokenizer than the run's. Another tokenizer: flags name one that is not the
weights'. Earlier version: the same tokenizer, whose fingerprint an earlier version noted. Another template, or none:
than that of the weights."""

_TRAINS: Mapping[Case, Verdict] = {
    "token files": "refused",
    "tokenizer": "refused",
    "earlier version": "taken",
    "template": "reported",
    "no template": "reported",
}

RULES: Mapping[str, Mapping[Case, Verdict]] = {
    "pretrain": _TRAINS,
    "finetune": _TRAINS,
    "eval": {"token files": "refused", "tokenizer": "refused", "earlier version": "taken", "no template": "refused"},
    "generate": {"tokenizer": "refused", "template": "refused"},
    "serve": {"tokenizer": "refused", "template": "reported", "no template": "reported"},
    "data merge": {"token files": "refused", "earlier version": "refused"},
    "data note": {"token files": "refused", "earlier version": "taken"},
    "data show": {"token files": "reported", "earlier version": "taken"},
}
"""Verb -> case -> what becomes of it; a case that is missing cannot arise there. `serve` and `generate` are given
another tokenizer by an adapter too, and `serve` another template. `eval` needs a template only with
--apply-chat-template. Pairs that versions with different fingerprints noted cannot be told from those of two
tokenizers when they are merged."""

ALLOW = "--allow-tokenizer-mismatch"


def judge(verb: str, case: Case, difference: str, *, advice: str = "", allowed: bool = False) -> str | None:
    """A line for the user on a difference, or None where it is taken as it is.

    advice: what to give instead. allowed: whether --allow-tokenizer-mismatch was given, which makes an error a line.
    Errors: ValueError where it is refused.
    """
    verdict = RULES[verb][case]
    if verdict == "refused" and not allowed:
        raise ValueError(f"{difference}; {advice}" if advice else difference)
    return None if verdict == "taken" else difference


def other_files(label: str, noted: TokenizerIdentity | None, given: Tokenizer | None) -> str | None:
    """How a tokenizer is not the one that made token files; None where it is, or one of them is not known."""
    if noted is None or given is None or given.made(noted):
        return None
    return f"{label}: was made with {noted}, but the tokenizer given is {given.identity()}"


def cuts_alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers, of any kinds, have equally many entries, the same ids of the probe texts, and the same
    ids of the control tokens that both have."""
    if first.made(second.identity()):
        return True
    names, others = ({**each.special_tokens(), **each.vocabulary_tokens()} for each in (first, second))
    if first.vocab_size != second.vocab_size or any(names[name] != others[name] for name in names.keys() & others):
        return False
    found = (each.encode_batch(PROBES) for each in (first, second))
    (ids, offsets), (other_ids, other_offsets) = found
    return bool(ids.tolist() == other_ids.tolist() and offsets.tolist() == other_offsets.tolist())


def other_tokenizer(place: object, own: Tokenizer, given: Tokenizer) -> str | None:
    """How a tokenizer that flags name is not that of the weights at `place`; None where it is."""
    if given.made(own.identity()):
        return None
    mine, other = own.identity(), given.identity()
    return f"--tokenizer {given.kind}: {place} has a tokenizer of its own, {mine}, and this is {other}"
