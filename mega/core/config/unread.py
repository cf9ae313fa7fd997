"""Find options that have no effect in a run because a feature is disabled. Each of these options causes a message, not
an error.

Megatron-LM's scripts set many such options, for example `--sequence-parallel` on one tensor rank. The property
`read_with` of an option (config/option.py) contains the options that make it effective; TOKENIZERS contains the files
that a type of tokenizer reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mega.core.config.option import Range
from mega.core.config.run import Options, RunConfig, entries, flag_of, is_set_to, value_of
from mega.core.config.schema import Entry
from mega.core.config.sections import ALSO_READ, TOKENIZER_FILES, TOKENIZERS


def unread(options: Options, bench: str | None = None) -> Iterator[str]:
    """Yield a message for each option of a run whose value differs from the default and has no effect. bench: report
    only options with this value of `Option.bench`.

    >>> from mega.core.config.run import updated
    >>> print(*unread(updated(Options(), {"sequence_parallel": True, "hysteresis": 4, "tp": 1})), sep="\\n")
    --hysteresis 4: changes nothing without --dtype fp16
    --sequence-parallel: changes nothing without --tp of at least 2
    """
    kind = options.tokenizer.tokenizer
    for name, entry in entries().items():
        value = value_of(options, name)
        if value == entry.default or (bench is not None and entry.option.bench != bench):
            continue
        if not is_read(options, entry):
            yield f"{_shown(entry, value)}: changes nothing without {_listed(entry.option.read_with)}"
        elif kind is None or name not in TOKENIZER_FILES:
            continue
        elif name not in (*TOKENIZERS[kind], *ALSO_READ.get(kind, ())):
            yield f"{_shown(entry, value)}: changes nothing, {kind} does not read it"


def is_read(options: Options | RunConfig, entry: Entry) -> bool:
    """Return whether an option has an effect: at least one of the options in its `Option.read_with` has one of the
    values listed there, or `Option.read_with` is empty."""
    readers = entry.option.read_with
    return not readers or any(is_set_to(options, other, valid) for other, valid in readers.items())


def _shown(entry: Entry, value: object) -> str:
    return f"{entry.flag if value else entry.off}" if isinstance(value, bool) else f"{entry.flag} {value}"


def _listed(readers: Mapping[str, tuple[str, ...] | Range]) -> str:
    """Return the options and values of `Option.read_with` as text."""
    words = []
    for other, valid in readers.items():
        rule = f"of {valid.rule}" if isinstance(valid, Range) else " or ".join(valid)
        words.append(f"{flag_of(other)} {rule}".strip())
    return " or ".join(words)
