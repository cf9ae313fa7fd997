"""`mega report`: a run or an evaluation as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega.core.files import check_file, whole_file


def run(
    record: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run's directory, its file of metrics, or an evaluation's JSON")
    ],
    out: Annotated[str | None, typer.Option("--out", "-o", help="the page [report.html there, or FILE.html]")] = None,
) -> int:
    """Write one self-contained page: loss, rate, norms, throughput, memory, events and samples; or a score.

    It shows what is there: a run that still trains is reported as far as it has come.
    """
    from mega.core.report.page import page
    from mega.core.report.read import read

    found = read(record)
    target = out or str(record / "report.html" if record.is_dir() else record.with_suffix(".html"))
    check_file("--out", target)
    with whole_file(Path(target)) as file:
        file.write(page(found).encode())
    print(target)
    return 0
