"""Hosts for tests of what happens between hosts: network namespaces of this machine, joined by a switch.

Each has a name of its own that its /etc/hosts resolves to 127.0.1.1, as Debian's installer leaves it. Needs root and
`ip`; `hosts` skips the test, saying why, where namespaces cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SUBNET = "10.211.7"


class Host(NamedTuple):
    name: str
    address: str

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process of this host; its lines on stdout and stderr are one stream."""
        named = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        environ = {**os.environ, **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(["ip", "netns", "exec", self.name, *named], env=environ, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def cut(self) -> None:
        """Take its link to the others down."""
        switch, _, number = self.name.rpartition("-")
        _ip("-n", f"{switch}-switch", "link", "set", f"port{number}", "down")

    def mega(self, arguments: Sequence[str], rank: int, of: int, first: Host) -> subprocess.Popen[str]:
        """One rank a host, as a launcher of the user's own would start it."""
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": first.address, "MASTER_PORT": "29511"}
        variables = {"RANK": str(rank), "WORLD_SIZE": str(of), **local, **place}
        return self.start([sys.executable, "-m", "mega", *arguments], variables)


@contextlib.contextmanager
def hosts(count: int = 2) -> Iterator[list[Host]]:
    """Hosts on one switch, which is a bridge in a namespace of its own."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip and unshare, to make network namespaces")
    key = uuid.uuid4().hex[:6]
    made = [Host(f"mega-{key}-{number}", f"{SUBNET}.{number + 1}") for number in range(count)]
    switch = f"mega-{key}-switch"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(made):
            place = Path("/etc/netns") / host.name
            place.mkdir(parents=True)
            (place / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            end, port = f"m{key}{number}", f"port{number}"
            _ip(*f"link add {end} netns {host.name} type veth peer name {port} netns {switch}".split())
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.name, "link", "set", end, "up")
        yield made
    finally:
        for name in (*(host.name for host in made), switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to make network namespaces: {done.stderr.strip()}")
