"""Try a chat template in a child process before it runs here, because a template is a program that comes with a model.

Jinja's sandbox limits neither time nor memory. Nested loops, or ``'x' * 10**12``, can use all of both. Some of this happens in a
single instruction, which neither a signal nor a thread can stop. So each template is first rendered in a child process with
limits.

The child imports only the standard library and Jinja, so the trial takes about a tenth of a second.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CPU_SECONDS = 2
"""Limit of the trial's processor time."""
WALL_SECONDS = 120
"""Limit of the trial's total time, even if the processor is busy with other work."""
MEMORY_BYTES = 2**30
"""Limit of the trial's address space."""
LARGEST_TEXT = 2**22
"""Most characters that a template may write for a few words. Real templates write some thousands, with a long system prompt."""
LARGEST_PROMPT = 2**26
"""Most characters of a rendered conversation."""

JINJA = ("jinja2", "markupsafe")
TRIED, TOO_MUCH, TOO_LONG = 0, 3, 4
REASONS = {
    TOO_MUCH: f"needs more than {MEMORY_BYTES // 2**20} MiB of memory",
    TOO_LONG: f"writes more than {LARGEST_TEXT:,} characters",
}
"""Exit code of the child -> what the template does wrong."""


class TemplateLimitError(ValueError):
    """A chat template takes more time or memory, or writes more, than any conversation needs."""


def render_bounded(tokenizer: Any, messages: Any, **arguments: Any) -> str:
    """Render messages with a chat template, after a trial of the template.

    The template is the argument ``chat_template``, or else the tokenizer's. The trial renders a few words without the other
    arguments. A row or an argument that makes the template run long is not found by the trial. For the real messages only the
    length of the result is checked.

    Raises:
        TemplateLimitError: The template exceeds a limit. The message is a clause that fits into another error's sentence.
    """
    given = arguments.get("chat_template") or getattr(tokenizer, "chat_template", None) or ""
    for template in given.values() if isinstance(given, dict) else (given,):
        if reason := fault_of(str(template)):
            raise TemplateLimitError(f"for a few words it {reason}")
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    if len(text) > LARGEST_PROMPT:
        raise TemplateLimitError(f"it writes {len(text):,} characters, and a prompt has at most {LARGEST_PROMPT:,}")
    return text


@cache
def fault_of(template: str) -> str | None:
    """Return in words which limit a template exceeds. None = it renders a few words within the limits, or fails at once."""
    # With -I the child sees neither PYTHONPATH nor the user's packages. Jinja may be one of them, so pass its path.
    found = [spec.origin for name in JINJA if (spec := find_spec(name)) is not None and spec.origin is not None]
    asked = {"template": template, "path": [str(Path(origin).parents[1]) for origin in found]}
    try:
        trial = subprocess.run(
            [sys.executable, "-I", __file__], input=json.dumps(asked).encode(), timeout=WALL_SECONDS, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"takes more than {WALL_SECONDS} s"
    if trial.returncode < 0:
        return f"takes more than {CPU_SECONDS} s of processor time"
    if trial.returncode not in (TRIED, *REASONS):
        last = trial.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"could not be tried in a child process ({last:.200})"
    return REASONS.get(trial.returncode)


# The child.

WORDS = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
)


def _parts(template: str) -> Iterator[str]:
    """Yield the text that a template writes, in parts. It gets only those names of transformers that matter for size and time."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    environment.globals |= {"raise_exception": _raised, "strftime_now": lambda _: "today"}
    compiled = environment.from_string(template.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    for messages in WORDS:
        for prompts in (True, False):
            names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "</s>")
            yield from compiled.generate(messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **names)


def _raised(text: str) -> None:
    raise ValueError(text)


def main() -> int:
    """Render the template on standard input within the limits, and return one of :data:`REASONS`, or :data:`TRIED`."""
    asked = json.load(sys.stdin)
    sys.path += asked["path"]
    import jinja2.sandbox  # noqa: F401 - import it here, so that a failed import does not count as a fault of the template

    for limit, most in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    length = 0
    try:
        for part in _parts(asked["template"]):
            length += len(part)
            if length > LARGEST_TEXT:
                return TOO_LONG
    except MemoryError:
        return TOO_MUCH
    except Exception:  # noqa: BLE001 - rendering a real conversation reports the same error, with its row
        return TRIED
    return TRIED


if __name__ == "__main__":
    sys.exit(main())
