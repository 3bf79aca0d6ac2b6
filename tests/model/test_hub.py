import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from verl_memopt.errors import ConfigError
from verl_memopt.run.choose_model import MODEL_FILES, cached, why_no_answer

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


def test_nothing_is_cached_in_an_empty_cache(cache):
    assert not cached(NAME, "model", MODEL_FILES)


def test_a_model_is_cached_once_it_has_a_config_and_weights(cache):
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


def test_a_hub_that_has_the_model_gives_no_reason(online, hub):
    assert why_no_answer(NAME, "model", seconds=30, endpoint=hub) is None


def test_a_hub_without_the_model_is_a_reason(online, hub):
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


def test_no_hub_is_asked_where_it_is_switched_off(monkeypatch, hub):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_no_answer(NAME, "model", seconds=30, endpoint=hub) == "HF_HUB_OFFLINE is set"
