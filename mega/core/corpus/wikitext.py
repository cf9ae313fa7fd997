"""Extracts the prose of a Wikipedia article. The markup is parsed by mwparserfromhell.

Paragraphs, the words of links, headings of sections that have text (written as "History.") and quoted italics are kept.
Templates, tables, lists, references, files, categories, galleries and comments are left out. A formula becomes
`formula_1`, and code becomes `codice_1`. These rules follow the package wikiextractor, with which most Wikipedia
corpora were made; docs/corpora.md lists the differences. This module does not depend on the format of the dump.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mwparserfromhell.nodes import Node, Tag, Wikilink
    from mwparserfromhell.wikicode import Wikicode

_NAMESPACES = re.compile(
    r"\s*:?\s*(?:(?i:file|image|media|category|template|help|portal|user|talk|special|wikipedia|mediawiki|module|draft|"
    r"[a-z]+ talk)|[a-z]{2,3}(?:-[a-z-]+)?)\s*:"
)
"""Matches a link to a page that is not an article, or to an article in another language."""
_DROPPED_TAGS = frozenset(
    "gallery timeline noinclude pre table tr td th caption div form input select option textarea ul ol menu dir ref "
    "references img imagemap source small syntaxhighlight score chem hiero graph mapframe templatestyles".split()
)
_PLACEHOLDERS = {"math": "formula", "code": "codice", "ce": "formula"}
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
_BLANK_BEFORE = re.compile(r" +(?=[,.;:!?)](?:\s|$))")
_EMPTY_BRACKETS = re.compile(r" ?\((?:[\s,;:]|(?:or|and)\s)*\)")
_STANDARD = str.maketrans(
    {
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2018\u2019\u201a\u2032`\u00b4", "'"),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        "\u2014": " - ",
        "\u2026": "...",
        **dict.fromkeys("\u00a0\u2009\u202f\u3000", " "),
    }
)


def parser() -> Callable[[str], Wikicode]:
    """Return the parse function of mwparserfromhell. Errors: ValueError if mwparserfromhell is not installed."""
    try:
        import mwparserfromhell
    except ImportError:
        raise ValueError("mega corpus wikipedia: needs mwparserfromhell; pip install '.[corpus]' in a clone") from None
    parse: Callable[[str], Wikicode] = mwparserfromhell.parse
    return parse


class Article:
    """Converts one article to text."""

    def __init__(self, parse: Callable[[str], Wikicode]) -> None:
        self._parse = parse
        self._counts: dict[str, int] = {}

    def text(self, wikitext: str) -> str:
        """Return the text of an article, with one line per paragraph or heading."""
        return "\n".join(_paragraphs(self._plain(self._parse(wikitext).nodes)))

    def _plain(self, nodes: Iterable[Node]) -> str:
        return "".join(map(self._node, nodes))

    def _node(self, node: Any) -> str:
        match type(node).__name__:
            case "Text":
                return str(node.value)
            case "Wikilink":
                return self._link(node)
            case "ExternalLink":
                if not node.brackets:
                    return str(node.url)
                return self._plain(node.title.nodes) if node.title else ""
            case "Tag":
                return self._tag(node)
            case "HTMLEntity":
                return str(node.normalize())
            case "Heading":
                return f"\n{'=' * node.level}{self._plain(node.title.nodes).strip()}{'=' * node.level}\n"
        return ""  # templates, template arguments, comments

    def _link(self, link: Wikilink) -> str:
        title = str(link.title)
        if _NAMESPACES.match(title):
            return ""
        return self._plain(link.text.nodes) if link.text is not None else title.lstrip(":")

    def _tag(self, tag: Tag) -> str:
        name = str(tag.tag).strip().lower()
        if tag.wiki_markup and name in ("li", "dt", "dd", "hr"):
            return str(tag.wiki_markup)
        if name in _DROPPED_TAGS:
            return ""
        if name in _PLACEHOLDERS:
            kind = _PLACEHOLDERS[name]
            self._counts[kind] = self._counts.get(kind, 0) + 1
            return f"{kind}_{self._counts[kind]}"
        inside = self._plain(tag.contents.nodes) if tag.contents is not None else ""
        if name == "i" and inside and not _is_bold(tag):
            return f'"{inside}"'
        if name == "blockquote":
            return f"\n{inside}\n"
        return inside


def _is_bold(tag: Tag) -> bool:
    """Whether the whole content of a tag for italics is bold."""
    nodes: list[Any] = tag.contents.nodes
    return len(nodes) == 1 and type(nodes[0]).__name__ == "Tag" and str(nodes[0].tag) == "b"


def _paragraphs(text: str) -> Iterable[str]:
    """Yield lines of prose. A heading precedes the first line of its section. Headings of sections without prose are
    omitted."""
    headings: dict[int, str] = {}
    for line in text.split("\n"):
        line = _EMPTY_BRACKETS.sub("", _MAGIC_WORD.sub("", line)).strip(" \t")
        level = len(line) - len(line.lstrip("="))
        if level and line.endswith("=" * level) and len(line) > 2 * level:
            headings = {heading_level: title for heading_level, title in headings.items() if heading_level < level}
            headings[level] = line[level:-level].strip()
            continue
        if not line or line[0] in "*#;{|}!" or not line.strip(".-"):
            continue
        line = _BLANK_BEFORE.sub("", re.sub("'{2,}", "", line).lstrip(":").strip(" "))
        if line.startswith("(") and line.endswith(")"):
            continue
        yield from (f"{headings[heading_level]}." for heading_level in sorted(headings))
        headings = {}
        yield re.sub(" {2,}", " ", line)


def standard_punctuation(text: str) -> str:
    """Replace typographic quotes, dashes, dots and spaces with ASCII.

    >>> standard_punctuation("\u201cIt\u2019s 3\u20134\u2026\u201d")
    '"It\\'s 3-4..."'
    """
    return re.sub(" {2,}", " ", text.translate(_STANDARD))
