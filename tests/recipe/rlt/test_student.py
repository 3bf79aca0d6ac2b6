"""The student in a worker: where its weights lie in each phase, what a cycle changes, and what its folder must hold."""

import dataclasses
import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import normalizers, pre_tokenizers

from tests.config.conftest import LEAST
from tests.recipe.rlt.test_student_pass import rows_of
from tests.recipe.rlt.tokens import with_merges
from tests.tensors import whole_of
from tests.worker.test_policy import batch
from tests.worker.test_worker import AR
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Fsdp, ScoringModel
from verl_memopt.errors import ConfigError
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.residency import NEEDS, REWARD_MODEL
from verl_memopt.model.packing_check import frozen_causal_model
from verl_memopt.model.tiny import TinyShape, build_tokenizer, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import (
    Student,
    StudentPlan,
    check_same_shape,
    check_same_tokenizer,
    find_student,
    logits_in_chunks,
)

OFFLOADED = {f"{AR}.{role}.fsdp_config.param_offload": True for role in ("actor", "ref")}
MAPPED = {**OFFLOADED, f"{AR}.actor.use_kl_loss": True, f"{AR}.model.load_mode": "mmap"}
MODES = ("alias_ref", "separate", "swap", "mapped", "mapped swap", "resident", "streams", "streams as reference", "int8", "nf4")
ROWS = rows_of(12, 20, 6, 6)
BINS = [[0, 1, 2], [3, 4], [5]]
HEAT = 0.9


