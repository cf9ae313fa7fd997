"""`mega preprocess`: convert text to token files."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from mega.core.config.sections import TokenizerConfig
from mega.core.data.options import PreprocessOptions

if TYPE_CHECKING:
    from mega.core.data.preprocessing.preprocess import Report


def run(
    texts: PreprocessOptions,
    tokenizer: TokenizerConfig,
) -> int:
    """Convert text to token files, PREFIX_KEY_document.bin and .idx, for training with --data-path.

    With any number of workers, the files are byte for byte equal to those that Megatron-LM writes. See also: mega data.
    """
    from mega.core.data.preprocessing.preprocess import Sentences, preprocess
    from mega.core.data.preprocessing.progress import shown
    from mega.core.data.sources import STDIN, find

    index, count = _shard(texts.shard)
    # These options default to None, so that a flag is recognised as given even if its value is the real default.
    of_sentences = {
        "--sentence-splitter": texts.sentence_splitter,
        "--lang": texts.lang,
        "--keep-newlines": texts.keep_newlines or None,
    }
    for flag, value in of_sentences.items() if not texts.split_sentences else ():
        if value is not None:
            raise ValueError(f"{flag}: sets how sentences are cut; give --split-sentences too, or leave it out")
    sentences = Sentences(
        splitter=texts.sentence_splitter or "punkt", language=texts.lang or "english", keep_newlines=texts.keep_newlines
    )
    with shown(sum(path.stat().st_size for path in find(texts.input) if path != STDIN)) as progress:
        report = preprocess(
            texts.input,
            texts.output_prefix if count == 1 else f"{texts.output_prefix}_{index + 1:05}-of-{count:05}",
            dataclasses.asdict(tokenizer),
            json_keys=texts.json_keys or ["text"],
            append_eod=texts.append_eod,
            parse_special_tokens=texts.parse_special_tokens,
            workers=texts.workers,
            on_error=texts.on_error,
            text_lines=texts.text_lines,
            sentences=sentences if texts.split_sentences else None,
            shard=(index, count),
            resume=texts.resume,
            overwrite=texts.overwrite,
            progress=progress,
        )
    _print(report, texts.parse_special_tokens)
    return 0


def _print(report: Report, parsed: bool) -> None:
    for reason in report.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    print(f"{report.documents:,} documents, {report.tokens:,} tokens, {report.skipped:,} lines skipped")
    if report.spelled:
        treatment = (
            "tokens, by --parse-special-tokens" if parsed else "text; --parse-special-tokens makes tokens of them"
        )
        print(f"{report.spelled:,} documents spell special tokens such as {report.spells}, which are {treatment}")
    for line in report.notes:
        print(f"mega: {line}", file=sys.stderr)
    for name in report.outputs:
        print(f"{name}.bin {name}.idx")
    if report.kept:
        print("made before, of the same inputs and settings, and kept; --overwrite makes them again")


def _shard(text: str) -> tuple[int, int]:
    """Return (index from 0, number of shards): 2/8 -> (1, 8)."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {text}: must be i/N with 1 <= i <= N, such as 2/8")
    return int(index) - 1, int(count)
