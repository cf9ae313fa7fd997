"""Texts for which a faster encoder must produce the same ids as the reference encoder. The texts test boundaries of
words, scripts and characters."""

from __future__ import annotations

_PIECES = (
    "The quick brown fox",
    "don't they're I'LL we've he'd it's 'tis ''s",
    "  two  spaces   three",
    "\n\n\tindent\r\n",
    " trailing ",
    "3.14159 1,000,000 x2 2x \u2167 \u00bd \u0663\u0664 \u4e00\u4e8c",
    "na\u00efve fa\u00e7ade \u00dcn\u00efc\u00f6d\u00e9 e\u0301 \u212b",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u4e2d\u6587\u5b57\u7b26\u3002",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f3f3\ufe0f",
    "a\u200bb\u200dc\ufeffd\u00ad",
    "\x00\x01\x7f\x1b[0m",
    "<|endoftext|>",
    "<s></s><unk>[MASK]",
    "http://a.b/c?d=e&f#g",
    "snake_case camelCase __init__",
    '{"k": [1, 2]}\\n',
    "\u2014\u2014\u2026\u201cquotes\u201d\u2018\u2019\u00ab\u00bb",
    "\u3000wide\u2003space\u00a0nbsp\u2028line\x85next",
    "a" * 33,
    "\u0915 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001d400\U00010348\U000e0001",
    "\u0378\uffff\ufffd",
    "=====----- ***",
    "\u0149 \ufb01 \u00df \u0130 \u0131",
)
_NEIGHBOURS = tuple(zip(_PIECES, _PIECES[5:] + _PIECES[:5], strict=True))

PROBES: tuple[str, ...] = (
    "",
    *_PIECES,
    *(left + glue + right for glue in ("", " ", "\n", "\u00e9") for left, right in _NEIGHBOURS),
    *(piece * 3 for piece in _PIECES),
    *(f" {piece[::-1]}'s {number}" for number, piece in enumerate(_PIECES)),
)
