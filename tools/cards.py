"""Ask ``verl-memopt fit`` which model fits which card, and write the answer into every page, profile and script that shows it.

``python -m tools.cards`` fills what stands between the markers ``<cards>`` and ``</cards>`` of each file of :data:`FILES`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from verl_memopt.config.keys import shown
from verl_memopt.config.loader import PACKAGED, load_settings
from verl_memopt.memory.cards import CARDS, gigabytes
from verl_memopt.model.sizes import PUBLISHED
from verl_memopt.observe.log_setup import silent
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.model_refusals import why_refused
from verl_memopt.plan.search import PLANS, Change, Search
from verl_memopt.plan.verdict import Card, sizes_of_models

ROOT = Path(__file__).parents[1]
EXAMPLES = "examples/memory_optimization"
RANK, BASE = "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
WAYS: dict[str, tuple[str, ...]] = {
    "all": (),
    "lora": (RANK, BASE),
    "qlora": (RANK, BASE, "actor_rollout_ref.model.quantization=nf4"),
}
"""Way of training -> settings that are added to a card's profile."""
LEAST_BYTES = {"all": 2.0, "lora": 2.0, "qlora": 0.5}
"""Way of training -> bytes per weight that stay on the card during generation under any settings.

A model that needs more than the card has is not tried. Neither is one that refuses the settings, such as experts in 4 bits.
"""


HEAD = {
    "en": "| profile | all weights, profile alone | all weights | LoRA | LoRA on 4 bits | host GiB |",
    "ko": "| 프로필 | 모든 가중치, 프로필만 | 모든 가중치 | LoRA | 4비트 위의 LoRA | 호스트 GiB |",
}
FOOT = {
    "en": """
Each cell names the largest preset (`model=`) that fits one card. `verl-memopt fit` computed it by formulas, generation included,
for prompts and responses of 512 tokens each. Nobody has measured it on a card. LoRA has rank 32, on bfloat16 weights or on a
base in nf4.

The models in the second column need only the profile. `memory=141g` moves less to the host than `memory=80g`, so the model
that fits with it alone is smaller. The other columns may need further settings, none of which changes a number.
`verl-memopt fit --config-name rloo_trainer model=... memory=...` prints them. The last column is the host memory that the
models in the third column need.

\\* With these settings:

""",
    "ko": """
칸마다 카드 한 장에 들어가는 가장 큰 프리셋(`model=`)이 적혀 있습니다. `verl-memopt fit`이 생성 단계까지 넣어 공식으로 계산한
값이며, 프롬프트와 답변은 각각 512토큰입니다. 실제 카드에서 잰 적은 없습니다. LoRA의 랭크는 32이고, 바탕 모델의 가중치는
bfloat16이거나 nf4입니다.

둘째 열은 프로필만으로 들어갑니다. `memory=141g`는 `memory=80g`보다 호스트로 옮기는 것이 적어서, 프로필만으로 들어가는 모델이 더
작습니다. 나머지 열에는 다른 설정이 더 필요할 수 있지만, 계산 결과를 바꾸는 설정은 없습니다. 필요한 설정은
`verl-memopt fit --config-name rloo_trainer model=... memory=...`가 알려 줍니다. 마지막 열은 셋째 열에 필요한 호스트 메모리입니다.

\\* 다음 설정이 함께 필요합니다:

""",
}
"""Language of a page -> the text below the rows of its table. ``HEAD`` has the header row above them."""


@dataclass(frozen=True)
class Largest:
    """The largest preset that fits a card, and the changes that `fit` adds to the card's profile for it."""

    model: str
    changes: tuple[Change, ...] = ()
    host_gib: int = 0
    binding: str = ""

    @property
    def command(self) -> str:
        return " ".join(f"{key}={shown(value)}" for change in self.changes for key, value in change.keys.items())