@pytest.fixture(scope="module")
def student_folder(tmp_path_factory):
    """A student of the shape of the tiny model, with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("student") / "model", seed=5)


@pytest.fixture
def scoring(made, tiny_folder, student_folder):
    """Builds a worker with policy, reference and student."""

    def build(mode, more=None, student_dtype="fp32"):
        settings = {**(MAPPED if "mapped" in mode else OFFLOADED), **(more or {})}
        if "streams" in mode:
            settings[f"{AR}.ref.fsdp_config.param_offload"] = "stream"
        quantization = mode if mode in ("int8", "nf4") else "none"
        rests = "stream" if mode == "streams" else mode not in ("resident", "int8", "nf4")
        fsdp = Fsdp(dtype="fp32", model_dtype=student_dtype, param_offload=rests)
        alias = ("alias_ref", "streams as reference")
        residency = "alias_ref" if mode in alias else "swap" if "swap" in mode else "separate"
        model = ScoringModel(path=str(student_folder), fsdp_config=fsdp, quantization=quantization)
        folder = None if mode in alias else str(student_folder)
        plan = StudentPlan(model, RltReward(logits_chunk_tokens=8), residency, folder)
        return made(settings, reference_folder=str(tiny_folder), role=plan)

    return build


def score(worker, track=False):
    return worker.call("reward", track, "call_role", Student.log_probs, ROWS, BINS, HEAT)


def ref(worker, track=False):
    return worker.call("ref", track, "ref_log_probs", batch(rows=2), [[0, 1]])


def old(worker, track=False):
    return worker.call("old_log_prob", track, "old_log_probs", batch(rows=2), [[0, 1]], False)


@pytest.mark.parametrize("cycles", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_cycles_change_no_bit_and_no_byte_and_the_weights_are_those_of_the_folder(
    scoring, mode, cycles, tiny_folder, student_folder
):
    worker = scoring(mode)
    seen, bytes_seen = [], []
    for _ in range(cycles):
        scored, reference, policy = score(worker, track=True), ref(worker, track=True), old(worker, track=True)
        seen.append([scored.value.log_probs.think, scored.value.log_probs.solution, reference.value.log_probs])
        memories = [each.memory for each in (scored, reference, policy)]
        bytes_seen.append([(memory.peak_allocated_bytes, memory.allocated_bytes) for memory in memories])
    for cycle in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(cycle, seen[0], strict=True))
    assert bytes_seen[1:] == [bytes_seen[1]] * (cycles - 1)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in worker.role.model.parameters())
    with worker.residency.phase("reward"):
        weights = {name: whole_of(each).clone() for name, each in named_weights(worker.role.model)}
    is_reference = worker.role.model is worker.reference and "swap" not in mode
    stored = load_file((tiny_folder if is_reference else student_folder) / "model.safetensors")
    plain = {name: value for name, value in weights.items() if name in stored}
    assert len(plain) == (len(stored) if mode not in ("int8", "nf4") else len(stored) - 14)
    assert all(torch.equal(value, stored[name]) for name, value in plain.items())
    with worker.residency.phase("ref"):
        of_reference = {name: whole_of(each) for name, each in named_weights(worker.reference)}
        stored = load_file(tiny_folder / "model.safetensors")
        assert all(torch.equal(of_reference[name], stored[name]) for name in of_reference)


def test_every_residency_gives_the_same_log_probs(scoring, made):
    results = {}
    for mode in ("separate", "mapped swap", "resident", "streams"):
        results[mode] = score(scoring(mode)).value.log_probs
        made.close()
    first = results.pop("separate")
    assert all(torch.equal(each.think, first.think) and torch.equal(each.solution, first.solution) for each in results.values())


def test_the_reference_as_the_student_takes_no_byte(scoring, made):
    worker = scoring("alias_ref")
    assert worker.role.model is worker.reference
    with_student = sum(tensor.untyped_storage().nbytes() for _, tensor in worker._resident())
    without = made(OFFLOADED, reference_folder=worker.plan.reference_folder)
    assert with_student == sum(tensor.untyped_storage().nbytes() for _, tensor in without._resident())


def test_with_lora_the_policy_without_its_adapters_is_the_student(made):
    more = {f"{AR}.model.lora_rank": 2, f"{AR}.actor.fsdp_config.param_offload": True}
    worker = made(more, role=StudentPlan(ScoringModel(), RltReward(), "alias_ref"))
    assert worker.role.model is worker.policy.model
    before = score(worker).value.log_probs.solution
    with worker.residency.phase("update_actor"), torch.no_grad():
        for name, parameter in worker.policy.model.named_parameters():
            if "lora" in name:
                parameter.add_(1)
    assert torch.equal(score(worker).value.log_probs.solution, before)


def size_of(model):
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.parameters()}.values())


def test_one_place_on_the_device_serves_student_and_reference(scoring):
    worker = scoring("swap")
    assert worker.role.model is worker.reference
    with worker.residency.phase("reward"):
        size = size_of(worker.reference)
        assert size > 0
        addresses = [parameter.data_ptr() for parameter in worker.reference.parameters()]
    for phase in ("ref", "reward", "ref", "reward"):
        with worker.residency.phase(phase):
            assert size_of(worker.reference) == size
            assert [parameter.data_ptr() for parameter in worker.reference.parameters()] == addresses
    worker.residency.rest()
    assert size_of(worker.reference) == 0
    homes = [part for part, names in worker.residency._parts if names & {"reference params", REWARD_MODEL}]
    assert len({place.slot.data_ptr() for home in homes for place in home._places.values()}) == sum(
        len(home._places) for home in homes
    )


@pytest.mark.parametrize("mode", ["separate", "mapped swap"])
def test_moves_are_idempotent_and_only_the_students_phase_has_it_on_the_device(scoring, mode):
    worker = scoring(mode)
    (student,) = [part for part, _ in worker.residency._parts if part.name == REWARD_MODEL]
    for phase in (*NEEDS, *NEEDS):
        with worker.residency.phase(phase):
            assert student.on_device == (REWARD_MODEL in NEEDS[phase])
    with worker.residency.phase("reward"):
        assert student.to_device() == 0
    assert (student.to_host(), student.to_host()) == (student.num_bytes, 0)


def test_the_peak_of_the_phase_is_the_weights_and_one_micro_batch(scoring):
    """The plan: two chunks of fp32 logits, and the states of a micro-batch."""
    worker = scoring("separate")
    worker.role = dataclasses.replace(worker.role, plan=dataclasses.replace(worker.role.plan, rlt=RltReward()))
    rows = rows_of(12, 60, 30, 24)
    bins = [list(range(start, start + 4)) for start in range(0, 24, 4)]
    worker.residency.rest()
    baseline = old(worker, track=True).memory.allocated_bytes - size_of(worker.policy.model)
    memory = worker.call("reward", True, "call_role", Student.log_probs, rows, bins, HEAT).memory
    config, tokens = worker.role.model.lm.config, 12 + 4 * (60 + 4 + 30)
    weights = size_of(worker.role.model)
    logits = 2 * 512 * config.vocab_size * 4
    states = tokens * (8 * config.hidden_size + 3 * config.intermediate_size) * 4
    assert weights > 0
    assert memory.peak_allocated_bytes - baseline <= 1.1 * (weights + logits + states)
    assert memory.peak_allocated_bytes - baseline >= weights


def test_logits_are_chunked_inside_the_body_alone(scoring):
    model = scoring("separate").role.model
    before = model.head.chunk_tokens
    with logits_in_chunks(model, 3):
        assert model.head.chunk_tokens == 3 != before
    assert model.head.chunk_tokens == before


@pytest.mark.parametrize(("mode", "copies"), [("swap", 3), ("mapped swap", 1)])
def test_a_mapped_student_takes_no_host_buffer(scoring, mode, copies):
    gc.collect()
    before = host_allocator().held_bytes  # a worker of an earlier test may still be there
    worker = scoring(mode)
    held = score(worker).memory.host_buffer_bytes - before
    ref(worker)
    (home,) = [part for part, _ in worker.residency._parts if part.name == REWARD_MODEL]
    assert held == pytest.approx(copies * home.num_bytes, rel=0.05)


def test_a_mapped_student_of_another_dtype_names_its_own_key(scoring):
    with pytest.raises(ConfigError, match=r"load_mode=mmap.*reward_model\.model\.fsdp_config\.model_dtype"):
        scoring("mapped", student_dtype="bfloat16")


# What a student's folder must hold, and when a student fits into the module of the reference.


@pytest.fixture
def roles(tiny_folder):
    return settings_from_mapping(LEAST | {f"{AR}.model.path": str(tiny_folder)}).actor_rollout_ref


def find(path, roles, tokenizer=None):
    return find_student(ScoringModel(path=str(path)), roles.model, tokenizer or build_tokenizer(), 64)


def test_a_student_has_the_policys_knobs_and_nothing_that_trains(tiny_folder):
    more = {f"{AR}.model.lora_rank": 4, f"{AR}.model.tiled_mlp.enabled": True, f"{AR}.model.hf_config_path": "elsewhere"}
    policy = settings_from_mapping(LEAST | more).actor_rollout_ref.model
    model = frozen_causal_model(ScoringModel(path="student", override_config={"rope_theta": 5.0}), policy)
    assert (model.path, model.lora_rank, model.hf_config_path) == ("student", 0, None)
    assert model.override_config == {"rope_theta": 5.0}
    assert model.tiled_mlp.enabled
    assert not model.enable_gradient_checkpointing


def test_a_folder_of_a_causal_lm_is_taken_and_a_missing_one_named_by_its_key(roles, tiny_folder, tmp_path):
    assert find(tiny_folder, roles) == tiny_folder
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=.*: no such folder"):
        find(tmp_path / "nothing", roles)


def test_an_embedding_smaller_than_the_tokenizer_is_refused(roles, tmp_path):
    small = make_tiny_model(tmp_path / "small", TinyShape(vocab_size=300))
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=.*: .*(embedding|tokenizer)"):
        find(small, roles)


def test_a_student_whose_config_is_of_other_weights_is_named_by_its_key(roles, tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"^reward_model\.model\.path=.*: weights and config disagree"):
        find(changed(tiny_folder, tmp_path / "other", vocab_size=100), roles)


def changed(folder, target, **entries):
    """Returns a copy of a model folder with other entries in its config."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | entries))
    return target


