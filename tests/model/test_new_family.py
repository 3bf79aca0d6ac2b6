"""A family that is added as the page on extending says: classes in transformers, and one row of the table."""

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from tests.model.architectures import tiny_folder
from tests.model.test_trial_build import compared, trained
from tools.models_page import page
from verl_memopt.config.schema import Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model import families
from verl_memopt.model.decoder import Decoder
from verl_memopt.model.families import Family
from verl_memopt.model.packing_check import check_architecture

KIND = "my_type"


class MyConfig(Qwen3Config):
    model_type = KIND

    logit_scale: float = 1.0
    num_local_experts: int = 1


class MyMLP(Qwen3MLP):
    pass


class MyAttention(Qwen3Attention):
    pass


class MyDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn, self.mlp = MyAttention(config, layer_idx), MyMLP(config)


class MyModel(Qwen3Model):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([MyDecoderLayer(config, place) for place in range(config.num_hidden_layers)])


class MyForCausalLM(Qwen3ForCausalLM):
    """Multiplies its logits, which Qwen3 does not."""

    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = MyModel(config)
        self.post_init()

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * self.config.logit_scale
        return found


AutoConfig.register(KIND, MyConfig)
AutoModelForCausalLM.register(MyConfig, MyForCausalLM)

ROW = Family(KIND, "My Model 7B", multiplied_by="logit_scale", note="It is mine.")
OWN = Family(KIND, "My Model 7B", "My", multiplied_by="logit_scale")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the type, with a window that is shorter than prompts and a factor of the logits."""
    window = {"sliding_window": 8, "layer_types": None, "use_sliding_window": True, "max_window_layers": 1}
    return tiny_folder(tmp_path_factory.mktemp("new") / "model", KIND, **window, logit_scale=3.0, num_local_experts=1)


@pytest.fixture
def add(monkeypatch):
    """Gives a function that puts the family's row into the table, as an edit of it would."""
    others = families.FAMILIES
    return lambda row: monkeypatch.setattr(families, "FAMILIES", (row, *others))


def check(folder, **model):
    return check_architecture(Model(path=str(folder), **model), folder, 64)


def test_what_needs_a_row_is_refused_until_the_row_says_it(folder, add):
    with pytest.raises(ConfigError, match=rf"models of type {KIND} change the logits after the head \(logit_scale\)"):
        check(folder)
    unscaled = {"override_config": {"logit_scale": 1.0}}
    with pytest.raises(ConfigError, match=rf"models of type {KIND} slide attention over a window \(sliding_window=8\)"):
        check(folder, **unscaled)
    add(Family(KIND, "My Model 7B"))
    check(folder, **unscaled)
    with pytest.raises(ConfigError, match=rf"change the logits .* Types that are tested: {KIND}, arcee"):
        check(folder)
    add(ROW)
    check(folder)


def test_transformers_computes_a_family_whose_classes_are_not_named_or_not_its_own(folder, add, one_rank):
    add(ROW)
    assert isinstance(compared(folder, one_rank).decoder, MyModel)
    # Classes of a folder's own code may compute anything under these names.
    add(OWN)
    assert isinstance(trained(folder, one_rank, False).decoder, MyModel)


def test_our_own_decoder_computes_a_family_of_transformers_whose_classes_are_named(folder, add, one_rank, monkeypatch):
    add(OWN)
    monkeypatch.setattr(MyForCausalLM, "__module__", "transformers.models.my_type.modeling_my_type")
    assert isinstance(compared(folder, one_rank, tiled_mlp=TiledMlp(enabled=True)).decoder, Decoder)


def test_the_page_of_models_has_its_row(add):
    add(ROW)
    assert f"| `{KIND}` | My Model 7B |  | It is mine. |\n" in page()
    add(OWN)
    assert f"| `{KIND}` | My Model 7B | yes |  |\n" in page()


def test_the_row_of_a_family_that_is_refused_gives_its_reason_and_the_nearest_type(folder, add):
    reason = f"{families.EXPERTS} with a router of mine"
    add(Family(KIND, "My Model 7B", refused=reason, nearest="olmoe"))
    assert f"| `{KIND}` | My Model 7B | {reason} |\n" in page()
    with pytest.raises(ConfigError, match=rf"models of type {KIND} {reason} \(4 in a layer\).* type that works is olmoe\."):
        check(folder, override_config={"logit_scale": 1.0, "num_local_experts": 4})
