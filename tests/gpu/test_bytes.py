"""What each knob saves on the GPU, against its formula: by kind, and the sum of kinds against the allocator.

Only a GPU has an allocator to ask. The model is wide enough for blocks of 512 bytes and a library's own buffers not to matter.
"""

import pytest
import torch

from tests.gpu import machine
from tests.ladder.test_measure import SHAPE, SMALL, SMALLER, WIDE_WORK
from verl_memopt.ladder.measure import ABLATION, ALTERNATIVES, UpdateSize, run_ablation
from verl_memopt.model.tiny import TinyShape, make_tiny_model

WIDE = TinyShape(
    vocab_size=65_536, hidden_size=1024, intermediate_size=3072, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=64,
    max_positions=4096,
)  # fmt: skip
WORK = UpdateSize(rows=8, prompt=1024, response=512, group=8)
"""12,288 tokens of 0.18 billion parameters: about 20 GiB with every knob off."""
BOUND = {"cuda": 0.02, "cpu": 0.1}
"""How far a saving may be from its formula, as a share. The CPU's model is tiny, and so are its savings."""
OTHERS = {"cuda": 2**25, "cpu": SMALL}
"""Bytes in which a formula may be off where it says that nothing is saved, or next to nothing: on a GPU a product's workspace."""
LIBRARIES = 2**27
"""Bytes that kernels of libraries take from the allocator for themselves, unseen by the tracker."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("bytes") / "model", machine.size(WIDE, SHAPE))
    work, extra = machine.size((WORK, ()), (WIDE_WORK, SMALLER))
    return {row.knob: row for row in run_ablation(str(folder), work, [*extra, f"trainer.device={machine.kind()}"])}


@pytest.mark.parametrize("name", [*ABLATION, *ALTERNATIVES])
def test_a_knob_saves_what_its_formula_says(rows, name):
    for saving in rows[name].savings:
        allowed = max(BOUND[machine.kind()] * abs(saving.formula_bytes), OTHERS[machine.kind()])
        assert abs(saving.measured_bytes - saving.formula_bytes) <= allowed, saving


@pytest.mark.parametrize("name", ["all off", *ABLATION, *ALTERNATIVES])
def test_the_kinds_of_a_peak_are_what_the_allocator_counts(rows, name):
    row = rows[name]
    allowed = machine.size(BOUND["cuda"] * row.peak_device_bytes + LIBRARIES, 0)
    assert abs(row.peak_device_bytes - sum(row.kinds.values())) <= allowed


def test_exact_knobs_change_no_loss(rows):
    for name in (*ABLATION[: ABLATION.index("precision")], "optimizer_in_backward", "native_offload", "load_mode"):
        assert rows[name].loss == pytest.approx(rows["all off"].loss, rel=machine.size(1e-4, 1e-5), abs=1e-7), name


@pytest.mark.rehearsed
@pytest.mark.parametrize(("elements", "times"), [(2**20, 1), (2**18, 5)])
def test_a_peak_is_the_most_bytes_held_at_once(device, elements, times):
    def body():
        for _ in range(times):
            held = torch.empty(elements, device=device)
            held = held + 1
        return held

    given, peak = machine.peak_bytes(body)
    assert given.numel() == elements
    assert peak == 2 * 4 * elements
