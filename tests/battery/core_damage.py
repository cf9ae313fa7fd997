"""Damaged checkpoints of Megatron-core with an optimizer: whatever was done to a tree, it is refused by one line that
names the file, the tensor or the key, within 30 s and 2 GiB, or what is read is, byte for byte, what was there before.

Items of each form: `cuts` (every file at several lengths), `flips` (a bit, anywhere and in what is no tensor's data),
`absent` (a file), `strangers` (a file of another run at another step), `contents` (values that do not fit, all
refused), `leaves` (odd values at every place; no traceback). Two things cannot be found, and are counted apart: flips
within the numbers of tensors that are still possible numbers, since a tree's checksums of tensors are not compared; and
the one file of a `torch_dist` folder that another run wrote, whose tensors are as long and at the same places.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.cli import main
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import locate
from tests.battery.data_ledger import resident, run
from tests.support.core_forms import (
    CORE,
    RECORDED,
    CoreForm,
    read_equal_bytes_once,
    trusted_index,
    whole_tensors,
    write_whole,
)

HOME = Path(tempfile.mkdtemp(prefix="mega-damage-"))
SECONDS, MEBIBYTES = 30, 2048
NAMED = re.compile(r"(weights|moment1|moment2|master|optimizer|args)[./]|\.(weight|bias)\b")
Content = dict[Any, Any]


class Judge:
    """Reads a tree as it was, then damaged copies of it, and counts how they ended."""

    def __init__(self, form: CoreForm) -> None:
        self.form, self.counts, self.faults = form, Counter[str](), list[str]()
        shutil.rmtree(HOME, ignore_errors=True)
        self.pristine, self.tree = HOME / "pristine", HOME / "tree"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form.make(self.pristine)
        code, text = self._read(self.pristine, HOME / "whole")
        assert code == 0, text
        self.whole = locate(HOME / "whole")
        self.bytes = self._bytes_of(self.whole.path)
        assert self.bytes
        self.files = sorted(each.relative_to(self.pristine) for each in self.pristine.rglob("*") if each.is_file())
        self.slowest, self.most = 0.0, 0

    def _read(self, load: Path, save: Path) -> tuple[int, str]:
        output = io.StringIO()
        line = [self.form.verb, "--load-dir", str(load), "--save-dir", str(save), *self.form.options]
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            return main(line), output.getvalue().strip()

    @staticmethod
    def _bytes_of(step: Path) -> dict[str, bytes]:
        """Of the files that hold tensors."""
        return {file.name: file.read_bytes() for file in step.glob("*.safetensors")}

    def fresh(self) -> Path:
        shutil.rmtree(self.tree, ignore_errors=True)
        return Path(shutil.copytree(self.pristine, self.tree))

    def judge(self, what: str, names: tuple[str, ...] = (), *, allowed: str = "") -> None:
        """Read `tree`. names: one of them must be told; none: the form's own names will do. allowed: what it is called
        if something else is read."""
        save = HOME / "target"
        shutil.rmtree(save, ignore_errors=True)
        Path("/proc/self/clear_refs").write_text("5")
        before, begin = resident("VmRSS"), time.perf_counter()
        signal.alarm(SECONDS)
        try:
            code, text = self._read(self.tree, save)
        except Exception as error:
            self.counts["fault"] += 1
            self.faults.append(f"{what}: {type(error).__name__}: {error}"[:300])
            return
        finally:
            signal.alarm(0)
        self.slowest = max(self.slowest, time.perf_counter() - begin)
        self.most = max(self.most, resident("VmHWM") - before)
        word = self._word(code, text, names, save) or allowed
        if word in ("", "badly refused") or (word == "of no effect" and names):
            self.faults.append(f"{what}: {word or 'something else is read'}: {code} {text[-200:]}")
        self.counts[word or "fault"] += 1

    def _word(self, code: int, text: str, names: tuple[str, ...], save: Path) -> str:
        if code == 0:
            found = locate(save)
            same = {**found.meta, "saved": 0} == {**self.whole.meta, "saved": 0}
            same = same and (self._bytes_of(found.path) == self.bytes or not list(diff(self.whole, found)))
            return "of no effect" if same else ""
        told = any(name in text for name in names) if names else NAMED.search(text) or str(self.tree) in text
        fine = code == 2 and told and text.count("\n") == 0 and "Traceback" not in text and not save.exists()
        return "refused" if fine else "badly refused"

    def done(self) -> dict[str, Any]:
        bad = [*self.faults]
        assert not bad, f"{len(bad)} of {self.counts.total()}: {bad[:6]}"
        assert self.most < MEBIBYTES, self.most
        return {**self.counts, "slowest": round(self.slowest, 2), "MB": self.most}


# --- files ----------------------------------------------------------------------------------------------------------


def cuts(form: CoreForm) -> dict[str, Any]:
    judge, rng = Judge(form), random.Random(0)
    for file in judge.files:
        size = (judge.pristine / file).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1, *(rng.randrange(size) for _ in range(6))} - {size}):
            path = judge.fresh() / file
            path.write_bytes(path.read_bytes()[:length])
            judge.judge(f"{file} cut to {length} of {size}")
    return judge.done()


def absent(form: CoreForm) -> dict[str, Any]:
    judge = Judge(form)
    for file in judge.files:
        (judge.fresh() / file).unlink()
        judge.judge(f"no {file}", (str(judge.tree),))
    for folder in sorted({file.parent for file in judge.files if len(file.parts) > 2}):
        shutil.rmtree(judge.fresh() / folder)
        judge.judge(f"no {folder}")
    return judge.done()


def strangers(form: CoreForm) -> dict[str, Any]:
    judge, other = Judge(form), HOME / "other"
    form.make(other, seed=4, step=9)
    (other / "iter_0000009").rename(other / "iter_0000007")
    for file in judge.files:
        if (other / file).read_bytes() != (judge.pristine / file).read_bytes():
            path = judge.fresh() / file
            shutil.copy(other / file, path)
            judge.judge(f"{file} of another run", allowed="not to be known" if file.suffix == ".distcp" else "")
    return judge.done()


def numbers_of(path: Path) -> list[range]:
    """Where the numbers of tensors lie in a file."""
    data = path.read_bytes()
    if path.suffix == ".pt":
        return records(data, 0)
    if path.suffix != ".distcp":
        return []
    index = trusted_index(path.parent)
    found = []
    for place in index.storage_data.values():
        if place.relative_path == path.name:
            found += records(data[place.offset : place.offset + place.length], place.offset)
    return found


def records(data: bytes, begin: int) -> list[range]:
    found = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for item in archive.infolist():
            if "/data/" in item.filename:
                at = item.header_offset
                first = begin + at + 30 + sum(int.from_bytes(data[at + n : at + n + 2], "little") for n in (26, 28))
                found.append(range(first, first + item.file_size))
    return found


def flips(form: CoreForm, count: int = 12) -> dict[str, Any]:
    judge, rng = Judge(form), random.Random(1)
    for file in judge.files:
        data, numbers = (judge.pristine / file).read_bytes(), numbers_of(judge.pristine / file)
        inside = [False] * len(data)
        for span in numbers:
            inside[span.start : span.stop] = [True] * len(span)
        outside = [at for at, number in enumerate(inside) if not number]
        for at in [*rng.choices(range(len(data)), k=count), *rng.choices(outside, k=count)]:
            path, changed = judge.fresh() / file, bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            judge.judge(f"{file}: a bit of byte {at}", allowed="another number" if inside[at] else "")
    return judge.done()


# --- contents -------------------------------------------------------------------------------------------------------


def loaded(path: Path) -> Content:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content: Content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    return content


def groups_in(content: Content) -> list[Content]:
    """The groups of parameters, wherever they are; none where ranks keep their own."""
    optimizer = content.get("optimizer", content)
    found: list[Content] = optimizer.get("optimizer", optimizer).get("param_groups", [])
    return found


def of_groups(change: Callable[[list[Content]], Any]) -> Callable[[Content], Any]:
    return lambda content: change(groups_in(content))


FACTS: dict[str, tuple[Callable[[Content], Any], tuple[str, ...]]] = {
    "no step in a group": (of_groups(lambda groups: groups[1].pop("step")), ("step",)),
    "no step": (of_groups(lambda groups: [group.pop("step") for group in groups]), ("step",)),
    "a step of its own": (of_groups(lambda groups: groups[0].update(step=5)), ("step",)),
    "a step below zero": (of_groups(lambda groups: [group.update(step=-1) for group in groups]), ("step",)),
    "a step of text": (of_groups(lambda groups: [group.update(step="6") for group in groups]), ("step",)),
    "a step of a list": (of_groups(lambda groups: [group.update(step=[6]) for group in groups]), ("step",)),
    "a step of NaN": (of_groups(lambda groups: [group.update(step=math.nan) for group in groups]), ("step",)),
    "a step of 10^400": (of_groups(lambda groups: [group.update(step=10**400) for group in groups]), ("step",)),
    "a step of two": (of_groups(lambda groups: [group.update(step=torch.ones(2)) for group in groups]), ("step",)),
    "more steps than iterations": (
        of_groups(lambda groups: [group.update(step=8) for group in groups]),
        ("iteration", "step"),
    ),
    "another iteration": (lambda content: content.update(iteration=9), ("iteration",)),
    "no iteration": (lambda content: content.pop("iteration"), ("iteration",)),
    "an iteration of text": (lambda content: content.update(iteration="7"), ("iteration",)),
    "an iteration below zero": (lambda content: content.update(iteration=-7), ("iteration",)),
    "no betas": (of_groups(lambda groups: groups[0].pop("betas")), ("betas",)),
    "betas of NaN": (of_groups(lambda groups: groups[0].update(betas=(math.nan, 0.9))), ("betas",)),
    "betas above one": (of_groups(lambda groups: [g.update(betas=(1.5, 0.9)) for g in groups]), ("betas",)),
    "betas that differ": (of_groups(lambda groups: groups[1].update(betas=(0.5, 0.9))), ("betas",)),
    "no eps": (of_groups(lambda groups: groups[1].pop("eps")), ("eps",)),
    "a rate of its own": (of_groups(lambda groups: groups[0].update(lr_mult=2.0)), ("lr_mult",)),
    "experts": (of_groups(lambda groups: groups[0].update(is_expert_parallel=True)), ("param_groups",)),
    "a group lost": (of_groups(lambda groups: groups.pop()), ("param_groups",)),
    "a group twice": (of_groups(lambda groups: groups.append(groups[0])), ("param_groups",)),
    "no groups": (lambda content: content.update(optimizer={}), ("optimizer",)),
    "no arguments": (lambda content: content.pop("args"), ("arg", "num-attention-heads", "num_layers")),
}


def moments_of(judge: Judge) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Make each tree whose tensors of state are damaged."""
    plain = [file for file in judge.files if file.name == "model_optim_rng.pt"]
    if plain and not any(file.name == "distrib_optim.pt" for file in judge.files):
        yield from _tensor_by_tensor(judge, plain[-1])
    elif plain:
        yield from _vectors(judge, plain[-1].with_name("distrib_optim.pt"))
    else:
        yield from _distributed(judge)


