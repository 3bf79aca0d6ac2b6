import json
import os
import re
import shutil
import socket
import stat
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recipe.choose_model import MODEL_FILES, cached
from tests.model.own_code import own_code, write_own_code
from verl_memopt.config.schema import Actor, Fsdp, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model import folder
from verl_memopt.model.assembly import build_policy, materialize
from verl_memopt.model.export import export_folder, write_record
from verl_memopt.model.folder import check_vocabulary, end_tokens, files_of_index, load_tokenizer, resolve_folder, why_no_answer
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.packing_check import check_architecture, check_packing
from verl_memopt.model.sizes import size_of
from verl_memopt.model.weights import WeightFolder, check_dtypes, named_weights
from verl_memopt.run.chat import ChatOptions, open_chat
from verl_memopt.trl.models import loaded

KEY = "actor_rollout_ref.model.path"


def test_a_local_folder_is_itself(tiny_folder):
    assert resolve_folder(str(tiny_folder), KEY) == tiny_folder.resolve()


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=rf"{KEY}={tmp_path}: the folder has no config\.json"):
        resolve_folder(str(tmp_path), KEY)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("model.safetensors", kind) for kind in ("pipe", "socket", "a link to a device")),
        *((name, "pipe") for name in ("config.json", "tokenizer.json", "generation_config.json", "notes", "a/b")),
    ],
)
def test_a_pipe_or_device_in_a_model_folder_is_refused(tiny_folder, tmp_path, name, kind):
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to("/dev/zero")
    for read in (
        lambda: resolve_folder(str(folder), KEY),
        lambda: resolve_folder(str(folder), KEY, needs_model=False),
        lambda: size_of(Model(path=str(folder)), "actor_rollout_ref.model"),
        lambda: open_chat(folder, "cpu", False, ChatOptions(0, 3, None), {}),
        lambda: loaded(folder, None, False),
    ):
        with pytest.raises(ConfigError, match=rf"{folder}: {name} is no regular file\. Remove it"):
            read()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"])
def test_a_folder_in_place_of_a_file_of_a_model_is_named(tiny_folder, tmp_path, name):
    model = shutil.copytree(tiny_folder, tmp_path / "m")
    (model / name).unlink(missing_ok=True)
    (model / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{model}: {name} is a folder"):
        resolve_folder(str(model), KEY)


def relabelled(folder, ours, theirs):
    """Change the dtype in the header of a safetensors file, and nothing else."""
    path = folder / "model.safetensors"
    size, header = struct.unpack("<Q", path.read_bytes()[:8])[0], path.read_bytes()
    fields = header[8 : 8 + size].decode().rstrip().replace(f'"{ours}"', f'"{theirs}"')
    assert f'"{theirs}"' in fields
    text = fields.encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + header[8 + size :])


@pytest.fixture
def in_bfloat16(tiny_folder, tmp_path):
    folder = tmp_path / "bf16"
    shutil.copytree(tiny_folder, folder)
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def test_a_header_that_names_another_dtype_of_two_bytes_is_told_and_refused_in_what_a_run_wrote(in_bfloat16, caplog):
    folder, model = in_bfloat16, Model(path=str(in_bfloat16))
    check_dtypes(folder, KEY)
    assert not caplog.records
    relabelled(folder, "BF16", "F16")
    check_dtypes(folder, KEY)
    assert "F16, and config.json says bfloat16" in caplog.text
    write_record(folder, 3, "actor", "base", torch.bfloat16)
    said = r"model\.safetensors: its header says that .* is F16, and the run .* wrote bfloat16"
    with pytest.raises(ConfigError, match=said):
        check_architecture(model, folder, 8)
    with pytest.raises(ConfigError, match=said):
        open_chat(folder, "cpu", False, ChatOptions(0, 3, None), {})


@pytest.mark.parametrize("stated", ["float32", "bfloat16", None])
def test_weights_of_another_width_than_the_config_says_are_cast(in_bfloat16, tiny_folder, stated, caplog):
    config = json.loads((tiny_folder / "config.json").read_text())
    for model in (in_bfloat16, shutil.copytree(tiny_folder, in_bfloat16.with_name("fp32"))):
        (model / "config.json").write_text(json.dumps(config | {"dtype": stated}))
        write_record(model, 3, "actor", "base", torch.bfloat16)
        check_dtypes(model, KEY)
        assert not caplog.records


def test_a_path_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_folder("/nowhere/at/all", KEY)


def test_a_hub_id_that_cannot_be_had_is_refused_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="the hub could not give it"):
        resolve_folder("nobody/nothing", KEY)


def test_the_end_of_a_response_is_the_tokenizers_and_the_generation_configs(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder, Model(path=str(tiny_folder)))
    assert tokenizer.eos_token_id in end_tokens(tiny_folder, tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="it has no tokenizer"):
        load_tokenizer(tmp_path, Model(path=str(tmp_path)))


