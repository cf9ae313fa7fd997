"""Wraps a `mega corpus` step that processes one document at a time as a step of a datatrove pipeline, for use on a
cluster.

    from datatrove.executor import SlurmPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from mega.core.corpus.clean import Clean
    from mega.core.corpus.datatrove_step import CorpusFilter

    steps = [JsonlReader("raw"), CorpusFilter(Clean(language="de")), JsonlWriter("clean")]
    SlurmPipelineExecutor(steps, tasks=64, time="10:00:00", partition="cpu").run()

This module needs datatrove (`pip install '.[datatrove]'` in a clone), which is optional, so no other module imports
this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from mega.core.corpus.documents import CorpusDocument, CorpusStep, as_line
from mega.core.data.sources import parsed


class CorpusFilter(PipelineStep):  # type: ignore[misc]
    """Applies a step to datatrove's documents. Reasons and counts are added to datatrove's statistics.

    The metadata of a document is passed to the step as additional keys of the JSON line. If a step cuts a document into
    pieces, each piece becomes a separate document.
    """

    type = "FILTER"
    name = "mega corpus"

    def __init__(self, step: CorpusStep) -> None:
        super().__init__()
        self.step = step

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        key = self.step.key or "text"
        waiting: list[Document] = []

        def lines() -> Iterator[CorpusDocument]:
            for document in data:
                waiting.append(document)
                yield CorpusDocument(as_line({**document.metadata, key: document.text}), key=key)

        for result in self.step.load()(lines()):
            document = waiting.pop(0)
            self.stat_update("dropped" if result.reason else "kept")
            if result.reason:
                self.stat_update(f"dropped: {result.reason}")
            for name, count in result.counts.items():
                self.stat_update(name, value=count)
            for number, line in enumerate(result.lines):
                fields = parsed(line)
                name = document.id if len(result.lines) == 1 else f"{document.id}-{number}"
                yield Document(text=fields.pop(key), id=name, media=document.media, metadata=fields)
