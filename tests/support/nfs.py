"""Locks as NFS has them, for a test on a local disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

import pytest

FLOCK = fcntl.flock


def locks_of_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flock` as NFS does it, seen from another machine than the one whose processes hold locks.

    Locks of directories stay on their machine, so no process has any; an exclusive lock needs a descriptor that may
    write (flock(2), "NFS details").
    """

    def flock(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        FLOCK(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
