"""Masks personal data: email addresses, IP addresses, telephone numbers, and bank cards.

    email   anything@host.tld              -> <EMAIL>
    ip      a public IPv4 address          -> <IP>
    phone   +49 30 901820, (030) 555-0134  -> <PHONE>
    card    13 to 19 digits with a valid check digit (Luhn) -> <CARD>

Only these patterns are matched. Names and postal addresses are not masked.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from mega.core.corpus.documents import CorpusDocument, Result, Work, each, keep_document

PersonalKind = Literal["email", "ip", "phone", "card"]

_PATTERNS: dict[PersonalKind, re.Pattern[str]] = {
    "email": re.compile(r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w-])"),
    "card": re.compile(r"(?<![\d.-])\d(?:[ -]?\d){12,18}(?![\d-])"),
    "ip": re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)"),
    "phone": re.compile(
        r"(?<![\w+.])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d(?:[ .-]?\d){6,11}"
        r"|\(\d{2,4}\)[ .-]?\d{3,4}[ .-]\d{3,4}|\d{3}[ .-]\d{3}[ .-]\d{4})(?![\w-])"
    ),
}
"""Kind of personal data -> pattern, in the order in which the patterns are applied."""


def _public(address: str) -> bool:
    try:
        return ipaddress.IPv4Address(address).is_global
    except ValueError:
        return False


def _is_card(digits: str) -> bool:
    """
    >>> _is_card("4111 1111 1111 1111"), _is_card("4111 1111 1111 1112")
    (True, False)
    """
    numbers = [int(digit) for digit in digits if digit.isdigit()][::-1]
    doubled = [2 * number - 9 * (number > 4) for number in numbers[1::2]]
    return (sum(numbers[::2]) + sum(doubled)) % 10 == 0


_CHECKS: dict[PersonalKind, Callable[[str], bool]] = {"ip": _public, "card": _is_card}


@dataclass(frozen=True, kw_only=True)
class MaskPersonal:
    """Replaces personal data with placeholders."""

    name: ClassVar[str] = "mask-pii"
    key: str = "text"
    kinds: tuple[PersonalKind, ...] = ("email", "ip")
    """Kinds of personal data to mask."""

    def load(self) -> Work:
        """Return the function that masks documents; no library is loaded."""

        def mask(document: CorpusDocument) -> Result:
            counts: dict[str, int] = {}
            text = self.masked(document.text, counts)
            return Result((document.with_text(text),), counts=counts) if counts else keep_document(document)

        return each(mask)

    def masked(self, text: str, counts: dict[str, int]) -> str:
        """Return the masked text, and add the number of replacements of each kind to `counts`."""
        for kind, pattern in _PATTERNS.items():
            if kind not in self.kinds:
                continue
            check = _CHECKS.get(kind)

            def replaced(match: re.Match[str], kind: str = kind, check: Callable[[str], bool] | None = check) -> str:
                if check is not None and not check(match[0]):
                    return match[0]
                counts[f"{kind} masked"] = counts.get(f"{kind} masked", 0) + 1
                return f"<{kind.upper()}>"

            text = pattern.sub(replaced, text)
        return text
