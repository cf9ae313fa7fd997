"""Ranks of two hosts, each in a network namespace, where a host's own name resolves to a loopback address."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mega.core.processes import interface
from mega.core.processes.world import World
from tests.support.hosts import hosts

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --global-batch 2 "
    "--lr 1e-3 --steps 1000000 --eval-iters 0 --log-interval 1 --device cpu --timeout-minutes 0.2"
).split()


def test_hosts_whose_names_are_loopback_addresses_meet_and_miss_each_other(tmp_path: Path) -> None:
    """They train until their link is cut; then each ends in time and names the other one."""
    with hosts() as both:
        rows = tmp_path / "rows"
        command = [*RUN, "--metrics", str(rows)]
        jobs = [host.mega(command, rank, 2, both[0]) for rank, host in enumerate(both)]
        deadline = time.monotonic() + 300
        while not (rows.exists() and rows.stat().st_size > 2000) and time.monotonic() < deadline:
            assert [job.poll() for job in jobs] == [None, None], [job.communicate()[0] for job in jobs]
            time.sleep(0.05)
        both[1].cut()
        said = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], said
    steps = [json.loads(line).get("step") for line in rows.read_text().splitlines() if "loss" in line]
    assert steps[:3] == [1, 2, 3]
    for rank, text in enumerate(said):
        assert f"rank {1 - rank} on host {both[1 - rank].name} has not answered for " in text, text


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_host_goes_by_an_address_of_another(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR is its own name, which is no way out."""
    monkeypatch.delenv(interface.VARIABLE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "first")
    store = dist.HashStore()
    store.set("address/1", "10.0.0.2")
    ways = {"first": "127.0.1.1" if rank == 0 else "10.0.0.2", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(interface, "own_address", ways.__getitem__)
    monkeypatch.setattr(interface, "interface_of", {"10.0.0.1": "eth0", "10.0.0.2": "eth1"}.__getitem__)
    interface.choose_interface(store, World(rank, 2, 0, 1, "torchrun"))
    assert os.environ[interface.VARIABLE] == f"eth{rank}"
    monkeypatch.setenv(interface.VARIABLE, "ib0")
    interface.choose_interface(store, World(rank, 2, 0, 1, "torchrun"))
    assert os.environ[interface.VARIABLE] == "ib0"


def test_an_interface_is_found_by_its_address() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert interface.interface_of("127.0.0.1") in (*names, None) and interface.interface_of("192.0.2.1") is None
    assert interface.own_address("127.0.0.1") == "127.0.0.1" and interface.own_address("a..b") == ""


def test_a_host_whose_own_name_is_a_loopback_address_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's installer leaves it; or else no host would listen where the others join."""
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(interface.socket, "getaddrinfo", lambda *words, **more: found)
    assert interface.is_own("node-0")
    found[0] = (*found[0][:-1], ("192.0.2.1", 1))
    assert not interface.is_own("node-1")
