"""Check that all ranks of a model load the same weights with the same code and options. Ranks on several hosts may see
different files under one path, and a model whose shards come from different weights would compute wrong texts without
an error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mega.core.checkpoint.forms.direct import SAMPLED, weights_digest
from mega.core.device import Device
from mega.core.inference.loading.adapters import OpenedAdapter
from mega.core.inference.loading.load import OpenedModel
from mega.core.parallel.consistency import Comparable, check_consistent
from mega.core.parallel.mesh import Mesh
from mega.core.processes.code import code

_SHOWN = 12
"""Number of characters of a digest in a message."""


def check_same_model(
    opened: OpenedModel,
    mesh: Mesh,
    device: Device,
    options: Mapping[str, object],
    adapters: Sequence[OpenedAdapter] = (),
) -> None:
    """Compare code, weights, adapters and options of all ranks. options: user-readable name -> value.

    Errors: ValueError on every rank, naming each difference with its ranks; CheckpointError naming a file that cannot
    be read.
    """
    if mesh.world == 1:
        return
    values = {
        **code(),
        "the weights of the model": _digest(opened),
        "the options of the model": _hashed(asdict(opened.model)),
        **{f"--adapter {each.name}": _adapter(each) for each in adapters},
        **{name: str(value) for name, value in options.items()},
    }
    check_consistent(Comparable(values, {}), mesh.everyone, device.torch)


def _digest(opened: OpenedModel) -> str:
    """Digest of the weights. It does not cover other files of a foreign folder, which may differ between hosts, such as
    the records of a download."""
    digest = opened.digest if opened.meta else weights_digest(opened.weights)
    return digest.removeprefix(SAMPLED)[:_SHOWN]


def _adapter(adapter: OpenedAdapter) -> str:
    digest = weights_digest(adapter.weights).removeprefix(SAMPLED)
    return f"of rank {adapter.rank}, scale {adapter.scale:g}, weights {digest[:_SHOWN]}"


def _hashed(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:_SHOWN]