def test_a_chat_template_of_the_users_replaces_the_folders(tiny_folder):
    template = "{{ messages[0].content }}!"
    tokenizer = load_tokenizer(tiny_folder, Model(path=str(tiny_folder), custom_chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def index_of(folder, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b"])
def test_an_index_that_names_a_file_outside_of_its_folder_is_refused(tmp_path, name):
    path = index_of(tmp_path, {"a": "model-1.safetensors", "b": name})
    with pytest.raises(ConfigError, match=re.escape(f"{path}: it names the file {name!r}")):
        files_of_index(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}', '{"weight_map": {"a": 7}}', "3", "[" * 100_000],
)
def test_an_index_of_another_form_is_refused_by_its_file(tmp_path, text):
    path = index_of(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not an index of weights (")):
        files_of_index(path)


def test_an_index_may_name_files_that_are_links_out_of_the_folder_as_in_the_hubs_cache(untied_folder, tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(untied_folder, blobs)
    folder.mkdir(parents=True)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = index_of(folder, {"lm_head.weight": "model-1.safetensors"})
    assert files_of_index(index) == {"model-1.safetensors"}
    assert "lm_head.weight" in WeightFolder(folder).names


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers_and_the_first_token_without_a_row(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder, Model(path=str(tiny_folder)))
    size = len(tokenizer)
    check_vocabulary(tokenizer, size, "key=folder")
    token = tokenizer.convert_ids_to_tokens(size - 2)
    said = f"its embedding has {size - 2} rows, and the tokenizer has {size} tokens. The first without a row is {token!r}"
    with pytest.raises(ConfigError, match=f"^key=folder: {re.escape(said)}"):
        check_vocabulary(tokenizer, size - 2, "key=folder")


@pytest.mark.parametrize("listed", ["x", [1, None], [[1]], -1, 1.5])
def test_an_end_token_that_is_no_id_is_refused(tiny_folder, tmp_path, listed):
    tokenizer = load_tokenizer(tiny_folder, Model(path=str(tiny_folder)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id.* (is no token id|expected a whole number)"):
        end_tokens(tmp_path, tokenizer)


# Repositories of the hub, and the code in them.


@pytest.fixture
def repository(untied_folder, tmp_path, monkeypatch):
    """A repository with a model that brings its own code, what else such repositories hold, and a stand-in for the hub.

    Gives its files; what is fetched lies in tmp_path/fetched.
    """
    at, fetched = tmp_path / "repository", tmp_path / "fetched"
    write_own_code(untied_folder, at, mixes=False)
    (at / "original").mkdir()
    for name in (
        *("consolidated.safetensors", "original/params.json", "original/model.safetensors", "pytorch_model.bin", "README.md"),
        *("merges.txt", "vocab.json", "own.tiktoken", "spiece.model", "chat_template.jinja"),
    ):
        (at / name).write_text("{}")

    def snapshot_download(repo_id, *, allow_patterns, ignore_patterns=None, **_):
        assert repo_id == "someone/own"
        files = [str(path.relative_to(at)) for path in at.rglob("*") if path.is_file()]
        for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (fetched / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(at / name, fetched / name)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    own_code(monkeypatch, tmp_path)
    return at


def names(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_without_trust_no_code_is_fetched_and_with_it_all_of_it_is(repository):
    read = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    read |= {"merges.txt", "vocab.json", "own.tiktoken", "spiece.model", "chat_template.jinja"}
    assert names(resolve_folder("someone/own", KEY)) == read
    code = {"configuration_own.py", "modeling_own.py", "tokenization_own.py"}
    assert names(resolve_folder("someone/own", KEY, True)) == read | code


def trained(folder, mesh):
    settings, cpu = Model(path="someone/own", trust_remote_code=True), torch.device("cpu")
    check_architecture(settings, folder, 64)
    policy = build_policy(settings, Fsdp(dtype="fp32"), folder, mesh, cpu)
    materialize(policy, folder, cpu)
    check_packing(policy, cpu, torch.float32, Actor(), str(folder))
    return policy


def test_a_model_with_its_own_code_loads_from_what_was_fetched_and_from_what_was_saved(repository, one_rank, tmp_path):
    folder = resolve_folder("someone/own", KEY, True)
    policy = trained(folder, one_rank)
    assert type(policy.lm).__name__ == "OwnForCausalLM"
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.randint(320, (12,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0, 3:-1].log_softmax(-1).gather(-1, tokens[4:, None])[:, 0]
        found, _ = policy(pack_rows(tokens[:4], [4], tokens[4:], [8]), 1.0, False)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    saved = tmp_path / "saved"
    export_folder(saved, policy.lm.config, folder, iter((n, p.detach()) for n, p in named_weights(policy)), writes=True)
    again = trained(saved, one_rank)
    assert torch.equal(again(pack_rows(tokens[:4], [4], tokens[4:], [8]), 1.0, False)[0], found)


def test_a_model_whose_own_code_mixes_rows_is_refused(repository, one_rank):
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"mixes": True}))
    with pytest.raises(ConfigError, match=r"models of type own mix the tokens of different rows in blocks of .*Qwen3Attention"):
        trained(resolve_folder("someone/own", KEY, True), one_rank)


def test_code_that_cannot_run_is_a_sentence(repository):
    (repository / "configuration_own.py").write_text("raise RuntimeError('too old')")
    folder = resolve_folder("someone/own", KEY, True)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: too old"):
        check_architecture(Model(path="someone/own", trust_remote_code=True), folder, 64)


@pytest.mark.parametrize("by_data", [False, True], ids=["model.trust_remote_code", "data.trust_remote_code"])
def test_a_tokenizer_with_its_own_code_loads_from_what_was_fetched(repository, by_data):
    path = repository / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    folder = resolve_folder("someone/own", KEY, True)
    tokenizer = load_tokenizer(folder, Model(path="someone/own", trust_remote_code=not by_data), by_data)
    assert type(tokenizer).__name__ == "OwnTokenizer"


def test_knobs_that_know_blocks_by_class_leave_a_models_own_code_alone_or_are_refused(repository, one_rank):
    folder = resolve_folder("someone/own", KEY, True)
    policy = trained(folder, one_rank)
    assert type(policy.decoder).__name__ == "Qwen3Model"
    assert {type(block).__name__ for block in policy.blocks()} == {"Qwen3DecoderLayer"}
    settings = Model(path="someone/own", trust_remote_code=True, tiled_mlp=TiledMlp(enabled=True))
    with pytest.raises(ConfigError, match=r"tiled_mlp\.enabled=true: OwnForCausalLM runs code of its own"):
        build_policy(settings, Fsdp(), folder, one_rank, torch.device("cpu"))


NAME = "owner/name"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub's client, and a way to put files into it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--owner--name"

    def put(**files):
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text("abc")
        (place / "snapshots" / "abc").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / "snapshots" / "abc" / name.replace("__", ".")).write_text(text)

    return put


def test_a_model_is_cached_once_it_has_a_config_and_weights(cache):
    assert not cached(NAME, "model", MODEL_FILES)
    cache(config__json="{}")
    assert not cached(NAME, "model", MODEL_FILES)
    cache(model__safetensors="")
    assert cached(NAME, "model", MODEL_FILES)
    assert not cached(NAME, "dataset", ("*",))


def test_a_model_with_a_shard_missing_is_not_cached(cache):
    index = {"weight_map": {"a": "one.safetensors", "b": "other.safetensors"}}
    cache(config__json="{}", one__safetensors="", model__safetensors__index__json=json.dumps(index))
    assert not cached(NAME, "model", MODEL_FILES)
    cache(other__safetensors="")
    assert cached(NAME, "model", MODEL_FILES)


def test_a_broken_index_in_the_cache_is_named(cache):
    cache(config__json="{}", model__safetensors="", model__safetensors__index__json="{")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: not an index of weights"):
        cached(NAME, "model", MODEL_FILES)


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path.startswith(f"/api/models/{NAME}")
        body = json.dumps({"id": NAME, "siblings": []} if found else {"error": "none"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    """A hub on this machine that has one model."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_that_has_the_model_gives_no_reason_and_one_without_it_does(online, hub):
    assert why_no_answer(NAME, "model", seconds=30, endpoint=hub) is None
    assert "404 Not Found" in why_no_answer("owner/other", "model", seconds=30, endpoint=hub)


def test_a_hub_that_never_answers_is_given_up(online):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert why_no_answer(NAME, "model", seconds=0.2, endpoint=endpoint) is not None


def test_a_hub_that_nobody_runs_is_a_reason_of_one_line(online):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    reason = why_no_answer(NAME, "model", seconds=30, endpoint=f"http://127.0.0.1:{port}")
    assert reason
    assert "\n" not in reason


@pytest.mark.parametrize("answer", [503, None], ids=["refuses", "is_silent"])
def test_a_hub_that_gives_nothing_is_asked_once_and_then_the_error_says_so(online, monkeypatch, answer, cache):
    asked, released = [], threading.Event()

    class Refusing(Hub):
        def do_GET(self):
            asked.append(self.path)
            if answer is None:
                released.wait(10)
            self.send_error(answer or 500)

    monkeypatch.setattr(folder, "ANSWER_SECONDS", 0.5)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ConfigError, match=rf"^{KEY}={NAME}: .*the hub could not give it \(ConnectionError: .*no copy"):
            resolve_folder(NAME, KEY)
        released.set()
        server.shutdown()
    assert len(asked) == 1
    cache(config__json="{}", model__safetensors="")
    assert (resolve_folder(NAME, KEY) / "config.json").is_file(), "the cache serves"


def test_no_hub_is_asked_where_it_is_switched_off(monkeypatch, hub):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_no_answer(NAME, "model", seconds=30, endpoint=hub) == "HF_HUB_OFFLINE is set"
