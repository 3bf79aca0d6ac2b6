import dataclasses
import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from verl_memopt.observe.console import RunConsole, memory_table, phase_rows, print_end, step_table
from verl_memopt.observe.phase import MIB, PhaseMemory, combine

STEP = {
    "critic/score/mean": 0.7123, "actor/ppo_kl": 0.0012, "actor/grad_norm": 123.456, "rollout/logprob_diff_mean": 3.2e-7,
    "perf/throughput": 112345.6, "perf/time_per_step": 1234.56, "perf/max_memory_allocated_gb": 137.5,
    "perf/memory_allocated_gb": 0.5, "val-core/toy/reward/mean@1": 0.875,
}  # fmt: skip
SUMMARY = {
    "steps": 12, "seconds": 99.0, "validation_before": 0.25, "validation_after": None, "counter": "tracker",
    "phases": {
        name: {"seconds": 3.0, "peak_allocated_bytes": 2**30, "peak_reserved_bytes": None, "device_used_bytes": None,
               "host_rss_bytes": 2**33, "kinds": {}}
        for name in ("update_actor", "dump_rollout_generations")
    },
}  # fmt: skip


def plain():
    return Console(file=StringIO(), width=80)


def printed(console):
    return console.file.getvalue()


def on_a_terminal():
    return Console(file=StringIO(), width=80, force_terminal=True)


def rows_of(console):
    """Return the words of each row of the tables by step, without what moves the bar."""
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", line).split() for line in printed(console).splitlines()]
    return {int(words[0]): words for words in lines if words and words[0].isdigit()}


def test_without_a_terminal_a_step_is_one_plain_line_with_the_figures_of_the_step_and_no_others():
    console = plain()
    with RunConsole(4, table_every=2, console=console) as run:
        run.log(1, STEP)
        run.log(2, {"loss": 1.25, "critic/score/mean": 0.5, "actor/kl_loss": 0.25, "perf/max_memory_reserved_gb": 2.0})
        run.log(3, STEP | {"perf/max_memory_reserved_gb": 138.0})
    first, second, third = printed(console).splitlines()
    assert first == (
        "step 1/4 reward=0.712 val=0.875 grad_norm=123.456 logprob_diff=3.2e-07 tokens/s=112,346 s/step=1234.56 "
        "live_mib=512.0 peak_mib=140,800.0 (bytes counted)"
    )
    assert second == "step 2/4 reward=0.500 kl=0.2500 reserved_mib=2,048"
    assert "counted" not in third, "an allocator counts its bytes for nothing"


def test_on_a_terminal_a_bar_shows_the_last_figures_and_each_step_is_a_row_of_one_table():
    console = on_a_terminal()
    with RunConsole(4, table_every=10, console=console) as run:
        run.log(1, STEP)
        run.log(2, {"critic/score/mean": 0.5})
    moving = printed(console).split("\r")[-1]
    assert all(text in moving for text in ("2/4", "reward 0.500", "peak 140,800 MiB"))
    console = on_a_terminal()
    with RunConsole(3, table_every=2, console=console) as run:
        for step in (1, 2, 3):
            run.log(step, STEP)
            assert sorted(rows_of(console)) == list(range(1, step // 2 * 2 + 1))
    assert sorted(rows_of(console)) == [1, 2, 3]
    console = on_a_terminal()
    run = RunConsole(2, table_every=0, console=console)
    run.log(1, STEP)
    run.log(2, STEP)
    assert rows_of(console) == {}, "no table in between when it is switched off"


def test_a_table_has_a_column_for_each_figure_of_any_step_and_marks_the_steps_that_were_counted():
    console = plain()
    validated = {"perf/max_memory_allocated_gb": 0.5, "step": 0.0}
    trained = {"critic/score/mean": 0.5, "perf/time_per_step": 3.0, "step": 2.0}
    console.print(step_table([validated, {**STEP, "step": 1.0}, trained]))
    lines = printed(console).splitlines()
    assert lines[1].split() == ["step", "reward", "val", "norm", "diff", "tokens/s", "s/step", "MiB"]
    assert rows_of(console)[0] == ["0", *"-" * 6, "512.0"]
    assert rows_of(console)[1] == ["1", "0.712", "0.875", "123.456", "3.2e-07", "112,346", "1234.56*", "140,800.0"]
    assert rows_of(console)[2] == ["2", "0.500", "-", "-", "-", "-", "3.00", "-"]
    assert max(map(len, lines)) <= 80


def test_the_summary_shows_each_phases_share_its_counter_and_no_size_that_no_phase_has():
    console = plain()
    print_end(console, SUMMARY, Path("run"))
    text = printed(console)
    assert all(said in text for said in ("50.0 %", "(tracker)", "1,024", "host RSS"))
    assert "reserved" not in text
    assert "device" not in text


def test_the_end_says_the_warnings_of_a_run_before_its_folder():
    console = plain()
    print_end(console, {**SUMMARY, "warnings": [{"step": 6, "warning": "[it] fell"}], "skipped_updates": 2}, Path("run"))
    assert printed(console).splitlines()[-3:] == [
        "WARNING, step 6: [it] fell",
        "WARNING: 2 updates were skipped, because their gradient norm was not finite.",
        "run",
    ]


TRACKED = PhaseMemory("update_actor", 1.0, 5 * MIB, 3 * MIB, None, None, 70 * MIB, entered_bytes=2 * MIB)
ON_GPU = PhaseMemory("gen", 1.0, 9 * MIB, 4 * MIB, 16 * MIB, 20 * MIB, 80 * MIB, entered_bytes=MIB)
UNTRACKED = PhaseMemory("old_log_prob", 1.0, None, None, None, None, 60 * MIB)


def test_a_row_has_the_bytes_at_both_ends_the_peak_and_the_host():
    assert phase_rows(7, [TRACKED, UNTRACKED]) == [
        {
            "step": 7, "phase": "update_actor", "enter_bytes": 2 * MIB, "peak_bytes": 5 * MIB, "exit_bytes": 3 * MIB,
            "reserved_bytes": None, "host_bytes": 70 * MIB,
        },
        {
            "step": 7, "phase": "old_log_prob", "enter_bytes": None, "peak_bytes": None, "exit_bytes": None,
            "reserved_bytes": None, "host_bytes": 60 * MIB,
        },
    ]  # fmt: skip


def test_of_several_workers_the_table_shows_the_mean_peak_and_the_fullest_rank():
    other = dataclasses.replace(ON_GPU, peak_allocated_bytes=11 * MIB)
    both = [combine([ON_GPU, other]), combine([UNTRACKED, UNTRACKED])]
    console = plain()
    console.print(memory_table(7, both))
    lines = printed(console).splitlines()
    assert lines[1].split()[-4:] == ["mean", "peak", "fullest", "rank"]
    ends = {line.split()[0]: line.split()[-2:] for line in lines[3:5]}
    assert ends == {"gen": ["10.0", "1"], lines[4].split()[0]: ["-", "-"]}
    (row, _) = phase_rows(7, both)
    assert (row["mean_peak_bytes"], row["worst_rank"]) == (10 * MIB, 1)
