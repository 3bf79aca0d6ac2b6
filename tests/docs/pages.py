"""Reads the pages for people: their code blocks, commands, tables, links and the settings that they name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = (
    "actor_rollout_ref|algorithm|critic|custom_reward_function|data|debug|distill|memory|ray_kwargs|reward_model|teacher|trainer"
)
SETTING = re.compile(rf"`((?:{SECTIONS})[.=][^`\s]*)`")


def page_name(path):
    """Return the path of a page from the root of the repository, for the name of a test."""
    return str(path.relative_to(ROOT))


def blocks(path, language):
    """Return the text of each fenced block of a page in ``language``; "" means a block without one."""
    return [text for said, text in FENCE.findall(path.read_text()) if said == language]


def without_blocks(path):
    """Return the text of a page without its fenced blocks."""
    return FENCE.sub("", path.read_text())


def commands(path):
    """Return each shell command of a page on one line, without comments."""
    lines = "".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    found = (re.sub(r"(^|\s)#\s.*$", "", line).strip() for line in lines)
    return [re.sub(r"\s+", " ", line) for line in found if line]


def cells(path):
    """Return the pieces of a page that belong together: each cell of its tables, and each paragraph."""
    text = without_blocks(path)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    prose = "\n".join("" if line.startswith("|") else line for line in text.splitlines())
    return [cell for row in rows for cell in row.strip("|").split(" | ")] + prose.split("\n\n")
