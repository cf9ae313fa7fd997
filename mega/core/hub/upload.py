"""Upload a folder to a repository on the Hub, with a model card if the repository has none."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from mega.core.hub.choice import POOLING, SMALL, TOKENIZER, TOOL_TEMPLATE
from mega.core.hub.download import SPARE, format_size
from mega.core.hub.faults import explained, needs_library
from mega.core.hub.names import HubName, hub_name
from mega.core.hub.options import PushOptions

CARD = "README.md"
WEIGHTS = (".safetensors", ".gguf")
MODEL = re.compile(r"(.*config|params|model.*|sentencepiece.*|spiece.*|modules)\.(json|model|txt|jinja)")


def repository(name: str) -> HubName:
    """Parse the name of a repository. Errors: ValueError if the name is invalid, or selects a revision or files."""
    parsed = hub_name(name)
    if parsed is None or parsed.revision is not None or parsed.part is not None:
        raise ValueError(f"NAME {name}: must be OWNER/NAME, and no path that exists")
    return parsed


def pushed_files(folder: Path) -> list[str]:
    """Return the names of the files to upload. Errors: ValueError if no file contains weights."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and _of_model(path.name))
    if not any(name.endswith(WEIGHTS) for name in names):
        raise ValueError(f"DIRECTORY {folder}: holds no .safetensors and no .gguf, and nothing else is uploaded")
    nested = [TOOL_TEMPLATE, *([POOLING] if "modules.json" in names else [])]
    return [*names, *(path for path in nested if (folder / path).is_file())]


def _of_model(name: str) -> bool:
    """Whether a file belongs to a model. Other JSON and text files in the folder may be private notes."""
    is_metadata = name.endswith(SMALL) and (MODEL.fullmatch(name) or TOKENIZER.fullmatch(name)) is not None
    return is_metadata or name.endswith(WEIGHTS)


def model_card(name: HubName, table: Mapping[str, str], options: PushOptions, *, task: str | None) -> str:
    """Return the text of a model card. table: rows of the card's table. task: the Hub's name for the model's task.

    >>> print(model_card(HubName("me/toy"), {"layers": "2"}, PushOptions(), task=None))  # doctest: +ELLIPSIS
    ---
    tags: ["mega"]
    ---
    # toy
    ...
    """
    head: dict[str, object] = {"license": options.license, "base_model": options.base_model, "pipeline_tag": task}
    head["library_name"] = None if task is None else "transformers"
    front = [f"{key}: {json.dumps(value)}" for key, value in head.items() if value is not None]
    rows = [f"| {key} | {value} |" for key, value in table.items()]
    use = [
        "With transformers:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name.repository}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name.repository}")',
        "```",
        "",
        "With mega:",
        "",
        "```bash",
        f'mega generate --load {name.repository} --prompt "Once upon a time"',
        "```",
    ]
    lines = ["---", *front, 'tags: ["mega"]', "---", f"# {name.repository.partition('/')[2]}", ""]
    lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join([*lines, *(use if task == "text-generation" else ()), ""])


def check_push(name: HubName) -> None:
    """Check that an upload is possible. Call this function before the files are prepared. Errors: ValueError with the
    reason if the upload is not possible."""
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        raise ValueError(f"mega push: {needs_library()}") from None
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"NAME {name}: HF_HUB_OFFLINE=1 forbids it")
    if get_token() is None:
        raise ValueError(f"NAME {name}: needs a token that may write: HF_TOKEN, or hf auth login")


def check_temporary_room(directory: Path, size: int) -> None:
    """Check that $TMPDIR has enough free space for `directory` in Hugging Face's format. size: number of bytes
    required. Errors: ValueError if there is too little space."""
    temporary = Path(tempfile.gettempdir())
    free = shutil.disk_usage(temporary).free
    if size + SPARE > free:
        raise ValueError(
            f"DIRECTORY {directory}: its {format_size(size)} in Hugging Face's form do not fit: {temporary} has "
            f"{format_size(free)} free; TMPDIR names another place"
        )


def push(folder: Path, name: HubName, options: PushOptions, card: str, report: Callable[[str], None]) -> str:
    """Upload the files of `folder`, and return the URL of the commit. An existing model card in the repository is kept
    unless --card is given. Errors: ValueError for errors that the user can correct, OSError for network or disk
    errors."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    files, api = pushed_files(folder), HfApi()
    size = sum((folder / file).stat().st_size for file in files)
    with explained("NAME", name):
        api.create_repo(name.repository, private=options.private, exist_ok=True)
        if options.private and not api.repo_info(name.repository).private:
            raise ValueError(f"--private: {name} exists and is public")
        report(f"{name}: {len(files)} files, {size:,} bytes: {', '.join(files)}")
        operations = [CommitOperationAdd(file, str(folder / file)) for file in files]
        if options.card is not None or not api.file_exists(name.repository, CARD):
            operations.append(CommitOperationAdd(CARD, card.encode()))
        else:
            report(f"{name}: keeps the model card that it has; --card replaces it")
        commit = api.create_commit(name.repository, operations, commit_message=options.message)
    return str(commit.commit_url)
