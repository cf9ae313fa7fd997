"""A dump of Wikipedia made by hand: its text, next to what WikiExtractor 3.1.0 (--no-templates) makes of it."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from mega import cli
from mega.core.corpus.folder import RunOptions
from mega.core.corpus.run import process
from mega.core.corpus.wikipedia import Wikipedia
from mega.core.corpus.wikitext import Article, parser, standard_punctuation

pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed: pip install '.[corpus]' in a clone")

HARBOUR = """{{Short description|A place}}
{{Infobox place
| name = Harbour
| size = {{convert|3|km}}
}}
[[File:Boats.jpg|thumb|left|Boats in the [[harbour]] at night]]
'''Harbour''' is a ''small'' [[town|old town]] on the [[coast]].<ref name="a">A book.</ref> It has [[market]]s.

It was built in {{circa|1200}} by fishers&nbsp;and farmers<ref name="a" />; see [http://example.com the plan] and
http://example.org/x too.

== History ==
The first wall was ''low''.<!-- a comment --> It fell in 1300.

=== Later years ===
* first item
** nested [[item]]
# one
; Term : definition

{| class="wikitable"
|-
! Year !! Boats
|-
| 1900 || 12
|}

After the table a sentence &ndash; with a dash.

== Mathematics ==
The area is <math>a^2 + b</math>, then <code>x = 1</code> and H<sub>2</sub>O; <math>c</math>.

<gallery>
File:A.jpg|First
</gallery>

== References ==
{{reflist}}

[[Category:Towns]]
[[de:Hafen]]
"""
WALL = """A '''wall''' is built of [[stone]].
<blockquote>It stands.</blockquote>
{{quote|Stone stays.}}

Second paragraph, "with quotes" and '''''both''''' marks. See [[Harbour#History|its history]] and [[:Category:Walls]].

<pre>
raw  text
</pre>
It has<br/> a break. <small>small words</small> <span style="x">It is spanned</span>.

__NOTOC__
== Empty section ==

== See also ==
* [[Harbour]]
"""
EXTRACTED = {
    "Harbour": 'Harbour is a "small" old town on the coast. It has markets.\n'
    "It was built in by fishers\xa0and farmers; see the plan and\nhttp://example.org/x too.\n"
    'History.\nThe first wall was "low". It fell in 1300.\n'
    "Later years.\nAfter the table a sentence \u2013 with a dash.\n"
    "Mathematics.\nThe area is formula_1, then codice_1 and H2O; formula_2.",
    "Wall": "A wall is built of stone.\nIt stands.\n"
    'Second paragraph, "with quotes" and both marks. See its history and.\n'
    "It has a break. It is spanned.",
}
"""What WikiExtractor makes of them, but for the differences of docs/corpora.md, which these pages leave out."""


def page(title: str, number: int, text: str, ns: int = 0, redirect: str = "") -> str:
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{ns}</ns>\n    <id>{number}</id>\n{redirect}    <revision>\n"
        f"      <id>{number * 100}</id>\n      <contributor><username>A</username><id>7</id></contributor>\n"
        f'      <text bytes="1" xml:space="preserve">{escape(text)}</text>\n    </revision>\n  </page>\n'
    )


def dump(folder: Path) -> Path:
    pages = [
        page("Harbour", 10, HARBOUR),
        page("Old name", 11, "#REDIRECT [[Harbour]]", redirect='    <redirect title="Harbour" />\n'),
        page("Template:Circa", 12, "about {{{1}}}", ns=10),
        page("Wall", 14, WALL),
    ]
    site = "  <siteinfo>\n    <base>https://en.wikipedia.org/wiki/Main_Page</base>\n    <namespaces>\n"
    site += '      <namespace key="10" case="first-letter">Template</namespace>\n    </namespaces>\n  </siteinfo>\n'
    text = f'<mediawiki xml:lang="en">\n{site}{"".join(pages)}</mediawiki>\n'
    path = folder / "pages-articles.xml.bz2"
    path.write_bytes(bz2.compress(text.encode()))
    (folder / "plain.xml").write_text(text)
    return path


def test_text_is_wikiextractors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["corpus", "wikipedia", "--input", str(dump(tmp_path)), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, "--keep-punctuation"]) == 0
    assert "4 documents, 2 kept, 1 dropped: not an article, 1 dropped: redirect" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["title"]: row["text"] for row in rows} == EXTRACTED
    assert [list(row) for row in rows] == [["id", "revid", "url", "title", "text"]] * 2
    assert (rows[0]["id"], rows[0]["revid"], rows[0]["url"]) == (
        "10",
        "1000",
        "https://en.wikipedia.org/wiki?curid=10",
    )


def test_a_dump_in_parts_and_not_packed_gives_the_same(tmp_path: Path) -> None:
    path = dump(tmp_path)
    for name, source, workers in (("a", path, 1), ("b", path, 2), ("c", tmp_path / "plain.xml", 1)):
        options = RunOptions(output=tmp_path / name, part_bytes=500, workers=workers)
        assert process([source], Wikipedia(), options).counts.kept == 2
    files = [{one.name: one.read_bytes() for one in (tmp_path / name).glob("0*")} for name in "abc"]
    assert files[0] == files[1] == files[2] or b"".join(files[0].values()) == b"".join(files[2].values())
    cut = tmp_path / "cut.xml"
    cut.write_bytes((tmp_path / "plain.xml").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut\.xml.*: ends inside a page"):
        process([cut], Wikipedia(), RunOptions(output=tmp_path / "d.jsonl"))


def test_a_page_that_is_not_xml_is_named(tmp_path: Path) -> None:
    first = "<page><title>A</title><id>1</id><revision><id>2</id><text/></revision></page>"
    (tmp_path / "a.xml").write_text(f"{first}<page><title>B</page>")
    with pytest.raises(ValueError, match=r"a\.xml: page 2: not a page of a Wikipedia dump \(mismatched tag"):
        process([tmp_path / "a.xml"], Wikipedia(least=0), RunOptions(output=tmp_path / "d.jsonl"))


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("[[CSI: Miami]] and [[fr:Miami]][[Image:a.png|b]] end", "CSI: Miami and end"),
        ("a ( {{lang|de|b}} ) c", "a c"),
        ("{{{argument|default}}} x", "x"),
        ("== A ==\n=== B ===\ntext\n== C ==\n", "A.\nB.\ntext"),
        (":: indented", "indented"),
        ("<nowiki>[[not a link]]</nowiki>", "[[not a link]]"),
        ("AT&amp;T &lt;b&gt;", "AT&T <b>"),
        ("unclosed '''bold and [[link", "unclosed bold and [[link"),
        ("----\n...\nx", "x"),
    ],
)
def test_markup(markup: str, text: str) -> None:
    assert Article(parser()).text(markup) == text


def test_punctuation_and_sentences(tmp_path: Path) -> None:
    assert (
        standard_punctuation("\u201cIt\u2019s \u00ab3\u20134\u00bb\u2026\u201d \u2014\u00a0yes")
        == '"It\'s "3-4"..." - yes'
    )
    pytest.importorskip("sentencex", reason="sentencex is not installed: pip install '.[data]' in a clone")
    step = Wikipedia(sentences="english", splitter="sentencex")
    process([dump(tmp_path)], step, RunOptions(output=tmp_path / "out.jsonl"))
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["text"]
    assert first.startswith('Harbour is a "small" old town on the coast.\nIt has markets.\nIt was built')
