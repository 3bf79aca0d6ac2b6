"""The pictures of the pages that a script draws from the code."""

import importlib.util

from tests.docs.pages import DOCS


def test_the_mask_of_shared_prompts_can_be_drawn(tmp_path):
    spec = importlib.util.spec_from_file_location("shared_prompt_mask", DOCS / "shared_prompt_mask.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.main(tmp_path)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "images" / drawn.name).is_file()
