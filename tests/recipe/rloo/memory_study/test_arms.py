from recipe.rloo.memory_study.arms import ARMS, EXPANSIONS, FIXED_ROWS, KS, coupled_arms, larger, main_arms, saving_arms, select


def test_the_main_table_has_every_expansion_prompt_and_group_size_with_as_many_rows_in_a_forward():
    arms = main_arms()
    assert {(arm.expansion, arm.prompt, arm.k) for arm in arms} == {
        (expansion, prompt, k) for expansion in EXPANSIONS for prompt in ("full", "truncated") for k in KS
    }
    assert {(arm.update, arm.micro_batch) for arm in arms} == {("legacy", FIXED_ROWS)}


def test_a_larger_group_is_tried_where_the_one_before_it_completed():
    main, savings = main_arms([8]), saving_arms([8])
    tried = larger([*main, *savings])
    assert {arm.k for arm in tried} == {16}
    assert [arm.name for arm in tried] == [arm.name for arm in main if arm.prompt == "full"] + [arm.name for arm in savings]
    assert {arm.micro_batch for arm in tried if arm.update == "legacy"} == {FIXED_ROWS}
    assert {arm.micro_batch for arm in tried if arm.update == "shared_prompt"} == {16}
    assert {arm.k for arm in larger([*ARMS, *tried])} == {32}


def test_the_projects_default_update_alone_goes_on_to_64():
    last = larger([*main_arms([32]), *saving_arms([32])])
    assert {(arm.update, arm.k) for arm in last} == {("shared_prompt", 64), ("shared_prompt_checkpointing", 64)}


def test_no_larger_group_is_tried_where_one_did_not_complete_or_none_is_left():
    assert larger(main_arms([2, 4])) == []
    assert larger(coupled_arms()) == []
    assert larger(saving_arms([64])) == []


def test_a_selection_keeps_what_has_all_the_values():
    assert [arm.cell for arm in select(ARMS, ["lazy"], ["lazy_full_legacy"], [4])] == ["lazy_full_legacy_k4"]
    assert select(ARMS) == list(ARMS)
    assert select(ARMS, ["string"], ["lazy_full_legacy"]) == []
