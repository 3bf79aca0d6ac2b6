import shlex
from pathlib import Path

from tools.trl_page import page
from verl_memopt.config.loader import load_settings
from verl_memopt.config.trl_names import NAMES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_trl.md"


def test_the_committed_page_is_the_one_the_tables_give():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.trl_page > docs/from_trl.md"


def test_every_name_has_its_row():
    first_cells = [line.split(" | ")[0] for line in page().splitlines() if line.startswith("| `")]
    assert [name for name in NAMES if not any(f"`{name}`" in cell for cell in first_cells)] == []


def test_the_command_of_the_page_loads():
    command = page().split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    _, _, *arguments = shlex.split(command)
    assert arguments[:4] == ["--config-dir", "recipe/rloo", "--config-name", "gsm8k"]
    settings = load_settings("gsm8k", arguments[4:], str(ROOT / "recipe" / "rloo"))
    assert (settings.actor_rollout_ref.rollout.n, settings.trainer.total_training_steps) == (8, 500)
