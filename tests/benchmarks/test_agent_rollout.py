import pytest

from benchmarks.agent_rollout import main


@pytest.mark.slow
def test_both_loops_give_the_same_conversations(capsys):
    assert main(["--rounds", "1", "--conversations", "4", "--tool-seconds", "0.01"]) == 0
    assert {"agent loop", "lock-step"} <= {line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()}
