"""Chat templates of others, rendered in a sandbox. It runs as a child of `untrusted.Confined`, which sets limits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mega.core.untrusted import serve


@lru_cache(maxsize=1)
def _compiled(source: str) -> Any:
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"not a Jinja template ({error})") from None


def _refuse(message: object) -> None:
    raise ValueError(str(message))


def answer(question: dict[str, Any]) -> str | None:
    """The text of `messages` by the template `source`; None where there are no messages, and it was only compiled."""
    template = _compiled(question["source"])
    if "messages" not in question:
        return None
    values = {name: question[name] for name in ("messages", "bos_token", "eos_token")}
    text: str = template.render(**values, add_generation_prompt=question.get("reply", False))
    return text


if __name__ == "__main__":
    serve(answer)
