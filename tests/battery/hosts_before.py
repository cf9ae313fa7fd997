"""A run on several hosts, at an earlier revision and now: what goes wrong between them, typed as lines of `mega`.

    python tests/battery/hosts_before.py REVISION [--out FILE] [ITEM ...]

An item starts processes of a revision and judges what they do. It is shown where the working tree does what it must and
REVISION does not. The same is held by the tests that `HELD_BY` names; most of them import modules that an earlier
revision does not have, so they cannot be run against it. Needs root, for network and mount namespaces. One JSON line an
item goes to --out; items that have a good line for this commit are not run again. Exit 1 if any is not shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.battery.identity_before import bytes_alone, compare  # noqa: E402
from tests.battery.links import built  # noqa: E402
from tests.support.hosts import Host, hosts  # noqa: E402
from tests.support.shared import shared  # noqa: E402

HELD_BY = {
    "A.1": "tests/training/test_consistency.py tests/training/test_going_on.py",
    "A.2": "tests/training/test_interrupt.py",
    "A.3": "tests/processes/test_hosts.py tests/processes/test_roll_call.py tests/processes/test_rendezvous.py",
    "A.4": "tests/processes/test_exit_reports.py tests/processes/test_rendezvous.py",
    "A.5": "tests/inference/server/test_serve.py",
    "A.6": "tests/processes/test_hosts.py",
    "A.7": "tests/inference/test_not_finite.py tests/inference/server/test_server.py tests/training/test_good.py "
    "tests/training/test_audit.py tests/training/test_guards.py",
    "A.8": "tests/processes/test_exit_reports.py tests/processes/test_roll_call.py tests/processes/test_rendezvous.py "
    "tests/checkpoint/test_remote.py tests/training/test_audit.py tests/training/test_interrupt.py",
    "A.9": "tests/processes/test_world.py",
}
"""Item -> the tests of the suite."""

RUN = (
    "pretrain --layers 2 --hidden 16 --heads 2 --seq-length 8 --micro-batch 1 --global-batch 4 --lr 1e-3 "
    "--lr-decay constant --eval-iters 0 --log-interval 1 --device cpu --no-progress --steps 3 --timeout-minutes 1"
)
MOCK = f"{RUN} --vocab 64 --mock-data"
LONG, TRAINS = "--steps 1000000", r"step +\d\d+/"
BOUND = ["unshare", "-m", "sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh"]
"""Before a path, the path at which a process sees it, and the command."""

DAMAGED = """
import sys, torch, mega.core.training.step as step
backward, (kind, rank), steps = step.backward, sys.argv.pop(1).split(":"), [0]
def damaged(state, batches):
    steps[0] += 1
    mine = steps[0] == 2 and state.mesh.rank == int(rank)
    weights = state.stages[0].parameters() if mine else ()
    moments = (one for shard in state.optimizer.shards for one in shard.moments.values()) if mine else ()
    with torch.no_grad():
        if mine and kind == "weight":
            next(iter(weights)).view(-1)[0] = float("nan")
        if mine and kind == "moment":
            next(moments).values[0] = float("nan")
        if mine and kind == "drift":
            weight = max(weights, key=torch.Tensor.numel).view(-1)
            weight[5] = torch.nextafter(weight[5], weight[5] + 1)
    return backward(state, batches)
def tied(state, batches):
    found = damaged(state, batches)
    for bucket in state.grads.buckets if kind == "tied" and steps[0] == 2 and state.mesh.rank == int(rank) else ():
        if bucket.holders.size > 1:
            bucket.own_grads[3] += float("nan")
    return found
step.backward = tied
from mega.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""`mega` with one element of a rank broken in step 2; first word: what, and the rank."""

UNREACHABLE = """
import sys, fsspec.implementations.memory as memory
class EndpointConnectionError(Exception): pass
def lost(*words, **more): raise EndpointConnectionError('Could not connect to the endpoint URL: "http://a:9000/"')
for name in ("exists", "ls", "info", "open", "_open", "put_file", "pipe_file", "makedirs", "mkdir", "find", "cat_file"):
    setattr(memory.MemoryFileSystem, name, lost)
