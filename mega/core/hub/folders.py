"""Names of the Hub in place of directories: what they name is fetched, and the folder takes their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mega.core.config.schema import Entry
from mega.core.hub.names import Kind, hub_name


def local_place(flag: str, place: str, report: Callable[[str], None] = lambda line: None) -> str:
    """The folder, or the file, of the model that a name of the Hub names; any other place as it is. report: takes lines
    for the user. Errors: ValueError, OSError."""
    return local_paths(flag, place, "model", report)[0]


def local_paths(flag: str, place: str, kind: Kind, report: Callable[[str], None]) -> list[str]:
    """What takes the place of a name of the Hub: the folder of a model or a tokenizer, the one file that is asked for,
    or the files of a data set's part; any other place as it is. Errors: ValueError, OSError."""
    name = hub_name(place)
    if name is None:
        return [place]
    from mega.core.hub.download import fetched

    found = fetched(flag, name, kind, report)
    whole = kind != "dataset" and name.part is None
    return [str(found.folder)] if whole else list(map(str, found.files))


def with_folders(
    values: Mapping[str, object], options: Iterable[Entry], report: Callable[[str], None] = lambda line: None
) -> dict[str, object]:
    """`values` with the folders of names of the Hub, which are fetched, in place of these names.

    A run's own directory, which --save names too, is still to be made. Errors: ValueError, OSError.
    """
    found = dict(values)
    for entry in options:
        given = values.get(entry.name)
        if entry.option.hub is None or given is None or given == values.get("save"):
            continue
        several = given if isinstance(given, tuple | list) else [given]
        kind = entry.option.hub
        local = [path for each in several for path in local_paths(entry.flag, str(each), kind, report)]
        if local != [str(each) for each in several]:
            found[entry.name] = tuple(local) if entry.many else entry.kind(local[0])
    return found
