"""The counter of GPU cost against counts by hand."""

import dataclasses
import shutil
from collections import Counter

import pytest

from benchmarks.gpu_cost.schedule import COPIES, Launch, Wait, simulate
from benchmarks.gpu_cost.seconds import H100
from benchmarks.gpu_cost.update import Case, count
from tests.forked import call_on_fake_gpu
from verl_memopt.model.tiny import TinyShape

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the fake device is compiled")

SHAPE = TinyShape(num_heads=2, num_kv_heads=2)
PLAIN = (
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.actor.use_prefix_grouper=false",
)  # fmt: skip


def of_layers(case, layers):
    return dataclasses.replace(case, shape=dataclasses.replace(case.shape, num_layers=layers))


ALIKE = Case(SHAPE, prompt=16, response=16, group=2, overrides=PLAIN)
NEIGHBOURS = Case(dataclasses.replace(SHAPE, model_type="qwen2"), prompt=24, response=16, group=4)
DEFAULT = Case(SHAPE, prompt=24, response=16, group=4)
HALVED = dataclasses.replace(DEFAULT, overrides=("actor_rollout_ref.actor.fsdp_config.split_master_weights=true",))
AT_REST = dataclasses.replace(DEFAULT, overrides=("actor_rollout_ref.actor.fsdp_config.param_offload=true",))
GRAPHS = dataclasses.replace(DEFAULT, overrides=("actor_rollout_ref.actor.fsdp_config.cuda_graphs=true",))
CASES = (*(of_layers(ALIKE, layers) for layers in (2, 3)), DEFAULT, AT_REST, GRAPHS)
LEAVING = dataclasses.replace(
    DEFAULT, groups=2, budget=24 + 4 * 16, overrides=("actor_rollout_ref.actor.fsdp_config.grad_offload=true",)
)
"""Gradients rest on the host, and two micro-batches add to them."""
PROOFS = (*(of_layers(case, layers) for case in (NEIGHBOURS, LEAVING) for layers in (2, 3)), DEFAULT, HALVED)


def count_all(cases):
    return {case: count(case) for case in cases}


@pytest.fixture(scope="module")
def counted():
    """Case -> what its update costs. One process counts all, and compiles what they have in common once."""
    return call_on_fake_gpu(f"{__name__}:count_all", CASES)


@pytest.fixture(scope="module")
def proofs():
    return call_on_fake_gpu(f"{__name__}:count_all", PROOFS)


BLOCK = {
    # Forward 4: queries, keys and values in one, attention's output, gate and up in one, down. Backward twice as many: of an
    # input and of a weight.
    "mm": 4 + 8,
    "add": 2,  # residual sums; those of their gradients are part of the norms' gradients
    "_flash_attention_forward": 1,
    "_flash_attention_backward": 3,
    "zeros_like": 2,  # sums of the gradients of the norms of queries and keys
    "_to_copy": 2,  # these sums, rounded
    "kernel _norm": 4,  # two in the forward, and both again in backward
    "kernel _both_statement": 2,  # queries and keys in one, forward and backward
    "kernel _gate": 2,  # forward and backward
    "kernel _gate_gradient": 1,
    "kernel _norm_gradient_plus": 2 * 2,  # the gradient with the sums of each program's rows, then the sum of these
    "kernel _both_back_statement": 2,  # queries, keys and values in one, and the sum over programs
    "_fused_adamw_": 1,  # one launch takes 30 of its tensors
}
"""Launches of one block of Qwen3 in an update, counted by hand."""


def by_operation(update):
    found = Counter()
    for name, cost in update.counted.ops.items():
        found[" ".join(name.split()[:2] if name.startswith(("compiled", "kernel")) else name.split()[:1])] += cost.launches
    return found


