import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from verl_memopt.knobs.formulas import page
from verl_memopt.knobs.knob import knobs

PAGE = page()


def test_the_page_in_the_documentation_is_this_one():
    committed = Path(__file__).parents[2] / "docs" / "formulas.md"
    assert committed.read_text() == PAGE, "make docs writes it"


def test_every_formula_is_well_formed():
    formulas = re.findall(r"<math.*?</math>", PAGE)
    assert len(formulas) > 80
    for formula in formulas:
        ElementTree.fromstring(formula.replace("&nbsp;", " "))


@pytest.mark.parametrize("knob", [knob for knob in knobs() if knob.claims], ids=lambda knob: knob.name)
def test_every_claim_of_a_knob_has_its_formula(knob):
    section = PAGE.partition("## Definitions")[0].partition(f"### {knob.name}\n")[2].partition("\n### ")[0]
    assert len(re.findall("<math", section)) == len(knob.claims)
    assert all(f"In `{claim.phase}`, of {claim.kind}:" in section for claim in knob.claims)


def test_the_two_claims_of_one_function_have_their_own_arguments():
    section = PAGE.partition("### chunked_logprob\n")[2].partition("\n### ")[0]
    update, log_probs = re.findall("<math.*?</math>", section)
    assert "<mtext>true</mtext>" in update
    assert "<mtext>false</mtext>" in log_probs


def test_what_a_formula_calls_by_name_is_defined():
    definitions = PAGE.partition("## Definitions")[2]
    assert all(f"### {name}" in definitions for name in ("logit_bytes", "adapter_params", "mlp_bytes", "activation_bytes"))