def test_models_of_one_shape_take_turns_and_overrides_count(roles, tiny_folder, tmp_path):
    student = changed(tiny_folder, tmp_path / "student", max_position_embeddings=77, eos_token_id=5)
    check_same_shape(ScoringModel(path=str(student)), student, roles.model, tiny_folder)
    student = ScoringModel(path=str(tiny_folder), override_config={"rms_norm_eps": 0.5})
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        check_same_shape(student, tiny_folder, roles.model, tiny_folder)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"intermediate_size": 64}, r"intermediate_size \(64 and 128\)"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings \(False and True\)"),
    ],
)
def test_models_that_differ_are_refused_with_what_differs(roles, tiny_folder, tmp_path, entries, text):
    student = changed(tiny_folder, tmp_path / "student", **entries)
    with pytest.raises(ConfigError, match=rf"reward_model\.residency=swap: .*{text}.*residency=separate"):
        check_same_shape(ScoringModel(path=str(student)), student, roles.model, tiny_folder)


# A student that reads other tokens is refused.


def modified(change):
    tokenizer = with_merges((b"a", b"b"), (b"c", b"d"))
    change(tokenizer)
    return tokenizer


def test_a_copy_from_another_folder_is_the_same(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    other = type(tokenizer).from_pretrained(tmp_path)
    other.chat_template = "another"
    other.padding_side = "right"
    check_same_tokenizer(tokenizer, other, "student")


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (with_merges((b"c", b"d"), (b"a", b"b")), "vocabulary, merges, added|vocabulary, merges"),
        (with_merges((b"a", b"b")), "vocabulary, merges"),
        (modified(lambda tokenizer: tokenizer.add_tokens(["</think>"])), "added tokens"),
        (modified(lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", normalizers.NFC())), "normalizer"),
        (
            modified(lambda tokenizer: setattr(tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Digits(True))),
            "pre-tokenizer",
        ),
    ],
)
def test_a_tokenizer_that_differs_is_refused_by_what_differs(other, parts):
    with pytest.raises(ConfigError, match=rf"^the student folder/s: its tokenizer differs from the policy's in (?:{parts})[., ]"):
        check_same_tokenizer(with_merges((b"a", b"b"), (b"c", b"d")), other, "folder/s")
