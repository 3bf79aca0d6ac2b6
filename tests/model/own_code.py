"""A model folder that brings its own code, right or mixing the rows of a pack."""

import json
import shutil
import sys

import transformers.dynamic_module_utils

CONFIG_CODE = """
from transformers import Qwen3Config


class OwnConfig(Qwen3Config):
    model_type = "own"
"""
MODEL_CODE = """
from transformers import Qwen3ForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        if config.mixes:
            for layer in self.model.layers:
                layer.self_attn.o_proj.register_forward_hook(lambda module, given, out: out.cumsum(1))
"""
TOKENIZER_CODE = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def write_own_code(source, at, mixes):
    """Copy a Qwen3 folder as a model of type ``own``. With ``mixes`` its attention sums over all earlier tokens of the pack."""
    shutil.copytree(source, at)
    config = json.loads((at / "config.json").read_text())
    own = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP, "mixes": mixes}
    (at / "config.json").write_text(json.dumps(config | own))
    for name, text in (("configuration", CONFIG_CODE), ("modeling", MODEL_CODE), ("tokenization", TOKENIZER_CODE)):
        (at / f"{name}_own.py").write_text(text)
    return at


def own_code(monkeypatch, tmp_path):
    """Let transformers copy the code that it runs into tmp_path/modules during a test."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
