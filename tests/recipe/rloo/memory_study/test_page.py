from recipe.rloo.memory_study.arms import saving_arms
from recipe.rloo.memory_study.combine import summarize
from recipe.rloo.memory_study.controls import check
from recipe.rloo.memory_study.page import cause_table, methods_table, savings_table
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published

SHARED = next(arm for arm in saving_arms([8]) if arm.update == "shared_prompt")


def summary_of(*results):
    return summarize(*check(results))


def cells_of(table, *words):
    (line,) = (line for line in table.splitlines() if all(word in line for word in words))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_published_peaks_stand_beside_the_prompts_that_they_had():
    table = methods_table(summary_of(completed(published(), 1, 10 * GIB)))
    assert cells_of(table, "whole", "Basic") == ["whole", "Basic", "14.38", "26.99", "out of memory", "11.71", "", ""]
    assert cells_of(table, "cut", "String-level")[2:5] == ["6.40", "11.01", "20.25"]
    assert cells_of(table, "whole", "String-level")[2:5] == ["", "", ""]


def test_a_run_without_room_is_a_status_with_its_need():
    arm = published(k=8)
    results = [out_of_memory(arm), completed(arm, 45 * GIB, 50 * GIB), completed(SHARED, 90 * MIB, limit=32 * GIB)]
    assert cells_of(methods_table(summary_of(*results)), "whole", "Basic")[-1] == "out of memory (51.71)"
    table = savings_table(summary_of(*results))
    assert cells_of(table, "published trainer") == ["published trainer", "out of memory (46,080)"]
    assert cells_of(table, "computed once")[-1] == "90"


def test_a_cut_prompt_is_compared_with_the_whole_one_of_the_same_method():
    results = [completed(published("token", prompt, 4), 1, held) for prompt, held in (("full", 24 * GIB), ("truncated", 9 * GIB))]
    table = cause_table(summary_of(*results))
    rest = (641 + 1109.9) / 1024
    assert cells_of(table, "cut")[-1] == f"{100 * (1 - (9 + rest) / (24 + rest)):.1f} %"
    assert cells_of(table, "whole")[-1] == ""
