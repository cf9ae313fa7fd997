"""Translate a DeepSpeed JSON to options of a run: batch, precision, ZeRO, clipping, optimizer, schedule.

    {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}
        ->  micro_batch 2, dtype fp16, zero 2

Absent keys leave mega's defaults. A key that changes the computation and has no option here is rejected with an error
that names the key. A key that affects only how DeepSpeed computes something is dropped. With "auto", flags set the
option. `deepspeed.toml` lists the keys; this module handles the keys that need more than a table entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mega.command_line.legacy.tables import table
from mega.core.config.compose import nearest
from mega.core.config.run import entries, flag_of
from mega.core.config.toml import LARGEST, LIMIT, cut
from mega.core.untrusted import parse_json, read_limited

MOST_POWER = 127
"""Exponent of the largest power of two that fp32 can represent."""

Options = dict[str, Any]
Problems = list[str]


def read(path: str, left_out: Problems | None = None) -> Options:
    """Return option name -> value for the JSON at `path`. left_out: a list to which a message is added for each key
    that is not supported.

    Errors: ValueError with these messages if `left_out` is None.
    """
    source = f"--deepspeed-config {path}"
    return values(parse_json(read_limited(path, LIMIT, source), source), path, left_out)


def above(
    file: Mapping[str, object], path: str, flags: Mapping[str, object], left_out: Problems | None = None
) -> Options:
    """Combine the options of a TOML `file` with those of the JSON at `path`. If both set an option, they must agree, or
    a flag must set it. left_out: as in `read`. Errors: ValueError naming the option; those of `read`.
    """
    options = read(path, left_out)
    lines = [
        f"--deepspeed-config {path}: means {flag_of(name)} {value}, --config has {file[name]}; give the flag"
        for name, value in options.items()
        if name not in flags and file.get(name, value) != value
    ]
    if lines:
        raise ValueError("\n".join(lines))
    return {**file, **options}


def values(content: object, source: str, left_out: Problems | None = None) -> Options:
    """Return option name -> value for a parsed JSON. source: the file, for messages. left_out: as in `read`.

    >>> values({"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}, "ds.json")
    {'clip_grad': 1.0, 'dtype': 'bf16', 'zero': 1}
    >>> values({"zero_optimization": {"stag": 2}}, "ds.json")
    Traceback (most recent call last):
    ...
    ValueError: ds.json: zero_optimization.stag: is not a key of DeepSpeed's that is known here (nearest: stage); \
correct the file, or leave it out by --deepspeed-lenient
    """
    if not isinstance(content, dict):
        raise ValueError(f"{source}: must be one JSON object")
    root = _Table(content, "")
    root.take_row("file")
    for read_part in (_precision, _zero, _optimizer, _scheduler, _logging, _curriculum):
        read_part(root)
    root.refuse_others()
    if left_out is not None:
        left_out += [f"{source}: {line}" for line in root.problems]
    elif root.problems:
        pronoun = "it" if len(root.problems) == 1 else "them"
        end = f"; correct the file, or leave {pronoun} out by --deepspeed-lenient"
        raise ValueError("\n".join(f"{source}: {line}" for line in root.problems) + end)
    return root.found


class _Table:
    """One JSON object, whose keys are consumed one by one; `refuse_others` refuses all keys that remain."""

    def __init__(self, content: Mapping[str, object], prefix: str, parent: _Table | None = None):
        self.content, self.prefix = dict(content), prefix
        self.known: set[str] = set()
        self.found: Options = parent.found if parent is not None else {}
        self.problems: Problems = parent.problems if parent is not None else []

    def take(self, key: str, *kinds: type) -> Any:
        """Consume and return the value at `key`; None if the value is absent, null or "auto". A value whose type is not
        in `kinds` is reported as a problem."""
        self.known.add(key)
        value = self.content.pop(key, None)
        if value is None or value == "auto":
            return None
        if kinds and not (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            self.refuse(key, f"must be {' or '.join(_KINDS[kind] for kind in kinds)}, not {cut(json.dumps(value))}")
            return None
        return value

    def option(self, key: str, name: str, *more_kinds: type) -> None:
        """Consume the value at `key` and set the option `name` to it. more_kinds: accepted types in addition to that of
        the option."""
        entry = entries()[name]
        value = self.take(key, *((int, float) if entry.kind is float else (entry.kind,)), *more_kinds)
        choices = entry.choices
        if choices and value is not None and value not in choices:
            self.refuse(key, f"{value} is not supported; valid: {', '.join(choices)}")
        elif value is not None:
            self.found[name] = entry.kind(value)

    def table(self, key: str) -> _Table | None:
        """Consume and return the object at `key`."""
        content = self.take(key, dict)
        return None if content is None else _Table(content, f"{self.prefix}{key}.", self)

    def take_row(self, name: str) -> None:
        """Consume the keys listed in one entry of deepspeed.toml."""
        row = table("deepspeed")[name]
        for key, option in row.get("options", {}).items():
            self.option(key, option)
        for key, rule in row.get("only", {}).items():
            self.only(key, rule["valid"], rule["why"])
        for key in row.get("dropped", ()):
            self.take(key)

    def only(self, key: str, valid: object, why: str) -> None:
        """Consume a key that changes the computation, and refuse all values except `valid`, which match mega's
        behaviour."""
        value = self.take(key)
        if value is not None and value != valid:
            self.refuse(key, f"{json.dumps(value)} is not supported: {why}; valid: {json.dumps(valid)}")

    def refuse(self, key: str, why: str) -> None:
        self.problems.append(f"{self.prefix}{key}: {why}")

    def refuse_others(self) -> None:
        for key in self.content:
            self.refuse(key, f"is not a key of DeepSpeed's that is known here{nearest(key, self.known)}")


_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "an object"}


def _precision(root: _Table) -> None:
    fp16, enabled = root.table("fp16"), []
    if fp16 is not None:
        if fp16.take("enabled", bool):
            enabled.append("fp16")
        # 0 means a dynamic scale in DeepSpeed
        scale = fp16.take("loss_scale", int, float)
        power = fp16.take("initial_scale_power", int)
        if enabled:
            if scale:
                root.found["loss_scale"] = float(scale)
            elif power is not None and not 0 <= power <= MOST_POWER:
                fp16.refuse("initial_scale_power", f"{power}: must be 0 to {MOST_POWER}, as fp32 holds")
            elif power is not None:
                root.found["initial_loss_scale"] = 2.0**power
        fp16.take_row("fp16")
        fp16.refuse_others()
    for key in ("bf16", "bfloat16"):
        bf16 = root.table(key)
        if bf16 is not None:
            if bf16.take("enabled", bool):
                enabled.append(key)
            bf16.take_row("bf16")
            bf16.refuse_others()
    if len(enabled) > 1:
        root.refuse(enabled[1], f"is enabled along with {enabled[0]}; enable one of them")
    if enabled:
        root.found["dtype"] = "fp16" if enabled[0] == "fp16" else "bf16"
    amp = root.table("amp")
    if amp is not None and amp.take("enabled", bool):
        root.refuse("amp", "apex's mixed precision is not supported; valid: fp16, bf16")
    types = root.table("data_types")
    if types is not None:
        types.take_row("data_types")
        types.refuse_others()


def _zero(root: _Table) -> None:
    zero = root.table("zero_optimization")
    if zero is None:
        return
    zero.take_row("zero_optimization")
    zero.option("reduce_bucket_size", "bucket_size", float)  # DeepSpeed's documentation writes 5e8, a float
    device = _device(zero, "offload_optimizer")
    if device not in (None, "none", "cpu"):
        zero.refuse("offload_optimizer.device", f"{device} is not supported; valid: cpu, none")
    elif device is not None:
        zero.found["optimizer_offload"] = device == "cpu"
    if (param_device := _device(zero, "offload_param")) not in (None, "none"):
        zero.refuse(
            "offload_param.device", f"{param_device} is not supported: parameters stay on the device; valid: none"
        )
    zero.refuse_others()


def _device(zero: _Table, key: str) -> str | None:
    """Return the device for offloading, and drop DeepSpeed's other offloading options."""
    offload = zero.table(key)
    if offload is None:
        return None
    device: str | None = offload.take("device", str)
    offload.take_row("offload")
    offload.refuse_others()
    return device


def _optimizer(root: _Table) -> None:
    optimizer = root.table("optimizer")
    if optimizer is None:
        return
    kind, rules = optimizer.take("type", str), table("deepspeed")["optimizers"]
    if kind is not None and kind.lower() not in (rule_of := {name.lower(): rule for name, rule in rules.items()}):
        optimizer.refuse("type", f"{kind} is not supported{nearest(kind, rules)}; valid: {', '.join(rules)}")
    elif kind is not None:
        root.found["optimizer"] = rule_of[kind.lower()]
    params = optimizer.table("params")
    if params is not None:
        params.take_row("optimizer.params")
        largest = params.take("max_grad_norm", int, float)
        if largest is not None and largest != root.found.get("clip_grad"):
            clips = root.found.get("clip_grad", "absent")
            params.refuse("max_grad_norm", f"{largest}: must be gradient_clipping, which is {clips}")
        betas = params.take("betas")
        if isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas):
            root.found["adam_beta1"], root.found["adam_beta2"] = map(float, betas)
        elif betas is not None:
            params.refuse("betas", f"must be two numbers, not {json.dumps(betas)}")
        for bound in ("max_coeff", "min_coeff"):
            if params.take(bound) is not None:
                params.refuse(bound, "LAMB's ratio has no bounds here; leave the key out")
        params.refuse_others()
    optimizer.take_row("optimizer")
    optimizer.refuse_others()


def _scheduler(root: _Table) -> None:
    """Translate a schedule to warm-up and decay. The maximum rate of the schedule overrides the optimizer's rate."""
    scheduler = root.table("scheduler")
    if scheduler is None:
        return
    kind, schedules = scheduler.take("type", str), table("deepspeed")["schedules"]
    params = scheduler.table("params") or _Table({}, "scheduler.params.", root)
    scheduler.refuse_others()
    if kind not in schedules:
        scheduler.refuse(
            "type", f"{kind} is not supported{nearest(str(kind), schedules)}; valid: {', '.join(schedules)}"
        )
        return
    params.found["lr_decay"] = schedules[kind]
    params.take_row(kind)
    if kind == "LRRangeTest":
        _range_test(params)
    elif kind == "OneCycle":
        _one_cycle(params)
    else:
        _warm_up(kind, params)
    params.take_row("scheduler.params")
    params.refuse_others()


def _range_test(params: _Table) -> None:
    """Translate a schedule whose learning rate, min_lr (1 + rate x step / size), grows by min_lr every size / rate
    steps."""
    size = params.take("lr_range_test_step_size", int)
    rate = params.take("lr_range_test_step_rate", int, float)
    steps = (2000 if size is None else size) / (rate or 1.0)
    if not 1 <= steps < LARGEST or steps != int(steps):
        params.refuse("lr_range_test_step_rate", f"{rate} must divide lr_range_test_step_size into whole steps")
        return
    params.found["lr_decay_steps"] = int(steps)


def _one_cycle(params: _Table) -> None:
    """Translate a schedule whose learning rate rises from cycle_min_lr in the first part of a cycle, falls back to
    cycle_min_lr in the second part, and then stays constant."""
    first = params.take("cycle_first_step_size", int)
    second = params.take("cycle_second_step_size", int)
    first = 2000 if first is None else first
    params.found |= {"lr_warmup_style": "linear", "lr_warmup_steps": first}
    params.found["lr_decay_steps"] = first + (first if second is None else second)
    params.found["min_lr"] = params.found.get("lr_warmup_init", 0.0)
    if params.take("cycle_momentum", bool) is not False:
        params.refuse("cycle_momentum", "is true where it is left out: Adam's constants do not change; valid: false")


def _warm_up(kind: str, params: _Table) -> None:
    options = params.found
    options.setdefault("lr_warmup_steps", 1000)
    options.setdefault("lr_warmup_style", "log")
    if kind == "WarmupCosineLR":
        for key, name, default in (("warmup_min_ratio", "lr_warmup_init", 0.0), ("cos_min_ratio", "min_lr", 1e-4)):
            ratio = params.take(key, int, float)
            if "lr" in options:
                options[name] = (default if ratio is None else ratio) * options["lr"]
            else:
                params.refuse(key, "is a share of optimizer.params.lr, which is absent")


def _curriculum(root: _Table) -> None:
    curriculum = root.table("curriculum_learning")
    if curriculum is not None and curriculum.content.get("enabled") not in (None, False):
        root.refuse("curriculum_learning", "every step has samples of --seq-length tokens; valid: enabled false")


def _logging(root: _Table) -> None:
    board = root.table("tensorboard")
    if board is not None:
        parts = [part for part in (board.take("output_path", str), board.take("job_name", str)) if part]
        if board.take("enabled", bool):
            root.found["tensorboard_dir"] = "/".join(part.rstrip("/") for part in parts) or "runs"
        board.refuse_others()
    saved = root.table("activation_checkpointing")
    if saved is not None:
        saved.take_row("activation_checkpointing")
        saved.refuse_others()
