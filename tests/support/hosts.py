"""Hosts for tests of what happens between hosts: network namespaces of this machine, joined by a wire.

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

    def mega(self, arguments: Sequence[str], rank: int, of: int, first: Host) -> subprocess.Popen[str]:
        """One rank a host, as a launcher of the user's own would start it."""
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": first.address, "MASTER_PORT": "29511"}
        variables = {"RANK": str(rank), "WORLD_SIZE": str(of), **local, **place}
        return self.start([sys.executable, "-m", "mega", *arguments], variables)


@contextlib.contextmanager
def hosts(count: int = 2) -> Iterator[list[Host]]:
    """Two hosts on one wire."""
    assert count == 2, "a wire has two ends"
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip and unshare, to make network namespaces")
    key = uuid.uuid4().hex[:6]
    made = [Host(f"mega-{key}-{number}", f"{SUBNET}.{number + 1}") for number in range(count)]
    try:
        for host in made:
            place = Path("/etc/netns") / host.name
            place.mkdir(parents=True)
            (place / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        ends = [f"m{key}{number}" for number in range(count)]
        _ip(
            "link",
            "add",
            ends[0],
            "netns",
            made[0].name,
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            made[1].name,
        )
        for host, end in zip(made, ends, strict=True):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.name, "link", "set", end, "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to make network namespaces: {done.stderr.strip()}")
