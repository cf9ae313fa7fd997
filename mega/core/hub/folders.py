"""Names of the Hub in place of directories: what they name is fetched, and the folder takes their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mega.core.config.schema import Entry
from mega.core.hub.names import Kind, hub_name


def local_place(flag: str, place: str, kind: Kind = "model", report: Callable[[str], None] = lambda line: None) -> str:
    """The folder of what a name of the Hub names; any other place as it is. report: takes lines for the user. Errors:
    ValueError, OSError."""
    name = hub_name(place)
    if name is None:
        return place
    from mega.core.hub.download import fetched

    return str(fetched(flag, name, kind, report))


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
        folders = [local_place(entry.flag, str(each), entry.option.hub, report) for each in several]
        if folders != [str(each) for each in several]:
            found[entry.name] = tuple(folders) if entry.many else entry.kind(folders[0])
    return found
