"""`mega launch`: print a script or a manifest that starts a run on the hosts of a scheduler."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Annotated

import typer

from mega.core.config.run import Options
from mega.core.processes.options import LaunchOptions


def run(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="slurm, torchrun, mpi, jobset or pytorchjob")],
    line: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="pretrain or finetune, with its flags")],
    launch: LaunchOptions,
) -> int:
    """Print a script for Slurm, torchrun or mpirun, or a Kubernetes manifest, that starts COMMAND on several hosts.

    For example: mega launch slurm --hosts 4 --nproc 8 -- pretrain --config run.toml --max-restarts 3 > run.sh. The
    command is checked first, as a run on all ranks. With --max-restarts, each host starts its ranks and restarts them
    after a failure; without --max-restarts, the scheduler starts each rank. mega launch only prints the script, and
    starts nothing.
    """
    from mega.core.processes.scripts import WRITERS, process_command, written

    if kind not in WRITERS:
        raise ValueError(f"{kind}: is not a kind of launcher; valid: {', '.join(WRITERS)}")
    if line[:1] not in (["pretrain"], ["finetune"]):
        raise ValueError(f"{' '.join(line[:1])}: is not started on several hosts; valid: pretrain, finetune")
    options = _read(line)
    if options is None:
        return 0
    command = process_command(kind, launch, line, options)
    with contextlib.redirect_stderr(io.StringIO()):  # `_read` has already printed these messages
        _check(command, launch)
    print(written(kind, launch, command, options.supervision.max_restarts), end="")
    return 0


def _read(line: list[str]) -> Options | None:
    """Return the options of a command, including options from files that the command names; None for --help. Errors:
    ValueError."""
    from mega.command_line.options import Command, command

    read_options: list[Options] = []
    app = typer.Typer(add_completion=False)
    app.command(name=line[0], cls=Command)(command(_reader(read_options)))
    typer.main.get_command(app)(args=line[1:], prog_name=f"mega {line[0]}", standalone_mode=False)
    return read_options[0] if read_options else None


def _check(command: list[str], launch: LaunchOptions) -> None:
    """Check the command of each process as a dry run of all ranks, because the files may be on other machines. Errors:
    ValueError."""
    from mega.core.config.check import check
    from mega.core.config.run import updated

    options, world = _read(command), launch.hosts * launch.nproc
    assert options is not None
    check(updated(options, {"dry_run": True, "world": world}), world)


def _reader(found: list[Options]) -> Callable[[Options], None]:
    """Return a subcommand that appends its options to `found`."""

    def keep(options: Options) -> None:
        found.append(options)

    return keep
