"""Converts Wikipedia's dump of articles (pages-articles.xml.bz2) to documents with the keys of WikiExtractor's JSON.

    {"id": "12", "revid": "34", "url": "https://en.wikipedia.org/wiki?curid=12", "title": "Harbour", "text": "..."}

This step receives each page of the dump from parts.py as one line of XML. Redirects and pages that are not articles are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from xml.etree import ElementTree

from mega.core.corpus.documents import CorpusDocument, Result, Work, as_line, drop_document, each
from mega.core.corpus.wikitext import Article, parser, standard_punctuation

_NEEDED = ("title", "id", "revision/id", "revision/text")


@dataclass(frozen=True, kw_only=True)
class Wikipedia:
    """Extracts the text of each article."""

    name: ClassVar[str] = "wikipedia"
    key: ClassVar[str] = ""
    site: str = "https://en.wikipedia.org/wiki"  # Prefix of each article's URL
    least: int = 1  # Minimum number of characters in an article
    punctuation: bool = True  # Whether to replace typographic punctuation with ASCII
    sentences: str = ""  # Language for splitting the text into one sentence per line (for BERT); "" does not split
    splitter: str = "punkt"  # Library that splits the text into sentences

    def check(self, document: CorpusDocument) -> None:
        """Check that a document is a page of a dump with the required elements. Errors: ValueError if the check
        fails."""
        page = _page(document)
        if missing := [name for name in _NEEDED if page.find(name) is None]:
            raise ValueError(f"a page without {missing[0]}; must have {', '.join(_NEEDED)}")

    def load(self) -> Work:
        """Load libraries, and return the function that converts pages. Errors: ValueError if a library is not
        installed."""
        parse, cut = parser(), self._sentences()

        def extract(document: CorpusDocument) -> Result:
            page = _page(document)
            if page.findtext("ns", "0") != "0":
                return drop_document("not an article")
            if page.find("redirect") is not None:
                return drop_document("redirect")
            text = Article(parse).text(page.findtext("revision/text") or "")
            text = standard_punctuation(text) if self.punctuation else text
            if len(text) < self.least:
                return drop_document(f"shorter than {self.least} characters")
            number = page.findtext("id", "")
            row = {"id": number, "revid": page.findtext("revision/id", ""), "url": f"{self.site}?curid={number}"}
            return Result((as_line(row | {"title": page.findtext("title", ""), "text": cut(text)}),))

        return each(extract)

    def _sentences(self) -> Callable[[str], str]:
        if not self.sentences:
            return lambda text: text
        from mega.core.text.sentences import splitter

        split = splitter(self.splitter, self.sentences)
        return lambda text: "\n".join(one.strip() for line in text.split("\n") for one in split(line) if one.strip())


def _page(document: CorpusDocument) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(document.line)
    except ElementTree.ParseError as error:
        raise ValueError(f"not a page of a Wikipedia dump ({error})") from None
