from pathlib import Path

import verl_memopt.config
from verl_memopt.memory.limits.profiles import KNOB, PROFILES


def test_every_profile_that_can_be_chosen_is_in_the_index():
    folder = Path(verl_memopt.config.__file__).parent / "yaml" / "memory"
    assert {path.stem for path in folder.glob("*.yaml")} == {*PROFILES, "none"}
    assert KNOB.besides == tuple(f"memory={name}" for name in PROFILES)
