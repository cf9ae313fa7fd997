"""Define a step for datatrove pipelines. The step writes token files, one pair per task, identical to those of `mega
preprocess`.

    from datatrove.executor import SlurmPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from mega.core.data.datatrove_step import TokenFiles

    options = {"tokenizer": "GPT2BPETokenizer", "vocab_file": "vocab.json", "merge_file": "merges.txt"}
    SlurmPipelineExecutor([JsonlReader("corpus"), TokenFiles("tokens/corpus", options, append_eod=True)], tasks=64, ...)

Then run `mega data merge tokens --output-prefix corpus_text_document`. No other module imports this module, because
datatrove must be installed (pip install '.[datatrove]' in a clone).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from mega.core.data.indexed import token_dtype
from mega.core.data.preprocessing.preprocess import encoder
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.text.build import build

_TOGETHER = 256


class TokenFiles(PipelineStep):  # type: ignore[misc]
    """A pipeline step that tokenizes documents, writes token files, and passes the documents to the next step with
    `token_count` in their metadata.

    tokenizer: the fields of the configuration's tokenizer section, as arguments of `text.build.build`.
    Task 3 of 8 writes `<output_prefix>_00003-of-00008_text_document`, a single task `<output_prefix>_text_document`.
    """

    name = "mega token files"
    type = "TOKENIZER"

    def __init__(self, output_prefix: str, tokenizer: Mapping[str, Any], *, append_eod: bool = False) -> None:
        super().__init__()
        self.output_prefix, self.tokenizer, self.append_eod = output_prefix, dict(tokenizer), append_eod

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        tokenizer = build(**self.tokenizer)
        encode = encoder(tokenizer, append_eod=self.append_eod)
        part = f"_{rank + 1:05}-of-{world_size:05}" if world_size > 1 else ""
        documents = iter(data)
        prefix, provenance = f"{self.output_prefix}{part}_text_document", {"tokenizer": tokenizer.identity()._asdict()}
        with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), noted=provenance) as writer:
            while block := list(islice(documents, _TOGETHER)):
                with self.track_time("batch"):
                    for document in block:
                        before = writer.tokens
                        writer.extend(*encode([document.text]))
                        document.metadata["token_count"] = writer.tokens - before
                        self.update_doc_stats(document)
                yield from block
