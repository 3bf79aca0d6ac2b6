"""Every relative link and picture of a page leads to a file that git keeps, and to a heading that exists."""

import re
import subprocess

import pytest

from tests.docs.pages import PAGES, ROOT, page_name, without_blocks

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = ("http://", "https://", "mailto:")


def slug(heading):
    """Return the anchor of a heading, as GitHub and mkdocs make it from words, numbers and code."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def anchors(path):
    return {slug(line.lstrip("# ")) for line in without_blocks(path).splitlines() if line.startswith("#")}


@pytest.fixture(scope="module")
def kept():
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return set(subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_relative_link_leads_somewhere(page, kept):
    for target in LINK.findall(without_blocks(page)):
        if target.startswith(ELSEWHERE):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        where = f"{page_name(page)}: {target}"
        assert path.is_dir() or str(path.relative_to(ROOT)) in kept, where
        assert not anchor or anchor in anchors(path), where


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) | {"decisions/index.md"}
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
