"""Build the site of these pages in build/site: `python docs/site.py`. Needs the extra `docs` (Zensical), no network.

1. Pages are copied to build/pages. README.md, CONTRIBUTING.md, CHANGELOG.md and recipes/README.md also become pages.
2. Links are adapted. A link to a file that the site does not contain, such as a source file, becomes the file's name.
3. Each heading gets the anchor that GitHub generates for it, so that a link works in both places.
4. Zensical renders build/pages as configured in mkdocs.yml, and fails if a page or a link is wrong.

This script does not import `mega`. MkDocs with the Material theme reads the same mkdocs.yml.
"""

from __future__ import annotations

import os.path
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/README.md": "recipes.md",
}
"""Page outside docs/ -> name of the page in the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def slug(heading: str) -> str:
    """Return the anchor that GitHub generates for a heading.

    >>> slug("Small work: `--cuda-graph`")
    'small-work---cuda-graph'
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def site_link(source: str, target: str) -> str | None:
    """Return the target of a link in the site; None for a file that the site does not contain.

    source: the page's path in the repository. target: the link, relative to `source`.

    >>> site_link("docs/python.md", "../CHANGELOG.md"), site_link("docs/guides/slurm.md", "../endings.md")
    ('changelog.md', '../endings.md')
    >>> site_link("README.md", "docs/python.md"), site_link("docs/hub.md", "../tests/hub/test_hub.py")
    ('python.md', None)
    """
    path = os.path.normpath(os.path.join(os.path.dirname(source), target))
    page = OUTSIDE.get(path)
    if page is None:
        if not path.startswith("docs/"):
            return None
        page = path.removeprefix("docs/")
    folder = os.path.dirname(OUTSIDE.get(source, source.removeprefix("docs/")))
    return os.path.relpath(page, folder or ".")


def site_text(source: str, text: str) -> str:
    """Return the text of a page with the site's links and anchors. Code blocks are unchanged."""

    def link(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups(default="")
        page = site_link(source, target)
        return label if page is None else f"{image}[{label}]({page}{anchor})"

    def heading(match: re.Match[str]) -> str:
        return f"{match[0]} {{ #{slug(match[1])} }}"

    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    prose = (re.sub(r"^#+ (.*)$", heading, LINK.sub(link, part), flags=re.MULTILINE) for part in parts[::2])
    return "".join(part for pair in zip(prose, [*parts[1::2], ""], strict=True) for part in pair)


def write_pages(folder: Path) -> None:
    """Write all pages and images of the site into a new `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    docs = ROOT / "docs"
    pages = [path.relative_to(ROOT).as_posix() for path in sorted(docs.rglob("*.md"))]
    for source in (*OUTSIDE, *pages):
        page = folder / OUTSIDE.get(source, source.removeprefix("docs/"))
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(site_text(source, (ROOT / source).read_text(encoding="utf-8")), encoding="utf-8")
    for picture in (*docs.rglob("*.png"), *docs.rglob("*.svg")):
        shutil.copy(picture, folder / picture.relative_to(docs))


if __name__ == "__main__":
    write_pages(ROOT / "build/pages")
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=ROOT).returncode)
