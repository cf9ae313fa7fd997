"""Rules that apply if a tokenizer or chat template differs from that of the weights or the token files.

A tokenizer is identified by a fingerprint of its kind, vocabulary and behaviour (`Tokenizer.identity`). Token files
store this fingerprint. For weights, the fingerprint is computed from the tokenizer files next to the weights. A chat
template is identified by its text.

RULES contains all decisions; subcommands call `judge`. This module does not depend on files or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mega.core.text.probes import PROBES
from mega.core.text.tokenizer import Tokenizer, TokenizerIdentity

Verdict = Literal["refused", "reported", "taken"]
Case = Literal["token files", "tokenizer", "earlier version", "template", "no template"]
"""Kinds of differences between tokenizers or templates.

token files: the token files were encoded with a tokenizer that differs from the run's tokenizer. tokenizer: the
tokenizer given by flags differs from the tokenizer of the weights. earlier version: the tokenizers are equal, but an
earlier version of mega computed one of the fingerprints. template: the chat template differs from the template of the
weights. no template: the chat template is missing."""

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
    "data inspect": {"token files": "reported", "earlier version": "taken"},
}
"""Subcommand -> case -> verdict. Cases that are not listed for a subcommand cannot occur. The rules of `serve` and
`generate` also apply to an adapter's tokenizer, and the rules of `serve` to an adapter's template. `eval` needs a
template only with --apply-chat-template. `data merge` rejects the case "earlier version", because fingerprints computed
by different versions may belong to different tokenizers."""

ALLOW = "--allow-tokenizer-mismatch"


def judge(verb: str, case: Case, difference: str, *, advice: str = "", allowed: bool = False) -> str | None:
    """Apply the rule for a difference. Return a message for the user, or None if the difference is accepted silently.

    advice: flags or files to give instead. allowed: whether --allow-tokenizer-mismatch was given, in which case the
    message is returned instead of raised.
    Errors: ValueError if the rule rejects the difference.
    """
    verdict = RULES[verb][case]
    if verdict == "refused" and not allowed:
        raise ValueError(f"{difference}; {advice}" if advice else difference)
    return None if verdict == "taken" else difference


def other_files(label: str, noted: TokenizerIdentity | None, given: Tokenizer | None) -> str | None:
    """Describe how `given` differs from the tokenizer that encoded token files. Return None if the tokenizers are
    equal, or if one of them is unknown."""
    if noted is None or given is None or given.made(noted):
        return None
    return f"{label}: was made with {noted}, but the tokenizer given is {given.identity()}"


def cuts_alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers, possibly of different kinds, have the same number of entries, the same ids for probe
    texts, and the same ids for their common control tokens."""
    if first.made(second.identity()):
        return True
    names, other_names = ({**each.special_tokens(), **each.vocabulary_tokens()} for each in (first, second))
    if first.vocab_size != second.vocab_size or any(
        names[name] != other_names[name] for name in names.keys() & other_names
    ):
        return False
    batches = (each.encode_batch(PROBES) for each in (first, second))
    (ids, offsets), (other_ids, other_offsets) = batches
    return bool(ids.tolist() == other_ids.tolist() and offsets.tolist() == other_offsets.tolist())


def other_tokenizer(place: object, own: Tokenizer, given: Tokenizer) -> str | None:
    """Describe how `given`, the tokenizer that flags select, differs from `own`, the tokenizer of the weights at
    `place`. Return None if they are equal."""
    if given.made(own.identity()):
        return None
    own_identity, given_identity = own.identity(), given.identity()
    return f"--tokenizer {given.kind}: {place} has a tokenizer of its own, {own_identity}, and this is {given_identity}"
