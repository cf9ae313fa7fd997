"""`mega report`: show a run, an evaluation or a corpus as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega.core.files import check_file, whole_file


def run(
    record: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run's directory, its metrics, an evaluation's JSON, or a corpus")
    ],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="output file [report.html in the directory, or FILE.html]")
    ] = None,
) -> int:
    """Write one self-contained HTML page. For a run, it shows loss, learning rate, norms, throughput, memory, events
    and samples; for an evaluation, the score; for a corpus, each step's counts of documents by reason, length, language
    and domain, with examples.

    A run may still be training; the page then shows the steps up to now.
    """
    from mega.core.report.page import page
    from mega.core.report.read import CorpusRecord, read

    report_data = read(record)
    in_directory = record.is_dir() and not isinstance(report_data, CorpusRecord)  # a corpus folder gets no report.html
    target = out or str(record / "report.html" if in_directory else record.with_name(f"{record.name}.html"))
    if not out and not in_directory and not isinstance(report_data, CorpusRecord):
        target = str(record.with_suffix(".html"))
    check_file("--out", target)
    with whole_file(Path(target)) as file:
        file.write(page(report_data).encode())
    print(target)
    return 0
