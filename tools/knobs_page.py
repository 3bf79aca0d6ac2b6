"""Write ``docs/memory.md`` from the knob files: ``python -m tools.knobs_page > docs/memory.md``."""

from __future__ import annotations

import sys

from verl_memopt.memory.knob import PARTS, Knob, in_yaml, knobs, text_of
from verl_memopt.plan.list_knobs import MIB, Saved, example

HEAD = """# Memory knobs

<!-- Written by `python -m tools.knobs_page` from the files of `verl_memopt/memory/`; edit those, not this page. -->

This page is for you if you choose settings that save device memory. It says for each of these knobs what it does, when to use it,
what it saves and costs, and what it cannot be combined with. If your run has just run out of memory, begin with
[Out of memory](out_of_memory.md).

`verl-memopt knobs` prints the table, `verl-memopt knobs NAME` one section, and `verl-memopt knobs --measure --model FOLDER`
measures each knob on your own model. With `algorithm.adv_estimator=gae`, keys below `critic` set the same knobs for the critic,
under the same rules as for the policy.
"""


def page() -> str:
    return "\n".join([HEAD, _overview(), *map(section, knobs())])


def _overview() -> str:
    rows = "".join(f"| [{knob.name}](#{knob.name}) | {_saving(knob)} | {knob.cost} |\n" for knob in knobs())
    return f"| knob | saves in the example | costs |\n|---|---|---|\n{rows}\nThe example: {example().work}.\n"


def _saving(knob: Knob) -> str:
    saved = example().savings.get(knob.name)
    return "" if saved is None else _amount(saved)


def _amount(saved: Saved) -> str:
    amount = f"{abs(saved.num_bytes) / MIB:,.0f} MiB"
    return f"nothing; it takes {amount} more of {saved.kind}" if saved.num_bytes < 0 else f"{amount} of {saved.kind}"


def section(knob: Knob) -> str:
    text = text_of(knob.name)
    keys = "".join(f"| `{key}` | {_default(knob, key)} |\n" for key in knob.keys)
    keys += "".join(f"| `{name}` | |\n" for name in knob.besides)
    parts = "".join(f"- **{part}:** {text[part]}{_measured(knob) if part == 'Saves' else ''}\n" for part in PARTS)
    refuses = "".join(f"- **Refuses** {_keys(refusal.keys)}: {refusal.because}.\n" for refusal in knob.refuses)
    return f"## {knob.name}\n\n{text['']}\n\n| key or variable | default |\n|---|---|\n{keys}\n{parts}{refuses}"


def _keys(keys: tuple[str, ...]) -> str:
    return " with ".join(f"`{key}`" for key in keys)


def _default(knob: Knob, key: str) -> str:
    return f"`{in_yaml(knob.defaults()[key])}`" if key in knob.defaults() else ""


def _measured(knob: Knob) -> str:
    saved = example().savings.get(knob.name)
    if saved is None:
        return ""
    return f" In the example: {_amount(saved)} in `{saved.phase}`."


if __name__ == "__main__":
    sys.stdout.write(page())