def first_below(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


SPOILT: dict[str, Callable[[torch.Tensor], Any]] = {
    "NaN": lambda tensor: first_below(tensor, math.nan),
    "infinite": lambda tensor: first_below(tensor, math.inf),
    "short": lambda tensor: tensor[:-1].clone(),
    "long": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "turned": lambda tensor: tensor[None].clone(),
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "whole numbers": lambda tensor: tensor.int(),
}


def _each(state: Content, kinds: tuple[str, ...]) -> Iterator[tuple[str, Callable[[Content], Any]]]:
    """What is done to a dict of kinds of state."""
    for kind in kinds:
        for word, spoil in SPOILT.items():
            yield f"{kind} {word}", lambda state, kind=kind, spoil=spoil: state.update({kind: spoil(state[kind])})  # type: ignore[misc]
        yield f"{kind} lost", lambda state, kind=kind: state.pop(kind)  # type: ignore[misc]
        yield f"{kind} renamed", lambda state, kind=kind: state.update({f"{kind}_": state.pop(kind)})  # type: ignore[misc]
        yield f"{kind} text", lambda state, kind=kind: state.update({kind: "none"})  # type: ignore[misc]
    yield "exp_avg_sq below zero", lambda state: state.update(exp_avg_sq=first_below(state["exp_avg_sq"], -1e-9))
    yield "moments swapped", lambda state: state.update(exp_avg=state["exp_avg_sq"], exp_avg_sq=state["exp_avg"])


TOLD = ("moment1/", "moment2/", "master/", "optimizer", "exp_avg", "param", "distrib_optim.pt")


def _tensor_by_tensor(judge: Judge, file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    def states(content: Content) -> Content:
        optimizer = content["optimizer"]
        found: Content = optimizer.get("optimizer", optimizer)["state"]
        return found

    def masters(content: Content) -> list[torch.Tensor]:
        found: list[torch.Tensor] = content["optimizer"]["fp32_from_fp16_params"][0]
        return found

    def saved(change: Callable[[Content], Any]) -> None:
        content = loaded(judge.fresh() / file)
        change(content)
        torch.save(content, judge.tree / file)

    for number in (0, 3):
        for what, change in _each({}, ("exp_avg", "exp_avg_sq")):
            saved(lambda content, change=change, number=number: change(states(content)[number]))  # type: ignore[misc]
            yield f"{file}: {number}: {what}", TOLD
    saved(lambda content: states(content).pop(0))
    yield f"{file}: a parameter lost", TOLD
    saved(lambda content: states(content).update({999: states(content)[0]}))
    yield f"{file}: a parameter added", TOLD
    saved(lambda content: groups_in(content)[0]["params"].reverse())
    yield f"{file}: parameters turned", TOLD
    saved(lambda content: groups_in(content)[0]["params"].__setitem__(0, groups_in(content)[0]["params"][1]))
    yield f"{file}: a parameter twice", TOLD
    if "fp32_from_fp16_params" in loaded(judge.pristine / file)["optimizer"]:
        for word, spoil in SPOILT.items():
            saved(lambda content, spoil=spoil: masters(content).__setitem__(0, spoil(masters(content)[0])))  # type: ignore[misc]
            yield f"{file}: a master {word}", TOLD
        saved(lambda content: masters(content).pop())
        yield f"{file}: a master lost", TOLD
        saved(lambda content: content["optimizer"].pop("fp32_from_fp16_params"))
        yield f"{file}: no masters", TOLD


def _vectors(judge: Judge, file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    def saved(change: Callable[[Content], Any]) -> None:
        content: Content = torch.load(judge.fresh() / file, weights_only=True)
        change(content)
        torch.save(content, judge.tree / file)

    for what, change in _each({}, ("exp_avg", "exp_avg_sq", "param")):
        saved(lambda content, change=change: [change(each) for each in content[0].values()])  # type: ignore[misc]
        yield f"{file}: {what}", TOLD
    for what, change in (
        ("no chunk", lambda content: content.pop(0)),
        ("two chunks", lambda content: content.update({1: content[0]})),
        ("two dtypes", lambda content: content[0].update(other=1)),
        ("no vectors", lambda content: content.update({0: 3})),
    ):
        saved(change)
        yield f"{file}: {what}", TOLD


def _distributed(judge: Judge) -> Iterator[tuple[str, tuple[str, ...]]]:
    (folder,) = {file.parent for file in judge.files if file.suffix == ".distcp"}
    tensors, others = whole_tensors(judge.pristine / folder)
    state = sorted(name for name in tensors if name.startswith("optimizer."))
    chosen = {kind: next(name for name in state if re.search(rf"[._]{kind}(\.|$)", name)) for kind in ("exp_avg",)}
    name = chosen["exp_avg"]
    square = re.sub(r"exp_avg(?=\.|$)", "exp_avg_sq", name)

    def saved(change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        changed = dict(tensors)
        change(changed)
        write_whole(judge.fresh() / folder, changed, others)

    for each in (name, square, *(next((n for n in state if "param" in n), name),)):
        for word, spoil in SPOILT.items():
            saved(lambda changed, each=each, spoil=spoil: changed.update({each: spoil(changed[each])}))  # type: ignore[misc]
            yield f"{each} {word}", (*TOLD, each)
        saved(lambda changed, each=each: changed.pop(each))  # type: ignore[misc]
        yield f"{each} lost", (*TOLD, each)
        saved(lambda changed, each=each: changed.update({f"{each}x": changed.pop(each)}))  # type: ignore[misc]
        yield f"{each} renamed", (*TOLD, each)
    saved(lambda changed: changed.update({square: first_below(changed[square], -1e-9)}))
    yield f"{square} below zero", TOLD
    saved(lambda changed: changed.update({name: changed[square], square: changed[name]}))
    yield f"{name} swapped", TOLD
    weights = [name for name in sorted(set(tensors) - set(state)) if tensors[name].numel()]  # extra states have none
    for weight in weights[:6]:
        saved(lambda changed, weight=weight: changed.pop(weight))  # type: ignore[misc]
        yield f"{weight} lost", (str(judge.tree),)
        saved(lambda changed, weight=weight: changed.update({weight: changed[weight].narrow(-1, 0, 1).clone()}))  # type: ignore[misc]
        yield f"{weight} narrow", (str(judge.tree), ".weight", ".bias")


def contents(form: CoreForm) -> dict[str, Any]:
    judge = Judge(form)
    holder = next(file for file in reversed(judge.files) if file.name in ("model_optim_rng.pt", "common.pt"))
    grouped = bool(groups_in(loaded(judge.pristine / holder)))
    for what, (change, names) in FACTS.items():
        content = loaded(judge.fresh() / holder)
        if not grouped and ("param_groups" in names or names[0] in ("step", "betas", "eps", "lr_mult", "optimizer")):
            continue
        if not grouped and "step" in names:
            continue
        if what == "no iteration" and holder.name == "common.pt":
            continue  # the folder's name says it
        if what == "no arguments" and holder != next(f for f in judge.files if f.name == holder.name):
            continue  # the first rank's count
        change(content)
        torch.save(content, judge.tree / holder)
        judge.judge(f"{holder}: {what}", names)
    for what, names in moments_of(judge):
        judge.judge(what, names)
    return judge.done()


ODD: tuple[Any, ...] = (
    None,
    "",
    "text",
    -1,
    0,
    10**400,
    math.nan,
    [],
    [[]],
    {},
    (),
    torch.ones(2),
    torch.ones(0),
    {1: {2: 3}},
)


def leaves(form: CoreForm) -> dict[str, Any]:
    """Whatever is read then is read: an argument may have many values."""
    judge = Judge(form)
    holder = next(file for file in judge.files if file.name in ("model_optim_rng.pt", "common.pt"))
    paths = sorted(set(leaf_paths(loaded(judge.pristine / holder))), key=str)
    for number, path in enumerate(paths):
        for odd in (ODD[number % len(ODD)], ODD[(number * 5 + 3) % len(ODD)]):
            content: Any = loaded(judge.fresh() / holder)
            at = content
            for step in path[:-1]:
                at = vars(at) if isinstance(at, argparse.Namespace) else at[step]
            at = vars(at) if isinstance(at, argparse.Namespace) else at
            at[path[-1]] = odd
            torch.save(content, judge.tree / holder)
            judge.judge(f"{holder}: {path} = {odd!s:.20}", allowed="read")
    return judge.done()


def leaf_paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    content = vars(content) if isinstance(content, argparse.Namespace) else content
    if path and path[0] == "model":
        yield path
        return
    if path:
        yield path
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(min(2, len(content))):
            yield from leaf_paths(content[key], (*path, key))


def late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"no end within {SECONDS} s")


KINDS = {"cuts": cuts, "absent": absent, "flips": flips, "strangers": strangers, "contents": contents, "leaves": leaves}
OF_RECORDED = ("cuts", "absent", "flips")
"""What is done to recorded trees, which hold objects that only Megatron can write."""


def item(prove: Callable[[CoreForm], dict[str, Any]], form: CoreForm) -> Callable[[], dict[str, Any]]:
    return lambda: prove(form)


if __name__ == "__main__":
    virtual = resident("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, ((virtual + 2 * MEBIBYTES) << 20,) * 2)
    signal.signal(signal.SIGALRM, late)
    read_equal_bytes_once()
    items = [(f"{name}: {kind}", item(prove, form)) for name, form in CORE.items() for kind, prove in KINDS.items()]
    items = [each for each in items if each[0] != "torch_dist, dp_reshardable: strangers"]  # has one run only
    items += [(f"{name}: {kind}", item(KINDS[kind], form)) for name, form in RECORDED.items() for kind in OF_RECORDED]
    try:
        run("core_damage", items)
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
