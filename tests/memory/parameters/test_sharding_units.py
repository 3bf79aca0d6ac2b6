import pytest

from tests.memory.sharded import device_peak, score_peak, wide_model

FP32 = 4
VOCABULARY, HIDDEN = 8192, 64
HEAD, BLOCK = VOCABULARY * HIDDEN, 61_632
LOGITS = 8 * VOCABULARY * FP32
"""Parameters of the head and of a block; bytes of one chunk of logits."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return wide_model(tmp_path_factory.mktemp("units"), vocab_size=VOCABULARY)


def test_a_log_prob_pass_holds_embedding_or_head_and_not_both(wide):
    # What is gathered lies twice for a moment: in the collective's output and in the parameters copied out of it.
    saved = 2 * FP32 * (HEAD + BLOCK) - LOGITS
    assert score_peak(wide, {"own_units": False}) - score_peak(wide, {}) == pytest.approx(saved, rel=0.01)


def test_an_update_holds_one_of_the_two_and_its_gradient(wide):
    # In the root both lie twice while the first block is gathered, as does the block. Of units the most is at the reduction of
    # the head's gradient: the gradient, the collective's input, this rank's half of its output, and the next block's gather.
    saved = FP32 * (4 * HEAD + 2 * BLOCK) - FP32 * (2.5 * HEAD + BLOCK)
    assert device_peak(wide, {"own_units": False}, 2).bytes - device_peak(wide, world_size=2).bytes == pytest.approx(
        saved, rel=0.03
    )
