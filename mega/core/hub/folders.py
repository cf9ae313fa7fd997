"""Fetch files for options whose value is a name on the Hub, and replace the names with local folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mega.core.config.schema import Entry
from mega.core.hub.names import Kind, hub_name


def local_place(flag: str, place: str, report: Callable[[str], None] = lambda line: None) -> str:
    """Fetch a model if `place` is a name on the Hub, and return the local folder or file. If `place` is not a name on
    the Hub, return it unchanged.

    report: called with each message for the user. Errors: ValueError, OSError.
    """
    return local_paths(flag, place, "model", report)[0]


def local_paths(flag: str, place: str, kind: Kind, report: Callable[[str], None]) -> list[str]:
    """Fetch the files for a name on the Hub, and return local paths: the folder of a model or tokenizer, the single
    file that the name selects, or the files of a data set's split. If `place` is not a name on the Hub, return it
    unchanged. Errors: ValueError, OSError."""
    name = hub_name(place)
    if name is None:
        return [place]
    from mega.core.hub.download import fetched

    download = fetched(flag, name, kind, report)
    whole = kind != "dataset" and name.part is None
    return [str(download.folder)] if whole else list(map(str, download.files))


def with_folders(
    values: Mapping[str, object], options: Iterable[Entry], report: Callable[[str], None] = lambda line: None
) -> dict[str, object]:
    """Return a copy of `values` in which names on the Hub are replaced with the folders of the fetched files.

    A value equal to --save is not replaced, because it is a directory that may not exist yet. Errors: ValueError,
    OSError.
    """
    replaced = dict(values)
    for entry in options:
        value = values.get(entry.name)
        if entry.option.hub is None or value is None or value == values.get("save"):
            continue
        names = value if isinstance(value, tuple | list) else [value]
        kind = entry.option.hub
        local = [path for each in names for path in local_paths(entry.flag, str(each), kind, report)]
        if local != [str(each) for each in names]:
            replaced[entry.name] = tuple(local) if entry.many else entry.kind(local[0])
    return replaced
