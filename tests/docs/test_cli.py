"""The page of commands quotes the help of each command as it is."""

import pytest

from tests.docs.pages import DOCS, blocks
from verl_memopt.cli import COMMANDS, main


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_page_has_the_help_of_each_command(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert capsys.readouterr().out in blocks(DOCS / "cli.md", "")
