"""The tables of the study's pages, as Markdown, from a summary. The pages hold them word for word, and a test compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipe.rloo.memory_study.arms import EXPANSIONS, FULL, KS, LEGACY, MOST_KS, TRUNCATED
from recipe.rloo.memory_study.findings import find, held_bytes, process_bytes
from recipe.rloo.memory_study.formula import device_bytes
from recipe.rloo.memory_study.published import LABELS, LAST_GIB, PEAKS_GIB
from recipe.rloo.memory_study.records import COMPLETED, OOM

MIB, GIB = 2**20, 2**30
Row = dict[str, Any]
Summary = Mapping[str, Any]

ENGLISH = {
    "method": "method",
    "prompt": "prompt",
    "published": "published",
    "here": "here",
    FULL: "whole",
    TRUNCATED: "cut",
    OOM: "out of memory",
    "update": "update",
    f"token_{FULL}_{LEGACY}_coupled": "published trainer",
    f"token_{TRUNCATED}_{LEGACY}_coupled": "the same, prompt cut to 1,024 tokens: another task",
    f"token_{FULL}_no_retention": "its output and scores are not kept",
    f"token_{FULL}_response_only": "+ logits of the response alone",
    f"token_{FULL}_chunked": "+ no logits: log-probs in chunks",
    f"token_{FULL}_chunked_one_row": "+ one row in a forward",
    f"token_{FULL}_shared_prompt": "the prompt is computed once, rows packed together",
    f"token_{FULL}_shared_prompt_checkpointing": "+ activation checkpointing: this project's update",
}
KOREAN = {
    "method": "방법",
    "prompt": "프롬프트",
    "published": "공개된 값",
    "here": "다시 실행",
    FULL: "전체",
    TRUNCATED: "잘림",
    OOM: "메모리 부족",
    "update": "업데이트",
    f"token_{FULL}_{LEGACY}_coupled": "공개된 학습 코드",
    f"token_{TRUNCATED}_{LEGACY}_coupled": "같은 코드, 프롬프트를 1,024토큰으로 자름: 다른 과제가 됨",
    f"token_{FULL}_no_retention": "출력과 점수를 붙들고 있지 않음",
    f"token_{FULL}_response_only": "+ 응답의 로짓만 계산",
    f"token_{FULL}_chunked": "+ 로짓 없이 로그 확률을 조각으로 계산",
    f"token_{FULL}_chunked_one_row": "+ forward 한 번에 한 행",
    f"token_{FULL}_shared_prompt": "프롬프트를 한 번만 계산하고 행을 함께 묶음",
    f"token_{FULL}_shared_prompt_checkpointing": "+ 활성값 체크포인팅: 이 프로젝트의 업데이트",
}
"""Words of the tables, by language."""


def methods_table(summary: Summary, words: Mapping[str, str] = ENGLISH) -> str:
    """Return the peaks of the card by method, prompt and group size, published and rerun with the published coupling, in GiB."""
    heads = [f"{words['published']}, k = {k}" for k in KS] + [f"{words['here']}, k = {k}" for k in KS]
    lines = [_line(words["prompt"], words["method"], *heads), _line("---", "---", *["---:"] * 6)]
    for prompt in (FULL, TRUNCATED):
        for expansion in EXPANSIONS:
            # The published string-level runs had cut prompts, and no other published runs had.
            was_run = (prompt == TRUNCATED) == (expansion == "string")
            published = [_gib((expansion, k), words) if was_run else "" for k in KS]
            rows = [find(summary["rows"], update=LEGACY, coupled=True, prompt=prompt, expansion=expansion, k=k) for k in KS]
            lines.append(_line(words[prompt], LABELS[expansion], *published, *(_device(row, words) for row in rows)))
    return "\n".join(lines)


def _gib(run: tuple[str, int], words: Mapping[str, str]) -> str:
    """Return a published peak. Of a run that died, the word for that, and its last reading where one was published."""
    peak = PEAKS_GIB[run]
    if peak is not None:
        return f"{peak:.2f}"
    return f"{LAST_GIB[run]:.2f}, {words[OOM]}" if run in LAST_GIB else words[OOM]


def _device(row: Row | None, words: Mapping[str, str]) -> str:
    """Return a run's use of the whole card, or its status with what it would need."""
    held = None if row is None else held_bytes(row)
    size = "" if held is None else f"{device_bytes(process_bytes(held)) / GIB:.2f}"
    if row is None or row["outcome"] == COMPLETED:
        return size
    return f"{words.get(row['outcome'], row['outcome'])} ({size})" if size else words.get(row["outcome"], row["outcome"])


def cause_table(summary: Summary, k: int = 4) -> str:
    """Return two methods with both prompts at one group size: tokens of a row, GiB of the card, and what the cut saves."""
    lines = [_line("method", "prompt", "tokens of a row", f"GiB, k = {k}", "saved"), _line("---", "---", "---:", "---:", "---:")]
    for expansion in ("token", "string"):
        whole = None
        for prompt in (FULL, TRUNCATED):
            row = find(summary["rows"], update=LEGACY, coupled=True, prompt=prompt, expansion=expansion, k=k)
            held = None if row is None else held_bytes(row)
            if row is None or held is None:
                continue
            size = device_bytes(process_bytes(held))
            whole = whole or size
            saved = "" if size == whole else f"{100 * (1 - size / whole):.1f} %"
            cells = (ENGLISH[prompt], f"{row['tokens_per_row']:,}", f"{size / GIB:.2f}", saved)
            lines.append(_line(LABELS[expansion], *cells))
    return "\n".join(lines)


def formula_table(summary: Summary) -> str:
    """Return the formula beside the runs of the token-level arm: MiB above the desktop, and the error."""
    lines = [_line("prompt", "k", "formula, MiB", "run, MiB", "difference"), _line("---", "---:", "---:", "---:", "---:")]
    for row in summary["findings"]["formula"]:
        if row["expansion"] == "token":
            sizes = (f"{row['formula_bytes'] / MIB:,.0f}", f"{row['run_bytes'] / MIB:,.0f}", f"{100 * row['error']:+.1f} %")
            lines.append(_line(ENGLISH[row["prompt"]], row["k"], *sizes))
    return "\n".join(lines)


def savings_table(summary: Summary, words: Mapping[str, str] = ENGLISH) -> str:
    """Return the live MiB of one update by arm and group size, from the published trainer to this project's."""
    ks = sorted({row["k"] for row in summary["rows"] if row["k"] in (*KS, *MOST_KS)})
    lines = [_line(words["update"], *(f"k = {k}" for k in ks)), _line("---", *["---:"] * len(ks))]
    for name in words:
        rows = [find(summary["rows"], name=name, k=k) for k in ks]
        if any(rows):
            lines.append(_line(words[name], *(_live(row, words) for row in rows)))
    return "\n".join(lines)


def _live(row: Row | None, words: Mapping[str, str]) -> str:
    """Return a run's live MiB, or its status with what it would need."""
    if row is None:
        return ""
    if row["outcome"] == COMPLETED:
        return f"{row['peak']['median'] / MIB:,.0f}"
    status = words.get(row["outcome"], row["outcome"])
    return f"{status} ({row['without_limit']['peak']['median'] / MIB:,.0f})" if row["without_limit"] else status


def _line(*cells: object) -> str:
    texts: Sequence[str] = [str(cell) for cell in cells]
    return "|" + "|".join(texts) + "|" if set(texts) <= {"---", "---:"} else "| " + " | ".join(texts) + " |"