@dataclass(frozen=True)
class Row:
    """The largest presets for one card: with its profile alone, and for each way of training with the changes that `fit` adds.

    None of these changes changes a computed number.
    """

    card: str
    alone: Largest
    all: Largest
    lora: Largest
    qlora: Largest

    @property
    def line(self) -> str:
        added = "" if self.all.model == self.alone.model else " *"
        cells = (
            f"`memory={self.card}`", f"`{self.alone.model}`", f"`{self.all.model}`{added}", f"`{self.lora.model}`",
            f"`{self.qlora.model}`", f"{self.all.host_gib}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


@cache
def presets() -> dict[str, int]:
    """Return the presets of ``model=`` with their number of parameters, largest first."""
    found = {}
    for file in (PACKAGED / "model").glob("*.yaml"):
        path = yaml.safe_load(file.read_text())["actor_rollout_ref"]["model"]["path"]
        if path in PUBLISHED:
            found[file.stem] = PUBLISHED[path].params
    return dict(sorted(found.items(), key=lambda preset: -preset[1]))


@cache
def row(card: str) -> Row:
    ways = {way: _largest(card, way, searches=True) for way in WAYS}
    return Row(card, _largest(card, "all", searches=False), **ways)


def _largest(card: str, way: str, searches: bool) -> Largest:
    size = Card.of(gigabytes(card))
    for model, params in presets().items():
        if LEAST_BYTES[way] * params > size.num_bytes:
            continue
        files = ["data.train_files=none", "data.val_files=null", f"memory={card}", f"model={model}"]
        with silent():
            settings = load_settings("rloo_trainer", [*files, *WAYS[way]])
            if why_refused(settings, sizes_of_models(settings)) is not None:
                continue
            search = Search(settings, size, None if searches else ())
        changes, after = search.changes(PLANS[:1])
        if after.fits:
            return Largest(model, changes, math.ceil(after.host_bytes / GIB), after.peaks.binding)
    raise AssertionError((card, way))


def table(language: str) -> str:
    """Return the Markdown table of all cards, followed by the added settings."""
    rows = [row(card) for card in CARDS]
    starred = [entry for entry in rows if entry.all.model != entry.alone.model]
    body = "".join(f"{entry.line}\n" for entry in rows)
    added = "".join(f"- `model={entry.all.model} memory={entry.card} {entry.all.command}`\n" for entry in starred)
    return f"{HEAD[language]}\n|---|---|---|---|---|---:|\n{body}{FOOT[language]}{added}"


def profile_lines(card: str) -> str:
    found = row(card)
    more = "" if found.all.model == found.alone.model else f"; with the settings that fit adds: {found.all.model}"
    return (
        "# Largest model presets that fit, estimated by `verl-memopt fit`, not measured:\n"
        f"# - All weights trained: {found.alone.model}{more}.\n"
        f"# - LoRA of rank 32, with the settings that fit adds: {found.lora.model}; on a 4-bit base: {found.qlora.model}.\n"
        f"# With {found.alone.model} and all weights trained, the memory peak is in the phase {found.alone.binding}, "
        f"and the host needs {found.alone.host_gib} GiB.\n"
    )


def script_lines(card: str) -> str:
    """Return the comment of a script for a card."""
    return f"# The largest preset that fits with its profile alone, by `verl-memopt fit`: model={row(card).alone.model}.\n"


FILES: dict[str, tuple[str, str]] = {
    "README.md": ("table", "en"),
    "docs/README_ko.md": ("table", "ko"),
    f"{EXAMPLES}/README.md": ("table", "en"),
    "docs/out_of_memory.md": ("table", "en"),
    f"{EXAMPLES}/run_rtx5090_rloo.sh": ("script", "32g"),
    **{f"verl_memopt/config/yaml/memory/{card}.yaml": ("profile", card) for card in CARDS},
}
"""File -> kind of text between its markers, and the language or the card of that text."""
MARKED = re.compile(r"(<cards>[^\n]*\n)(.*?)([^\n]*</cards>)", re.DOTALL)


def filled(name: str) -> str:
    """Return a file with the text between its markers replaced."""
    kind, of = FILES[name]
    text = {"table": table, "script": script_lines, "profile": profile_lines}[kind](of)
    filled, count = MARKED.subn(lambda found: f"{found[1]}{text}{found[3]}", (ROOT / name).read_text())
    assert count == 1, f"{name}: {count} pairs of <cards> and </cards>"
    return filled


if __name__ == "__main__":
    for name in FILES:
        (ROOT / name).write_text(filled(name))
