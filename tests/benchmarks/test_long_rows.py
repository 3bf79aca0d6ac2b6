"""The count of what an update of one long row holds."""

from benchmarks.long_rows import CHUNK, MODEL, PROMPT, peak
from verl_memopt.config.loader import load_settings
from verl_memopt.model.sizes import size_of


def test_a_block_over_tiles_holds_less_of_a_long_row(tiny_folder):
    files = ["data.train_files=none", "data.val_files=null", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    shape = size_of(load_settings("rloo_trainer", [*files, f"{MODEL}.path={tiny_folder}"]).actor_rollout_ref.model, MODEL)
    whole, tiled = (peak(shape, 2 * PROMPT, [CHUNK, f"{MODEL}.block_tile_tokens={tile}"]) for tile in ("null", 512))
    assert whole["params"] == tiled["params"] > 0
    assert tiled["activations"] < whole["activations"]