from mega.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""`mega` with a store whose endpoint does not answer."""


class Ended(NamedTuple):
    """code: None where it was killed, because it had not ended by then."""

    code: int | None
    seconds: float
    said: str


class Job(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 120) -> str:
        deadline = time.monotonic() + seconds
        while (found := re.search(words, self.said())) is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no {words!r}: {self.said()[-300:]}")
            time.sleep(0.1)
        return found[0]


class Place:
    """Processes of one revision, in a folder of their own. tree: the folder that holds its `mega`."""

    def __init__(self, tree: Path, folder: Path):
        self.tree, self.f, self._started = tree, folder, 0
        self.groups: list[int] = []

    def start(
        self,
        words: Sequence[str] | str,
        variables: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        program: Sequence[str] = ("-m", "mega"),
    ) -> Job:
        self._started += 1
        log = self.f / f"log-{self._started}"
        environ = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", **(variables or {})}
        command = [*before, sys.executable, *program, *(words.split() if isinstance(words, str) else words)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=self.f, env=environ, stdout=out, stderr=out, start_new_session=True)
        self.groups.append(process.pid)
        return Job(process, log)

    def made(self, words: str, **more: object) -> str:
        job = self.start(words, **more)  # type: ignore[arg-type]
        (ended,) = self.ended([job], 240)
        assert ended.code == 0, (words, ended.said[-500:])
        return ended.said

    def pair(self, words: str, count: int = 2, **of_rank: object) -> list[Job]:
        """Ranks of this host, as a launcher of the user's own starts them. before_1, variables_1, ...: of that one."""
        port, jobs = str(free_port()), []
        program = of_rank.get("program", ("-m", "mega"))
        for rank in range(count):
            own = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **of_rank.get(f"variables_{rank}", {})}  # type: ignore[dict-item]
            jobs.append(self.start(words, own, of_rank.get(f"before_{rank}", ()), program))  # type: ignore[arg-type]
        return jobs

    def spread(self, made: list[Host], words: str, *, named: bool = True) -> list[Job]:
        """A rank a host. named: a variable says which interface is that of the others, which their names do not."""
        jobs = []
        for rank, host in enumerate(made):
            own = {"RANK": str(rank), "WORLD_SIZE": str(len(made)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            own |= {"MASTER_ADDR": made[0].address, "MASTER_PORT": "29511"}
            own |= {"GLOO_SOCKET_IFNAME": "m" + host.name.removeprefix("mega-").replace("-", "")} if named else {}
            as_host = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"', host.name]
            jobs.append(self.start(words, own, ["ip", "netns", "exec", host.name, *as_host]))
        return jobs

    def ended(self, jobs: Sequence[Job], limit: float) -> list[Ended]:
        """How each ends, in `limit` seconds from now."""
        began, codes, seconds = time.monotonic(), dict[int, int | None](), dict[int, float]()
        while len(codes) < len(jobs):
            for number, job in enumerate(jobs):
                over = time.monotonic() > began + limit
                if number not in codes and ((code := job.process.poll()) is not None or over):
                    codes[number], seconds[number] = code, time.monotonic() - began
            time.sleep(0.1)
        return [Ended(codes[number], round(seconds[number], 1), job.said()) for number, job in enumerate(jobs)]

    def close(self) -> None:
        for group in self.groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


Verdict = tuple[bool, str]
Judge = Callable[[Place], Verdict]


def told(ended: Sequence[Ended]) -> str:
    """Codes, seconds and last lines of each."""
    rows = []
    for each in ended:
        lines = [line for line in each.said.splitlines() if line.strip()] or [""]
        code = "alive" if each.code is None else f"exit {each.code}"
        rows.append(f"{code} after {each.seconds:.0f} s: {lines[-1][-250:]}")
    return " || ".join(rows)


def refused(ended: Sequence[Ended], words: str) -> Verdict:
    """All end with 2, and one of them says why."""
    found = [each.code for each in ended] == [2] * len(ended) and any(re.search(words, each.said) for each in ended)
    return found, told(ended)


# A.1


def corpora(place: Place) -> tuple[Path, Path]:
    """Two pairs of token files that differ in their tokens alone, in folders a and b."""
    for name, numbers in (("a", "7 8 9 "), ("b", "5 6 4 ")):
        (place.f / name).mkdir(exist_ok=True)
        (place.f / f"{name}.jsonl").write_text((json.dumps({"text": numbers * 9}) + "\n") * 40)
        made = f"--input {name}.jsonl --output-prefix {name}/c --tokenizer NullTokenizer --vocab-size 60"
        place.made(f"preprocess {made}")
    return (next((place.f / name).glob("*.bin")) for name in "ab")  # type: ignore[return-value]


def data(first: Path) -> str:
    return f"--data-path {first.with_suffix('')} --split 1,0,0 --vocab 64"


def other_tokens(layout: str, place: Place) -> Verdict:
    first, other = corpora(place)
    jobs = place.pair(f"{RUN} {data(first)} {layout}", before_1=[*BOUND, str(other), str(first)])
    return refused(place.ended(jobs, 120), "the content of ")


def resumed_on_other_tokens(place: Place) -> Verdict:
    """The index and the note are those of the first corpus."""
    first, other = corpora(place)
    words = f"{RUN} {data(first)} --save run --save-interval 1"
    place.made(words)
    shutil.copy(other, first)
    allowed = f"{words} --resume auto --steps 5"
    ended = place.ended([place.start(allowed)], 120)
    good, said = refused(ended, "holds other tokens than")
    if good:
        place.made(f"{allowed} --allow-corpus-change")
    return good, said


def other_code(place: Place) -> Verdict:
    copied = place.f / "other"
    shutil.copytree(place.tree / "mega", copied / "mega")
    with (copied / "mega" / "core" / "batch.py").open("a") as file:
        file.write("# of another revision\n")
    jobs = place.pair(MOCK, variables_1={"PYTHONPATH": str(copied)})
    return refused(place.ended(jobs, 120), "the version of mega")


def other_tokenizer(place: Place) -> Verdict:
    """Two ids are exchanged."""
    first = bytes_alone(place.f / "first") / "tokenizer.json"
    other = place.f / "other.json"
    found = json.loads(first.read_text())
    ids = found["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other.write_text(json.dumps(found))
    (place.f / "a.jsonl").write_text('{"text": "Once upon a time"}\n' * 40)
    flags = f"--tokenizer HuggingFaceTokenizer --tokenizer-model {first.parent}"
    place.made(f"preprocess --input a.jsonl --output-prefix c {flags}")
    jobs = place.pair(
        f"{RUN} --data-path c_text_document --split 1,0,0 {flags} --allow-tokenizer-mismatch",
        before_1=[*BOUND, str(other), str(first)],
    )
    return refused(place.ended(jobs, 120), "the tokenizer .* of rank 0, .* of rank 1")


def other_base(place: Place) -> Verdict:
    for name, seed in (("a", 1), ("b", 2)):
        place.made(f"{MOCK} --family llama --ffn 32 --steps 1 --seed {seed} --save {name} --save-interval 1")
        place.made(f"convert-llama --load-dir {name} --save-dir {name}-hf")
    bound = [*BOUND, str(place.f / "b-hf"), str(place.f / "a-hf")]
    tuned = re.sub(r"--(layers|hidden|heads|vocab) \d+ ", "", MOCK).replace("pretrain", "finetune")
    jobs = place.pair(f"{tuned} --load a-hf --use-checkpoint-config --lora-rank 2", before_1=bound)
    return refused(place.ended(jobs, 120), "ranks see different ones")


def private_disk(place: Place) -> Verdict:
    """Found before the first step, not by a save that fails."""
    for name in ("run", "own"):
        (place.f / name).mkdir()
    bound = [*BOUND, str(place.f / "own"), str(place.f / "run")]
    ended = place.ended(place.pair(f"{MOCK} --save run --save-interval 2", before_1=bound), 120)
    good, said = refused(ended, "is not seen by rank 1")
    return good and "step 1" not in ended[0].said, said


library = cache(built)


def faulty(place: Place, seconds: float, sync: float) -> dict[str, str]:
    """Variables of a process whose clock is ahead, and whose syncs take long."""
    path = place.f / "fault"
    path.write_bytes(struct.pack("dd", seconds, sync))
    return {"LD_PRELOAD": str(library()), "MEGA_FAULT": str(path)}


def other_clock(place: Place) -> Verdict:
    ended = place.ended(place.pair(MOCK, variables_1=faulty(place, 3600, 0)), 120)
    return [each.code for each in ended] == [0, 0] and "clocks of ranks are apart" in ended[0].said, told(ended)


# A.2


def hang_up(place: Place) -> Verdict:
    """A bar is drawn on a terminal that goes away."""
    ours, theirs = os.openpty()
    words = f"{MOCK} {LONG} --save run --save-interval 1000000 --metrics rows --nproc 2".replace("--no-progress ", "")
    heeds = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # this script may be under nohup
    start = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    code = f"import os, signal, sys; {heeds}; os.login_tty({theirs}); {start}"
    command = [sys.executable, "-c", code, "-m", "mega", *words.split()]
    environ = {**os.environ, "PYTHONPATH": str(place.tree), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, cwd=place.f, env=environ, pass_fds=[theirs], stdin=subprocess.DEVNULL)
    os.close(theirs)
    os.set_blocking(ours, False)
    rows, deadline = place.f / "rows", time.monotonic() + 120
    while not (rows.exists() and rows.stat().st_size > 2000) and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError, OSError):
            os.read(ours, 1 << 16)
        time.sleep(0.02)
    os.close(ours)
    try:
        ended = job.wait(60)
    except subprocess.TimeoutExpired:
        ended = 0
        job.kill()
    last = max(int(json.loads(row)["step"]) for row in rows.read_text().splitlines() if row.endswith("}"))
    saved = sorted(path.name for path in (place.f / "run").glob("step-*"))
    good = ended == 128 + signal.SIGHUP and saved == [f"step-{last:07d}"]
    return good, f"exit {ended}; step {last} was the last, saved are {saved or 'none'}"


# A.3


def cut_off(place: Place) -> Verdict:
    """The link of the second host is cut. Its own end is 15 s for an answer, and as much for a report."""
    with hosts(2) as made:
        jobs = place.spread(made, f"{MOCK} {LONG} --timeout-minutes 0.25".replace("--timeout-minutes 1 ", ""))
        jobs[0].wait_for(TRAINS)
        made[1].cut()
        ended = place.ended(jobs, 150)
        place.close()
    good = None not in [each.code for each in ended] and "rank 1" in ended[0].said and "rank 0" in ended[1].said
    return good, told(ended)


# A.4


def slow_save(place: Place) -> Verdict:
    """A save takes longer than ranks have to answer."""
    words = f"{MOCK} --global-batch 6 --save run --save-interval 3 --timeout-minutes 0.2"
    ended = place.ended(place.pair(words, 3, variables_0=faulty(place, 0, 2.5)), 200)
    return [each.code for each in ended] == [0, 0, 0], told(ended)


def slow_save_accused(place: Place) -> Verdict:
    """It takes longer than a save may; the only rank that is named is the one that saves."""
    more = "--phase-timeout-minutes"
    more = f"{more} 0.4" if more in place.made("pretrain --help-all") else ""
    words = f"{MOCK} --global-batch 6 --save run --save-interval 3 --timeout-minutes 0.2 {more}"
    ended = place.ended(place.pair(words, 3, variables_0=faulty(place, 0, 100)), 90)
    lines = {
        line for each in ended for line in each.said.splitlines() if re.search("rank.*(waited|answer|ended)", line)
    }
    good = any("for rank 0, which answers: saving" in line for line in lines)
    return good and not any(re.search("rank [12] (has|at)", line) for line in lines), " | ".join(sorted(lines))[:600]


# A.5


def ask(url: str, path: str, body: object = None, seconds: float = 20) -> tuple[int, str]:
    """Status, or 0 where no answer came in time."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError:
        return 0, "no answer"


@contextlib.contextmanager
def serving(place: Place, model: Path, more: str) -> Iterator[tuple[Job, str]]:
    job = place.start(f"serve {model} --port 0 --dtype fp32 --device cpu {more}")
    yield job, job.wait_for(r"ready: (\S+)\s").split()[1]


def stopped_server(place: Place) -> Verdict:
    more = "--timeout-minutes 0.2" if "--timeout-minutes" in place.made("serve --help") else ""
    model = shared("stories260K_hf/config.json").parent
    with serving(place, model, f"--tp 2 {more}") as (job, url):
        ranks = sorted(
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/stat")
            if _ancestor(int(path.parent.name), job.process.pid) == 2
        )
        os.kill(ranks[-1], signal.SIGSTOP)
        status, text = ask(url, "/v1/completions", {"prompt": "Once", "max_tokens": 50, "ignore_eos": True}, 40)
        health = ask(url, "/health")[0] if job.process.poll() is None else "ended"
        (ended,) = place.ended([job], 30)
        if ended.code is None:
            os.kill(job.process.pid, signal.SIGTERM)
            (after,) = place.ended([job], 20)
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[-1], signal.SIGKILL)
    good = status == 503 and "rank 1" in text and health != 200 and ended.code == 1
    end = f"exit {ended.code}" if ended.code is not None else f"alive; 20 s after SIGTERM: {after.code or 'alive'}"
    return good, f"a request: {status} {text[:150]}; /health: {health}; {end}"


def _ancestor(pid: int, of: int) -> int | None:
    """How many generations a process is below another one."""
    for generation in range(5):
        if pid == of:
            return generation
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
    return None


# A.6


def loopback(place: Place) -> Verdict:
    with hosts(2) as made:
        ended = place.ended(place.spread(made, MOCK, named=False), 90)
        place.close()
    return [each.code for each in ended] == [0, 0], told(ended)


# A.7


def server_of_nan(place: Place) -> Verdict:
    """Finite weights whose logits overflow."""
    from safetensors.torch import load_file, save_file

    source, model = shared("stories260K_hf/config.json").parent, place.f / "model"
    model.mkdir()
    for path in source.iterdir():
        if path.is_file():
            shutil.copy(path, model / path.name)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][:] = 3e38
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    body = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
    with serving(place, model, "") as (_, url):
        answers = [ask(url, "/v1/completions", body) for _ in range(4)]
        health, text = ask(url, "/health")
    good = {status for status, _ in answers} == {500} and health == 503 and "NaN" in text
    return good, f"answers {answers[-1]}"[:260] + f"; /health: {health} {text[:150]}"


def broken(kind: str, flags: str, words: str, place: Place) -> Verdict:
    """One element of rank 1 is broken in step 2."""
    program = ("-c", DAMAGED, f"{kind}:1")
    ended = place.ended(place.pair(f"{MOCK} --steps 4 {flags}", program=program), 120)
    line = next((line for each in ended for line in each.said.splitlines() if re.search(words, line)), "")
    ran = {int(step) for each in ended for step in re.findall(r"^step (\d+)\W.*loss", each.said, re.MULTILINE)}
    clean = not any("Traceback" in each.said for each in ended)
    good = bool(line) and clean and all(each.code for each in ended) and max(ran, default=0) < 3
    return good, f"{line or told(ended)}"[:500] + f"; steps {sorted(ran)}"


# A.8


def lost_host(words: str, place: Place) -> Verdict:
    """Rank 2 on a third host is killed; `words` are in each other's log."""
    with hosts(3) as made:
        jobs = place.spread(made, f"{MOCK} {LONG} --global-batch 6")
        jobs[0].wait_for(TRAINS)
        os.killpg(jobs[2].process.pid, signal.SIGKILL)
        ended = place.ended(jobs[:2], 120)
        place.close()
    wanted = words.format(host=re.escape(made[2].name))
    return all(re.search(wanted, each.said) for each in ended), " || ".join(
        f"exit {each.code}: {[line[:200] for line in each.said.splitlines() if 'step' not in line[:5]][-3:]}"
        for each in ended
    )


def own_mistake(place: Place) -> Verdict:
    """Of rank 1, whose tokens are cut: the other log has it too, without a word of a host that cannot be reached."""
    first, _ = corpora(place)
    (cut := place.f / "cut").write_bytes(first.read_bytes()[:100])
    ended = place.ended(place.pair(f"{RUN} {data(first)}", before_1=[*BOUND, str(cut), str(first)]), 120)
    return "rank 1 has ended: --data-path" in ended[0].said, told(ended)


def promised(place: Place) -> Verdict:
    """Rank 0 hears SIGTERM from its launcher after rank 1 was killed, and can save no more."""
    slow = "--hidden 256 --seq-length 256 --global-batch 16"
    job = place.start(f"{MOCK} {LONG} {slow} --nproc 2 --save run --save-interval 1000000")
    job.wait_for("step +3/")
    ranks = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _ancestor(int(path.name), job.process.pid) == 2]
    os.kill(min(ranks), signal.SIGSTOP)  # so that it hears of both at once, wherever it is
    os.kill(max(ranks), signal.SIGKILL)
    time.sleep(2)
    os.kill(min(ranks), signal.SIGCONT)
    (ended,) = place.ended([job], 60)
    saved = [path.name for path in (place.f / "run").glob("step-*")]
    lines = [line for line in ended.said.splitlines() if line.startswith("mega: ")]
    empty = [line for line in lines if re.search(r"then saving to (?!.*(if|answer))", line)]
    return bool(lines) and (bool(saved) or not empty), f"exit {ended.code}, saved: {saved or 'none'}: {lines}"


def one_line(words: str, program: Sequence[str], said: str, place: Place) -> Verdict:
    (ended,) = place.ended([place.start(words, program=program)], 120)
    good = bool(ended.code) and "Traceback" not in ended.said and re.search(said, ended.said) is not None
    return good, f"{'a traceback, ' if 'Traceback' in ended.said else ''}{told([ended])}"


# A.9


def batch_script(place: Place) -> Verdict:
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = place.ended([place.start(MOCK, {**slurm, **address})], 50)
    return refused(ended, "this is the batch script itself")


REMOTE = f"{MOCK} --save-interval 1 --save"
LOST = "rank 2.*(ended|cannot be reached|answered)"
ITEMS: dict[str, Judge] = {
    "A.1 other tokens, dp 2": partial(other_tokens, ""),
    "A.1 other tokens, pp 2": partial(other_tokens, "--pp 2"),
    "A.1 other tokens, tp 2": partial(other_tokens, "--tp 2"),
    "A.1 a resume on other tokens": resumed_on_other_tokens,
    "A.1 another version of the code": other_code,
    "A.1 another tokenizer": other_tokenizer,
    "A.1 another base of adapters": other_base,
    "A.1 --save on private disks": private_disk,
    "A.1 a clock": other_clock,
    "A.2 a hang-up": hang_up,
    "A.3 a rank that is cut off": cut_off,
    "A.4 a save slower than the time-out": slow_save,
    "A.4 who is accused": slow_save_accused,
    "A.5 a server with a stopped rank": stopped_server,
    "A.6 names that are loopback addresses": loopback,
    "A.7 a server whose logits are NaN": server_of_nan,
    "A.7 a weight": partial(broken, "weight", "", r"step 2: .*weights/.*\(rank 1\)|rank 1.*weights/"),
    "A.7 a moment": partial(broken, "moment", "", r"step 2: .*moment.*rank 1"),
    "A.7 a tied copy's gradient": partial(broken, "tied", "--pp 2", r"step 2: .*copies of the gradient of .*rank"),
    "A.8 rank and host": partial(lost_host, LOST + ".*on host {host}|on host {host}.*rank 2|rank 2 on (host )?{host}"),
    "A.8 the reason in every host's log": partial(lost_host, LOST),
    "A.8 the phase in every host's log": partial(lost_host, "was at: training, step"),
    "A.8 an endpoint that is lost": partial(
        one_line, f"{REMOTE} memory://run", ("-c", UNREACHABLE), "cannot be reached"
    ),
    "A.8 a copy that drifted": partial(
        broken, "drift", "--audit-interval 1", "step 2: copies have drifted apart: weights.*ranks? "
    ),
    "A.8 without the extra": partial(one_line, f"{REMOTE} s3://b/run", ("-m", "mega"), r"pip install '.\[remote\]'"),
    "A.8 a mistake of one rank": own_mistake,
    "A.8 a save that does not come": promised,
    "A.9 a batch script without srun": batch_script,
}


def judged(tree: Path, names: list[str]) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            alone = Path(folder) / "package"
            alone.mkdir()
            (alone / "mega").symlink_to(tree / "mega")
            (work := Path(folder) / "work").mkdir()
            place = Place(alone, work)
            try:
                good, said = ITEMS[name](place)
            except Exception as error:
                good, said = False, f"{type(error).__name__}: {error}"[:500]
            finally:
                place.close()
        rows[name] = {"item": name, "good": bool(good), "said": said}
        print(f"  {tree.name}: {name}: {good}: {said}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(compare(__doc__, ITEMS, HELD_BY, judged, ROOT / "build" / "battery" / "hosts_before.jsonl"))
