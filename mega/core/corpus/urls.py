"""Applies OpenWebText's five tests, in their original order, to select URLs that are worth downloading. The reason for
dropping a URL is recorded.

A URL is dropped if its domain (the registered label, without suffix and subdomain) or its extension is blocked, or if
it is too short, malformed, or a duplicate of a kept URL. Source: Megatron-LM 23.06,
tools/openwebtext/blacklist_urls.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, drop_document, keep_document, stage_folder
from mega.core.corpus.repeats import keys_of, mark_repeats, notes, repeats

REASONS = ("", "domain", "extension", "short", "malformed", "duplicate")
SHORTEST = 9
_HOSTS = 1 << 16

DOMAINS = frozenset(
    # pictures
    "500px artstation awwni deviantart explosm flickr gfycat gifsound gifsoup giphy gyazo imageshack imgflip imgur "
    "karmadecay kym-cdn livememe magaimg memegenerator minus morejpeg photobucket pinimg pinterest pixiv prntscr puu "
    "qkme quickmeme sli tinypic xkcd "
    # video and audio
    "bandcamp dailymotion liveleak reverb soundcloud soundgasm spotify streamable twitch vid vimeo vine vocaroo youtu "
    "youtube youtubedoubler ytimg "
    # social networks and forums
    "discord discordapp facebook fbcdn instagram radd redd reddit reddit-stream redditlog redditmedia reddituploads "
    "tumblr twimg twitter "
    # shops
    "aapks amazon apple coinscalendar dlapkandroid ebay edealinfo hotdealstar kryptocal pcpartpicker vkaao walmart "
    # platforms
    "akamaihd dropbox github google nocookie wikimedia wikipedia "
    # games and others
    "artifactfire battleforthenet futhead gatopardo gunprime lmgtfy minorplanetcenter mobafire reupp roanoke "
    "rollingstone strawpoll timeanddate touhouradio voyagefusion wciu zillexplorer "
    # adult sites
    "e621 erome eroshare furaffinity imagefap pornhub redtube spankbang xhamster xvideos".split()
)

_ENDS = (
    "3gp aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv gz iso jar jpeg jpg js log mid midi mkv "
    "mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt pptx psd py qt ram rar sql svg swf tar.gz tar tgz tiff ttf "
    "txt wav webm wma wmv xls xlsx xml xz zip"
).split()
EXTENSIONS = tuple(f".{end}" for end in ["7z", "ai", *_ENDS])
MEGATRON_EXTENSIONS = tuple(f".{end}" for end in ["7z.ai", *_ENDS])
"""Extensions in Megatron-LM's list, where a missing comma joins the first two extensions."""

_WELL_FORMED = re.compile(
    r"https?://"
    r"(?:(?:[A-Z0-9](?:[A-Z0-9-]{0,61}[A-Z0-9])?\.)+(?:[A-Z]{2,6}|[A-Z0-9-]{2,})\.?|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?(?:/|[/?]\S+)?",
    re.IGNORECASE,
)


def url_test(domains: Iterable[str], extensions: Sequence[str], *, any_case: bool = True) -> Callable[[str], int]:
    """Return a function that maps a URL to the index in REASONS of the first test that the URL fails; 0 if it passes
    all tests.

    any_case: whether domains are compared in lower case, so that http://IMGUR.com matches imgur. Errors: ValueError if
    tldextract is not installed.
    """
    label, blocked, ends = _registered_label(any_case), frozenset(domains), tuple(extensions)
    well_formed = _WELL_FORMED.fullmatch

    def test(url: str) -> int:
        if label(url) in blocked:
            return 1
        if url.partition("?")[0].lower().endswith(ends):
            return 2
        if len(url) < SHORTEST:
            return 3
        return 0 if well_formed(url) else 4

    return test


def _registered_label(any_case: bool) -> Callable[[str], str]:
    """Return a function that maps a URL to its registered label, such as "bbc" for http://news.bbc.co.uk/.

    The function uses tldextract's built-in list of suffixes, and caches the labels of recent hosts.
    """
    try:
        import tldextract
        from tldextract.remote import lenient_netloc
    except ImportError:
        raise ValueError("mega corpus urls: needs tldextract; pip install '.[corpus]' in a clone") from None
    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    extract("http://example.com")  # load the built-in list

    @lru_cache(_HOSTS)
    def of_host(host: str) -> str:
        label = str(extract(host).domain)
        return label.lower() if any_case else label

    return lambda url: of_host(lenient_netloc(url))


def listed(flag: str, path: Path) -> list[str]:
    """Return the non-blank lines of a file in lower case. Errors: ValueError naming flag and file."""
    try:
        entries = [line.strip().lower() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error})") from None
    if not entries:
        raise ValueError(f"{flag} {path}: holds no line; must have one entry a line")
    return entries


@dataclass(frozen=True, kw_only=True)
class Urls:
    """Keeps documents whose URL passes all tests. A document is a plain line that is a URL, or a JSON line with a
    URL."""

    name: ClassVar[str] = "urls"
    stages: ClassVar[int] = 1
    key: str = "url"
    """JSON key of the URL."""
    domains: tuple[str, ...] = tuple(sorted(DOMAINS))
    """Registered domain labels, such as "bbc", whose URLs are dropped."""
    extensions: tuple[str, ...] = EXTENSIONS
    """File extensions whose URLs are dropped."""
    any_case: bool = True
    """Whether to compare domains in lower case."""
    keep_duplicates: bool = False
    """Whether to keep documents with a repeated URL. Several documents may come from one page and have the same URL."""

    def survey(self, stage: int, folder: Path) -> Survey:
        """Return the survey function, which tests every URL and computes a key for each URL that passes."""
        test = url_test(self.domains, self.extensions, any_case=self.any_case)

        def survey(documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
            urls = [document.text.strip() for document in documents]
            outcomes = [test(url) for url in urls]
            passed = (None if outcome else url.encode() for url, outcome in zip(urls, outcomes, strict=True))
            return {"outcomes": np.array(outcomes, np.uint8), "keys": keys_of(passed)}

        return survey

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Mark documents whose URL occurred before."""
        mark_repeats(stage_folder(folder, stage), parts)

    def judge(self, folder: Path) -> Work:
        """Return the function for the final pass, which drops documents whose URL failed a test or is a duplicate."""

        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            outcomes: list[int] = []
            for index, document in enumerate(documents):
                if not index:
                    outcomes = self._outcomes(stage_folder(folder, 0), document.part)
                yield drop_document(REASONS[outcomes[index]]) if outcomes[index] else keep_document(document)

        return judge

    def _outcomes(self, folder: Path, part: str) -> list[int]:
        outcomes = notes(folder, part)["outcomes"].copy()
        if not self.keep_duplicates:
            outcomes[repeats(folder, part)] = REASONS.index("duplicate")
        return [int(outcome) for outcome in outcomes]
