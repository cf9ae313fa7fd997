"""The server's own OpenAPI against it: schemathesis makes requests from it, right and wrong ones, and judges answers.
No 5xx, no 200 for what the schema forbids, no status or type that is not documented, no refusal that names no field
(schemathesis_hooks.py), no hang; 20,000 cases and more.

    python -m venv st && st/bin/pip install schemathesis          in an environment of its own; 4.32 was tried
    SCHEMATHESIS=st/bin/schemathesis python tests/battery/serve_schemathesis.py

An item a route and seed. On stories260K of the shared data, and /v1/embeddings on its random BERT. Needs the extra
`serve`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import Item, run
from tests.battery.serve_load import served

TOOL = os.environ.get("SCHEMATHESIS", "schemathesis")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/api", "/tokenize", "/detokenize")
EMBEDDINGS = "/v1/embeddings"
SEEDS, EXAMPLES, OTHERS = 16, 250, 100
"""Items of a route; cases of one by schemathesis's fuzzing (its coverage adds some); the same of other routes."""

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,refusal_names_a_field"
)


def prove(selection: tuple[str, ...], examples: int, seed: int) -> dict[str, Any]:
    """Errors: AssertionError with what schemathesis found."""
    model = "bert_hf_random" if EMBEDDINGS in selection else "stories260K_hf"
    with (
        served("--max-length", "64", model=model) as target,
        tempfile.TemporaryDirectory() as kept,
    ):  # its notes on what failed
        url = f"http://127.0.0.1:{target.port}/openapi.json"
        tool = shutil.which(TOOL)
        assert tool is not None, f"{TOOL}: not found"
        command = [os.path.abspath(tool), "run", url, *selection, "--phases", "coverage,fuzzing", "-n", str(examples)]
        command += ["--checks", CHECKS, "--continue-on-failure", "--request-timeout", "30", "--seed", str(seed)]
        made = subprocess.run(
            [*command, "--no-color"],
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
            cwd=kept,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": _with_hooks()},
        )
        cases = re.search(r"([\d,]+) generated", made.stdout)
        _, metrics = target.ask("GET", "/metrics", b"")
        failures = made.stdout.partition("= FAILURES =")[2] or made.stdout[-400:]
        assert made.returncode == 0 and cases is not None, failures[:400] + made.stderr[-100:]
    statuses: dict[str, int] = {}
    for line in metrics.decode().splitlines():
        if found := re.match(r'mega_requests_total\{.*status="(\d+)"\} (\d+)', line):
            statuses[found[1]] = statuses.get(found[1], 0) + int(found[2])
    assert not [status for status in statuses if status >= "500"], statuses
    return {"cases": int(cases[1].replace(",", "")), "statuses": statuses}


def _with_hooks() -> str:
    """Where Python finds the check, in front of where it looks already."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("SCHEMATHESIS_PATH", ""))))


def items() -> Iterator[Item]:
    """Name and work of every item."""
    for seed in range(SEEDS):
        for route in (*ROUTES, EMBEDDINGS):
            yield f"{route} {seed}", partial(prove, ("--include-path", route), EXAMPLES, seed)
    others = tuple(part for route in ROUTES for part in ("--exclude-path", route))
    yield "others", partial(prove, others, OTHERS, 0)


if __name__ == "__main__":
    run("serve_schemathesis", items())
