"""What each recipe costs, by `mega memory-estimate` on H100s: the lines "# Cost, estimated ..." of recipes/*.toml.

python tests/battery/recipes.py            rewrite them
"""

from __future__ import annotations

import re
from pathlib import Path

import mega
from mega.core.estimate.duration import Interruptions, training

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
COST = re.compile(r"^# Cost, estimated .*\n(?:# (?! ).*\n)*", re.MULTILINE)


def world_of(text: str) -> int:
    """GPUs that the line in a recipe's header starts."""
    numbers = dict(re.findall(r"--(hosts|nproc) (\d+)", text))
    return int(numbers.get("hosts", 1)) * int(numbers.get("nproc", 1))


def options_of(path: Path) -> mega.Options:
    """The run; of a finetuning with a model of 7 billion parameters in place of that at --load."""
    text = path.read_text(encoding="utf-8")
    finetunes = "mega finetune" in text
    data = {name: str(path) for name in ("chat_data", "dpo_data") if f"--{name.replace('_', '-')} " in text}
    return mega.config("llama2-7b" if finetunes else None, file=path, **data)


def cost(path: Path) -> str:
    """The line of a recipe."""
    world = world_of(path.read_text(encoding="utf-8"))
    found = mega.estimate(options_of(path), world=world, gpu="h100")
    assert found.device is not None and found.step is not None and found.fits
    whole = training(found.run, world, found.device, Interruptions())
    assert whole is not None
    need = found.memory.needed(found.device.communicator)
    hours = 24 * whole.days * world
    shown = f"{hours:,.{int(hours < 10)}f} GPU hours"
    each = f"on each of {world:,}" if world > 1 else "on one"
    return (
        f"# Cost, estimated for H100s: {need:.0f} GiB {each}, {found.step.seconds:.3g} s a step (MFU "
        f"{found.step.mfu:.0%}), {whole.steps:,}\n# steps: {whole.days:.2g} days, {shown}.\n"
    )


def main() -> None:
    for path in sorted(RECIPES.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        line = cost(path)
        path.write_text(COST.sub(line, text), encoding="utf-8")
        print(path.name, line.replace("\n# ", " ").removeprefix("# "), end="")


if __name__ == "__main__":
    main()
