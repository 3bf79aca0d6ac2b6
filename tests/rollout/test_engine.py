"""What every engine promises; each test runs on each engine."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from tests.rollout.tools import (
    EOS,
    difference_from_naive,
    engine_at,
    largest_difference,
    model_of,
    place_at,
    prompts,
    rollout_settings,
    sampling,
    weights_of,
)
from verl_memopt.errors import ConfigError, RolloutError, Stopped
from verl_memopt.rollout import hf_engine
from verl_memopt.rollout.engine import FinishedRows, build_engine, check_rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_one_forward_of_the_row(engine, tied_folder, temperature):
    rows = prompts(20)
    answer = engine.generate(rows, list(range(20)), sampling(temperature=temperature))
    assert difference_from_naive(model_of(tied_folder), rows, answer, temperature) <= 1e-5


def test_a_row_depends_on_its_prompt_and_seed_and_not_on_the_other_rows(engine):
    rows, seeds = prompts(20), list(range(100, 120))
    settings = sampling(ignore_eos=False, top_p=0.9)
    together = engine.generate(rows, seeds, settings)
    backwards = engine.generate(rows[::-1], seeds[::-1], settings)
    alone = [engine.generate([row], [seed], settings).response_ids[0] for row, seed in zip(rows[:4], seeds[:4], strict=True)]
    assert backwards.response_ids[::-1] == together.response_ids
    assert alone == together.response_ids[:4]


def test_rows_that_are_complete_are_told_while_others_are_generated(engine, tmp_path):
    rows, seeds, written, seen = prompts(40), list(range(40)), FinishedRows(tmp_path / "finished"), {}
    settings = sampling(ignore_eos=False, temperature=2.0, max_tokens=40)

    def look():
        seen[len(seen)] = written.read()
        return False

    answer = engine.generate(rows, seeds, settings, look, FinishedRows(tmp_path / "finished").write)
    early = {row: ids for told in seen.values() for row, ids in told.items()}
    assert 0 < len(early) < 40
    assert early | written.read() == dict(enumerate(answer.response_ids))
    assert answer == engine.generate(rows, seeds, settings)


def test_requests_that_arrive_one_by_one_get_the_responses_of_one_call(engine):
    rows, seeds, settings = prompts(20), list(range(20)), sampling(ignore_eos=False, temperature=2.0, max_tokens=40)
    together, answers, waiting = engine.generate(rows, seeds, settings), {}, list(range(20))
    with engine.serving() as requests:
        while waiting or requests.under_way:
            for _ in range(min(3, len(waiting))):
                number = waiting.pop()
                requests.add(number, rows[number], seeds[number], settings)
            answers |= requests.step()
    assert [answers[number].response_ids for number in range(20)] == together.response_ids
    assert [answers[number].finish_reason for number in range(20)] == together.finish_reasons
    assert largest_difference([answers[number].log_probs for number in range(20)], together.log_probs) <= 1e-5


def test_abandoned_requests_leave_nothing_to_the_next_call(engine):
    with engine.serving() as requests:
        requests.add(0, [5, 6, 7], 0, sampling(max_tokens=40))
        requests.step()
    assert engine.generate([[5, 6]], [1], sampling()) == engine.generate([[5, 6]], [1], sampling())


def test_requests_stop_when_the_caller_wants(engine):
    stop = []
    with engine.serving(lambda: bool(stop)) as requests:
        requests.add(0, [5, 6, 7], 0, sampling(max_tokens=40))
        requests.step()
        stop.append(1)
        with pytest.raises(Stopped):
            requests.step()


def test_rows_with_equal_prompts_and_different_seeds_differ(engine):
    answer = engine.generate([[5, 6, 7]] * 8, list(range(8)), sampling())
    assert len({tuple(ids) for ids in answer.response_ids}) == 8


def test_the_cap_is_exact_with_ignore_eos(engine):
    for cap in (1, 7):
        answer = engine.generate(prompts(20), list(range(20)), sampling(max_tokens=cap))
        assert [len(ids) for ids in answer.response_ids] == [cap] * 20
        assert set(answer.finish_reasons) == {"length"}


def test_a_response_ends_with_its_first_eos_and_says_why(engine):
    answer = engine.generate([[5, 6, 7]] * 64, list(range(64)), sampling(max_tokens=40, temperature=2.0, ignore_eos=False))
    free = engine.generate([[5, 6, 7]] * 64, list(range(64)), sampling(max_tokens=40, temperature=2.0, ignore_eos=True))
    stopped = [ids for ids, reason in zip(answer.response_ids, answer.finish_reasons, strict=True) if reason == "stop"]
    assert 0 < len(stopped) < 64
    assert all(ids[-1] == EOS and EOS not in ids[:-1] for ids in stopped)
    assert answer.response_ids == [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in free.response_ids]
    assert [len(row) for row in answer.log_probs or []] == [len(ids) for ids in answer.response_ids]


def test_top_k_of_one_and_a_tiny_nucleus_are_greedy(engine):
    greedy = engine.generate(prompts(8), [0] * 8, sampling(do_sample=False)).response_ids
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        answer = engine.generate(prompts(8), list(range(8)), sampling(**narrow))
        assert answer.response_ids == greedy


def test_the_largest_min_p_is_greedy(engine):
    greedy = engine.generate(prompts(6), [0] * 6, sampling(do_sample=False))
    assert engine.generate(prompts(6), [9] * 6, sampling(min_p=1.0)).response_ids == greedy.response_ids
    assert engine.generate(prompts(6), [9] * 6, sampling(min_p=1e-6)).response_ids != greedy.response_ids


def test_a_response_ends_with_a_stop_token_of_the_settings_though_it_ignores_the_end_of_sequence(engine):
    free = engine.generate(prompts(1), [0], sampling(do_sample=False))
    (ids,) = free.response_ids
    cut = engine.generate(prompts(1), [0], sampling(do_sample=False, stop_token_ids=(ids[4],)))
    assert cut.response_ids == [ids[: ids.index(ids[4]) + 1]]
    assert (free.finish_reasons, cut.finish_reasons) == (["length"], ["stop"])
    assert [len(row) for row in cut.log_probs] == [len(row) for row in cut.response_ids]


def test_repetition_penalty_lowers_the_tokens_of_prompt_and_response(engine, tied_folder):
    rows = [[5, 6, 7, 8], [9], [5, 5, 5]]
    answer = engine.generate(rows, [0, 1, 2], sampling(max_tokens=20, repetition_penalty=1.7))
    model = model_of(tied_folder)
    naive = [penalized_log_probs(model, row, ids, 1.7) for row, ids in zip(rows, answer.response_ids, strict=True)]
    assert largest_difference(answer.log_probs, naive) <= 1e-5


@torch.no_grad()
def penalized_log_probs(model, prompt, response, penalty):
    """Token by token: every token that came before has its logit divided when positive, else multiplied."""
    answer, seen = [], list(prompt)
    for token in response:
        logits = model(torch.tensor([seen])).logits[0, -1].float()
        for old in set(seen):
            logits[old] = logits[old] / penalty if logits[old] > 0 else logits[old] * penalty
        answer.append(logits.log_softmax(-1)[token].item())
        seen.append(token)
    return answer


def test_log_probs_are_left_out_unless_asked_for(engine):
    assert engine.generate(prompts(2), [0, 1], sampling(log_probs=False)).log_probs is None


def test_an_empty_batch_gives_an_empty_answer(engine):
    assert engine.generate([], [], sampling()).response_ids == []


def test_generating_leaves_the_random_generators_alone(engine):
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    engine.generate(prompts(4), [0, 1, 2, 3], sampling())
    assert torch.equal(torch.rand(4), expected)


def test_a_row_that_cannot_fit_and_an_empty_prompt_are_named(engine):
    with pytest.raises(RolloutError, match=r"row 1 has 220 prompt tokens and may grow by 12.*most 224"):
        engine.generate([[5], [5] * 220], [0, 1], sampling())
    with pytest.raises(RolloutError, match="row 0 is empty"):
        engine.generate([[]], [0], sampling())


def test_loaded_weights_are_the_ones_that_generate(engine, other_folder):
    other = model_of(other_folder)
    before = engine.generate(prompts(8), [0] * 8, sampling(do_sample=False))
    engine.load_weights(weights_of(other))
    after = engine.generate(prompts(8), [0] * 8, sampling(do_sample=False))
    assert after.response_ids != before.response_ids
    assert difference_from_naive(other, prompts(8), after) <= 1e-5


def test_loaded_weights_are_equal_in_every_bit_and_one_element_that_changes_is_named(engine, tied_folder, other_folder):
    names = sorted(name for name, _ in weights_of(model_of(tied_folder)))
    engine.load_weights(weights_of(model_of(tied_folder)))
    found = engine.compare_weights(weights_of(model_of(tied_folder)))
    assert (sorted(found.equal), found.different, found.unknown) == (names, [], [])
    model = model_of(tied_folder)
    changed = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        changed[-1, -1] += 1e-3
    assert engine.compare_weights(weights_of(model)).different == ["model.layers.1.mlp.up_proj.weight"]
    others = engine.compare_weights(weights_of(model_of(other_folder))).different
    assert {name for name in names if "norm" not in name} <= set(others)


def test_each_weight_is_used_up_before_the_next_is_asked_for(engine, other_folder):
    """The trainer may gather the next weight into the memory of the last."""
    expected = engine_answer_with(engine, other_folder)
    engine.load_weights((name, tensor * 0) for name, tensor in weights_of(model_of(other_folder)))

    def reused():
        buffer = torch.empty(0)
        for name, tensor in weights_of(model_of(other_folder)):
            buffer.fill_(float("nan"))
            buffer = tensor.clone()
            yield name, buffer

    engine.load_weights(reused())
    assert engine.generate(prompts(4), [0] * 4, sampling(do_sample=False)) == expected


def engine_answer_with(engine, folder):
    engine.load_weights(weights_of(model_of(folder)))
    return engine.generate(prompts(4), [0] * 4, sampling(do_sample=False))


def test_after_an_incomplete_load_nothing_is_generated_until_a_whole_one(engine, tied_folder):
    whole = dict(weights_of(model_of(tied_folder)))
    part = {name: tensor for name, tensor in whole.items() if "layers.1.self_attn.k_proj" not in name}
    with pytest.raises(RolloutError, match=r"1 weights are missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        engine.load_weights(iter(part.items()))
    with pytest.raises(RolloutError, match="weights are incomplete"):
        engine.generate(prompts(1), [0], sampling())
    with pytest.raises(RolloutError, match="ghost is not a weight"):
        engine.load_weights(iter([*whole.items(), ("ghost", torch.ones(1))]))
    engine.load_weights(iter(whole.items()))
    engine.generate(prompts(1), [0], sampling())


def test_resident_bytes_hold_at_least_the_models_weights_and_grow_by_no_load(engine, tied_folder):
    def weight_bytes():
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for kind, tensor in engine.resident_tensors()
            if kind == "rollout weights"
        }
        return sum(storages.values())

    model = model_of(tied_folder)
    before = weight_bytes()
    engine.load_weights(weights_of(model))
    assert weight_bytes() == before
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert parameters <= before < parameters + 300_000


def test_an_unknown_engine_is_refused_with_the_known_ones(tied_folder):
    with pytest.raises(ConfigError, match=r"rollout\.name=sglang.*vllm, hf"):
        build_engine(rollout_settings("sglang"), place_at(tied_folder))


@pytest.mark.parametrize("prompt", [1, 5])
def test_a_row_may_grow_to_the_longest_sequence_and_one_token_more_is_refused(prompt):
    longest = prompt + 12
    check_rows([[5], [5] * prompt], [0, 1], 12, longest)
    for ids, max_tokens in ((prompt + 1, 12), (prompt, 13)):
        with pytest.raises(RolloutError, match=rf"row 0 has {ids} prompt tokens and may grow by {max_tokens}.*most {longest}"):
            check_rows([[5] * ids], [0], max_tokens, longest)
    with pytest.raises(RolloutError, match=r"row 1 is empty"):
        check_rows([[5], []], [0, 1], 1, longest)


@pytest.mark.parametrize(("workers", "size"), [(1, 1), (2, 2), (4, 2)])
def test_workers_that_divide_into_engines_are_let_through(tied_folder, monkeypatch, workers, size):
    built = []
    monkeypatch.setattr(hf_engine, "HfEngine", lambda rollout, place: built.append(place.tensor_parallel_size))
    build_engine(rollout_settings("hf"), place_at(tied_folder, world_size=workers, tensor_parallel_size=size))
    assert built == [size]
    with pytest.raises(ConfigError, match=f"tensor_model_parallel_size={workers + 1}: {workers} workers"):
        build_engine(rollout_settings("hf"), place_at(tied_folder, world_size=workers, tensor_parallel_size=workers + 1))
    assert built == [size]


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_workers_that_do_not_divide_into_engines_are_refused(tied_folder, name):
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2: 3 workers"):
        build_engine(rollout_settings(name), place_at(tied_folder, world_size=3, tensor_parallel_size=2))


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_an_unknown_dtype_is_refused(tied_folder, name):
    with pytest.raises(ConfigError, match=r"rollout\.dtype=int3"):
        build_engine(replace(rollout_settings(name), dtype="int3"), place_at(tied_folder))


# Tests that end the shared engine come last, since a start costs seconds.


@pytest.mark.usefixtures("no_shared_engine")
@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_a_response_ends_with_the_token_that_completes_a_stop_text(name, tied_folder):
    engine = engine_at(name, tied_folder, load_format="auto", stop=["?"])
    rows, tokenizer = prompts(5), AutoTokenizer.from_pretrained(tied_folder)
    free = engine.generate(rows, list(range(5)), sampling(max_tokens=24))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in free.response_ids]
    stop = (texts[0][2:4], texts[1][3:5])  # of two characters, which may lie in two tokens
    found = engine.generate(rows, list(range(5)), sampling(max_tokens=24, stop=stop))
    engine.shutdown()
    expected = []
    for ids in free.response_ids:
        decoded = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(1, len(ids) + 1)]
        ends = [n for n, text in enumerate(decoded, 1) if any(each in text for each in stop)]
        expected.append(ids[: ends[0]] if ends else ids)
    assert found.response_ids == expected
    assert len(expected[0]) < 24
    assert [reason == "stop" for reason in found.finish_reasons] == [len(ids) < 24 for ids in expected]
    assert [len(row) for row in found.log_probs] == list(map(len, expected))


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_importance_weights_of_filtered_rollouts_have_mean_one_and_unknown_ids_are_not_drawn(tied_folder, no_shared_engine, name):
    """Weights are trainer / engine. With the same weights each is 1, by token and by sequence, whatever filters have kept."""
    filters, rows, known = {"top_p": 0.8, "top_k": 12, "temperature": 0.7}, prompts(60), 150
    place = replace(place_at(tied_folder), known_ids=known)
    engine = build_engine(rollout_settings(name, load_format="auto", **filters), place)
    try:
        answer = engine.generate(rows, list(range(60)), sampling(**filters))
        greedy = engine.generate(rows, list(range(60)), sampling(do_sample=False, log_probs=False))
    finally:
        engine.shutdown()
    assert max(token for ids in answer.response_ids + greedy.response_ids for token in ids) < known
    assert difference_from_naive(model_of(tied_folder), rows, answer, 0.7) <= 1e-5