def test_the_launches_of_a_block_are_those_counted_by_hand(counted):
    two, three = (counted[of_layers(ALIKE, layers)] for layers in (2, 3))
    block = by_operation(three)
    block.subtract(by_operation(two))
    assert {name: launches for name, launches in block.items() if launches} == BLOCK
    assert three.counted.compiled_calls == two.counted.compiled_calls == 0
    # Products of the 31 tokens of both rows with 7 weights, three times; of attention two in the forward and five in backward.
    weights = 2 * 62 * (4 * 64 * 64 + 3 * 64 * 128)
    attention = 2 * 2 * 2 * 32 * (31 * 32 // 2)
    flops = [sum(cost.flops for cost in update.counted.ops.values()) for update in (two, three)]
    assert flops[1] - flops[0] == 3 * weights + (2 + 5) * attention


BLOCK_OF_NEIGHBOURS = {
    # With biases: queries, keys and values in one, twice, and down, which adds to the block's sum.
    "addmm": 2 + 1,
    # Gate and up in one and the output projection, twice each; backward of q, k and v, output, gate and up, down: of an input and
    # of a weight.
    "mm": 2 + 2 + 2 * 4,
    "sum": 1,  # the gradients of three biases
    "_foreach_add_": 1,  # gradients of queries, keys and values through the shared prompt
    "clone": 1,  # log-sum-exps of the answers
    "_flash_attention_forward": 2 * 2,  # answers and what they see of the prompt, twice
    "_flash_attention_backward": 2 * 3,
    "_foreach_copy_": 2,  # the cast of fp32 masters
    "_to_copy": 12,  # the gradient of each parameter, which becomes fp32
    "_fused_adamw_": 1,
    "kernel _norm": 3,
    "kernel _both_statement": 3,  # queries and keys in one
    "kernel _both_back_statement": 1,
    "kernel _merge_statement": 2,
    "kernel _norm_of_sum": 2,
    "kernel _gate": 1,  # of the forward
    "kernel _gate_gradient_and_value": 1,
    "kernel _norm_gradient_plus": 2 * 2,
}
"""Launches of a checkpointed block of Qwen2 with fp32 masters and shared prompts, counted by hand."""


@pytest.mark.slow
def test_a_checkpointed_block_whose_neighbours_are_one_product_launches_what_a_count_by_hand_says(proofs):
    two, three = (proofs[of_layers(NEIGHBOURS, layers)] for layers in (2, 3))
    block = by_operation(three)
    block.subtract(by_operation(two))
    found = {name: launches for name, launches in block.items() if launches}
    assert found == BLOCK_OF_NEIGHBOURS


def test_an_update_of_default_settings_makes_no_launch_that_was_taken_out(counted):
    found = counted[DEFAULT].counted
    # A micro-batch is one upload of page-locked memory.
    assert (found.uploads, found.pageable_uploads) == (1, 0)
    # The host reads metrics, log-probs and whether the step was skipped once everything is launched.
    assert not found.host_waits
    assert found.border_waits == {"torch.cuda.synchronize": 1, "Event.synchronize": 1}
    places = {name.partition(":")[0] for name in found.ops}
    # The fp32 master weights of a unit are cast in one launch.
    assert "_foreach_copy_ precision_torch.py" in places
    assert not {"_to_copy _fsdp_common.py", "copy_ _fsdp_param_group.py"} & places
    # Answers to one prompt are slices of the pack: only the last block, of which most of the prompt is left out, gathers.
    by_place = Counter()
    for name, cost in found.ops.items():
        by_place[name.partition(":")[0]] += cost.launches
    assert by_place["index attention_fused.py"] <= 2 * 5 + 6
    assert by_place["index_copy attention_fused.py"] <= 2 * 2
    # Logits are written once by the product, read by one kernel for statistics, and once for the gradient that is written over
    # them.
    logits = 2 * DEFAULT.group * DEFAULT.response * SHAPE.vocab_size
    statistics, gradient = (
        next(cost for name, cost in found.ops.items() if name.startswith(f"kernel {function} "))
        for function in ("product_statistics", "product_gradient_")
    )
    assert logits <= statistics.read_bytes <= 1.1 * logits
    assert statistics.written_bytes <= 0.1 * logits
    assert logits == gradient.written_bytes <= gradient.read_bytes <= 1.1 * logits
    assert not any(name.startswith("copy_ logit_tiles") for name in found.ops)


def test_parameters_that_come_back_in_an_update_make_the_host_wait_for_nothing_and_each_unit_for_its_own(counted):
    plain, found = counted[DEFAULT].counted, counted[AT_REST].counted
    assert not found.host_waits
    assert found.border_waits == plain.border_waits
    assert found.pageable_uploads == plain.pageable_uploads == 0
    # A block has 11 parameters, of which queries, keys and values share a storage, and gate and up another.
    storages, units = 2 + 8 * SHAPE.num_layers, 1 + SHAPE.num_layers
    assert found.uploads - plain.uploads == storages
    # For each unit the copies wait for the computation, and the computation for the copies.
    assert found.stream_waits - plain.stream_waits == 2 * units


@pytest.mark.slow
def test_an_update_over_halved_masters_multiplies_neighbours_at_once_and_waits_for_nothing(proofs):
    plain, found = proofs[DEFAULT], proofs[HALVED]
    assert not found.counted.host_waits

    def products(update):
        files = {name: cost.launches for name, cost in update.counted.ops.items() if name.split(" ")[0] in ("mm", "addmm")}
        # The head's gradient is summed in fp32 where masters are halved, which takes further products.
        return {name: launches for name, launches in files.items() if "logit_tiles" not in name}

    assert products(found) == products(plain)
    step = [name for name in found.counted.ops if "optimizer_state_dtype_torch" in name]
    assert sorted(name.partition(" optimizer")[0] for name in step) == sorted(
        ["compiled _join_statement", "compiled _split_statement", "_foreach_copy_", "_foreach_copy_"]
    )


def test_the_schedule_has_every_launch_that_is_counted_and_no_copy_runs_alone_at_default_settings(counted):
    plain, at_rest = counted[DEFAULT].counted, counted[AT_REST].counted
    for found in (plain, at_rest):
        launches = [step for step in found.steps if isinstance(step, Launch)]
        assert sum(len(step.kernels) for step in launches) == sum(cost.launches for cost in found.ops.values())
        flops = sum(kernel.flops for step in launches for kernel in step.kernels)
        assert flops == pytest.approx(sum(cost.flops for cost in found.ops.values()), rel=1e-3)
    # Parameters that rest on the host arrive in copies: with a slow bus the device waits for them.
    slow = dataclasses.replace(H100, bus=1e6)
    before, after = (simulate(found.steps, slow) for found in (plain, at_rest))
    assert after.copies > 2 * before.copies
    assert after.phases["forward"][COPIES] > 0.9 * (after.copies - before.copies)


def test_blocks_as_graphs_cost_the_host_less_and_the_device_padding_and_copies(counted):
    plain, graphs = (counted[case].counted for case in (DEFAULT, GRAPHS))
    replays = {step.graph for step in graphs.steps if isinstance(step, Launch) and step.graph is not None}
    # Two in the forward and three in the backward of a block; not of the last, which is pruned.
    assert len(replays) == 5 * (SHAPE.num_layers - 1)
    less, more = (simulate(found.steps, H100) for found in (graphs, plain))
    assert less.host < 0.9 * more.host
    assert more.flops <= less.flops <= 1.2 * more.flops


@pytest.mark.slow
def test_stored_gradients_of_a_block_arrive_in_one_copy_for_which_backward_does_not_wait(proofs):
    two, three = (proofs[of_layers(LEAVING, layers)].counted for layers in (2, 3))
    assert proofs[of_layers(LEAVING, 2)].micro_batches == 2
    assert three.uploads - two.uploads == 1
    # What backward waits for, once in each micro-batch: that the gradients of the block before have left.
    lane = next(step.lane for step in two.steps if isinstance(step, Launch))
    waits = [sum(isinstance(step, Wait) and step.lane == lane for step in found.steps) for found in (two, three)]
    assert waits[1] - waits[0] <= 2
