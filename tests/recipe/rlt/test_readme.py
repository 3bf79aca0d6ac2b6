"""The recipe's page and the page on RLT: every setting that they name exists, and loads with the recipe."""

import re
from functools import cache

import pytest

from tests.docs.pages import DOCS, ROOT, SETTING, commands, without_blocks
from verl_memopt.config.keys import leaf_types, section_keys
from verl_memopt.config.loader import load_settings
from verl_memopt.config.trl_spellings import NAMES
from verl_memopt.recipes.rlt.names import RLT_NO_EQUAL, RLT_SPELLINGS

README = ROOT / "recipe" / "rlt" / "README.md"
PAGES = [README, DOCS / "rlt.md"]
BARE = re.compile(r"`(?:[a-z_]+=\S+ )*([a-z_]+)=[^`\s.]+[^`]*`")
RECIPE = "recipe/rlt/config"


def texts(page):
    return without_blocks(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_exists(page) -> None:
    known = leaf_types().keys() | section_keys()
    found = [token.partition("=")[0].replace("_kwargs.enable_thinking", "_kwargs") for token in SETTING.findall(texts(page))]
    assert len(found) > 8
    assert not [key for key in found if key not in known and key not in ("memory", "debug")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_the_published_recipes_is_read(page) -> None:
    known = {name for row in RLT_SPELLINGS for name in row.names} | RLT_NO_EQUAL.keys() | NAMES
    ours = {"memory", "model", "debug"}
    assert not {name for name in BARE.findall(texts(page)) if name not in known | ours}


def cells_with_settings():
    """Return the settings of each piece of code in the table of remedies, as a person would add them to the command."""
    rows = [line for line in README.read_text().splitlines() if line.startswith("|")]
    pieces = [piece for line in rows for piece in re.findall(r"`([^`]+)`", line)]
    return sorted({piece for piece in pieces if re.fullmatch(r"(?:[\w.]+=[^\s=]+ ?)+", piece)})


@pytest.mark.parametrize("piece", cells_with_settings())
def test_every_remedy_loads_with_the_recipe(piece) -> None:
    assert load_settings("teacher_rlt_mono", piece.split(), RECIPE)


@cache
def scripts():
    return [command for page in PAGES for command in commands(page)]


def test_every_script_and_file_that_is_named_is_there() -> None:
    named = {word for command in scripts() for word in command.split() if word.startswith("recipe/")}
    assert {"recipe/rlt/launch_mono.sh", "recipe/rlt/prepare_rlt.py", "recipe/rlt/warm_up.py"} <= named
    assert all((ROOT / word).is_file() for word in named)
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


@pytest.mark.parametrize("command", [line for line in scripts() if "warm_up.py" in line])
def test_the_commands_of_the_warm_up_load(command) -> None:
    from verl_memopt.recipes.rlt.warm_up import check_warm_up

    check_warm_up(load_settings("warm_up", [word for word in command.split() if "=" in word], RECIPE))


def test_the_table_of_requirements_is_the_committed_result() -> None:
    lines = (ROOT / "benchmarks" / "rlt_requirements" / "results.txt").read_text().splitlines()
    results = [line.split() for line in lines if "update_actor" in line]
    assert len(results) >= 4
    text = README.read_text()
    for model, _, update, _, score, _, _, _, needs, card, host, lora, lora_card in results:
        assert (
            f"| `model={model}` | {update} | {score} | {needs} | `memory={card}` | {host} | {lora} | `memory={lora_card}` |"
            in text
        )


@pytest.mark.parametrize("row", RLT_SPELLINGS, ids=lambda row: row.names[0])
def test_the_page_says_what_each_published_name_is_read_as(row) -> None:
    page = (DOCS / "rlt.md").read_text()
    name = row.names[0]
    if row.keys == (f"reward_model.rlt.{name}",):
        assert "keep their names below `reward_model.rlt`" in page
    else:
        assert f"| `{name}` | {', '.join(f'`{key}`' for key in row.keys)} | {row.note} |" in page
