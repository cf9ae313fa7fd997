"""`mega retro build | query | inspect`: build a database of chunks, and find the neighbours of a run's samples."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from mega.command_line.help import group
from mega.command_line.options import Command, command
from mega.core.config.run import Options
from mega.core.config.sections import TokenizerConfig
from mega.core.retro.options import DatabaseOptions, LookOptions, QueryOptions

if TYPE_CHECKING:
    from mega.core.retro.stages import Share

app = group("Build the database that a model with a retriever reads.")


@app.command(cls=Command)
@command
def build(database: DatabaseOptions, tokenizer: TokenizerConfig) -> None:
    """Split a corpus into chunks and embed the chunks. Finished blocks are kept, so an interrupted call resumes."""
    from mega.core.retro.database import build_database
    from mega.core.text.build import build as made

    words = made(**dataclasses.asdict(tokenizer))
    build_database(database, words, _share(database.shard), typer.echo)


@app.command(cls=Command)
@command
def query(run: Options, search: QueryOptions) -> None:
    """Find the neighbours of all samples that a run reads. Takes the flags of the run, including --retro."""
    from mega.core.retro.database import query_run

    query_run(run, search, _share(search.shard), typer.echo)


@app.command(cls=Command)
@command
def inspect(run: Options, shown: LookOptions) -> None:
    """Show the number of chunks in a database, the text of a chunk, or the chunks of a sample with their neighbours."""
    from mega.core.retro.database import describe_database

    for line in describe_database(run, shown):
        typer.echo(line)


def _share(text: str) -> Share:
    """Parse the value of --shard: 2/8 is the second of eight shards."""
    from mega.core.retro.stages import Share

    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {text}: must be i/N with 1 <= i <= N, such as 2/8")
    return Share(int(index) - 1, int(count))
