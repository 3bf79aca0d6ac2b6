from recipe.rloo.memory_study.arms import saving_arms
from recipe.rloo.memory_study.combine import summarize
from recipe.rloo.memory_study.controls import check
from recipe.rloo.memory_study.report import cell_line, report
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published

SHARED = next(arm for arm in saving_arms([8]) if arm.update == "shared_prompt")


def text_of(*results):
    checked, controls = check(results)
    return report(summarize(checked, controls))


def line_of(text, *words):
    (line,) = (line for line in text.splitlines() if all(word in line for word in words))
    return line.split()


def test_a_cell_is_a_line_with_its_peak_or_its_failure():
    assert cell_line(completed(published(), 3 * MIB)).endswith("completed    2.0 s         3.0 MiB live")
    assert cell_line(out_of_memory(published())).endswith("oom          2.0 s  no room")


def test_a_peak_is_that_of_the_whole_published_card():
    held = 10 * GIB
    text = text_of(completed(published(), 1, held))
    expected = (held + 641 * MIB + 1109.9 * MIB) / GIB
    assert line_of(text, "full", "Basic", "11.71")[-1] == f"{expected:.2f}" == "11.71"


def test_a_run_without_room_is_a_status_with_its_need_in_brackets():
    arm = published(k=8)
    text = text_of(out_of_memory(arm), completed(arm, 40 * GIB, 50 * GIB), completed(published("string", k=8), 1, GIB, limit=GIB))
    assert "oom (51.71)" in text
    assert "oom (" not in text_of(out_of_memory(arm))


def test_a_saving_says_how_many_times_smaller_it_is():
    text = text_of(completed(published(k=8), 45 * GIB, 50 * GIB), completed(SHARED, 90 * MIB))
    assert line_of(text, "shared_prompt") == ["shared_prompt", "90", "(512.0x)"]


def test_the_controls_and_the_outcomes_are_told():
    text = text_of(completed(published(), 1, 2), completed(published("string"), 1, 2))
    assert "Cells: 2 completed." in text
    assert "Losses differ by at most 0.0e+00" in text
