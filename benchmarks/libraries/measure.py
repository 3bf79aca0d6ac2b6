"""Measures libraries beside the code that they would replace: `python benchmarks/libraries/measure.py PART ...`.

Needs an environment with the package and math-verify, bitsandbytes, torchao, datasets and pebble. Prints one line a figure.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def least(call, times=5):
    """Returns the least seconds of some calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def schedules(folder):
    from transformers import get_scheduler

    from verl_memopt.config.schema import Optim
    from verl_memopt.worker.optimizer import learning_rate_factors

    for warmup in (0, 10):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        theirs = get_scheduler("cosine", optimizer, warmup, 100).lr_lambdas[0]
        ours = learning_rate_factors(warmup, 100, Optim(lr_scheduler_type="cosine"))
        apart = max(abs(ours(step) - theirs(step)) for step in range(warmup, 100))
        print(f"cosine, warm-up {warmup}: largest difference after it {apart}; first factor ours {ours(0):.4f}, "
              f"transformers' {theirs(0):.4f}; at step 130 ours {ours(130):.4f}, transformers' {theirs(130):.4f}")  # fmt: skip


def mathematics(folder):
    start = time.perf_counter()
    from math_verify import parse, verify

    print(f"math-verify: first import {time.perf_counter() - start:.2f} s")
    pairs = [(rf"\boxed{{\frac{{{index}}}{{3}}}}", rf"so \boxed{{\frac{{{2 * index}}}{{6}}}}") for index in range(200)]
    print(f"math-verify: {1000 * least(lambda: [verify(parse(a), parse(b)) for a, b in pairs], 1) / 200:.1f} ms a fraction")
    start = time.perf_counter()
    right = verify(parse("4"), parse(r"\boxed{9^{9^{9^{9}}}}", parsing_timeout=1), timeout_seconds=1)
    print(f"math-verify: a tower of powers, limit 1 s: {right} after {time.perf_counter() - start:.1f} s")
    code = "from math_verify import parse, verify; v = verify(parse('4'), parse(r'\\boxed{9^{9^{9^{9}}}}', parsing_timeout=None), timeout_seconds=None)"  # noqa: E501
    try:
        subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True)
        print("math-verify: a tower of powers, no limit: returned within 30 s")
    except subprocess.TimeoutExpired:
        print("math-verify: a tower of powers, no limit: not returned after 30 s")
    print("math-verify: two boxes are read as", parse(r"\boxed{3}, no, \boxed{4}")[0])


def quantization(folder):
    import bitsandbytes.functional as bnb
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from verl_memopt.memory.quantized_frozen_torch import Packing

    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, 3072, bias=False)
    weight = layer.weight.data.normal_(std=0.02)

    def line(name, num_bytes, read):
        error = float((read() - weight).norm() / weight.norm())
        print(f"{name}: {num_bytes / weight.numel():.4f} bytes a parameter, error {error:.4f}, read in {least(read):.4f} s")

    for kind in ("int8", "nf4"):
        ours = Packing(kind, layer.in_features)
        packed = ours.quantize(weight)
        line(f"ours {kind}", packed.nbytes, lambda ours=ours, packed=packed: ours.dequantize(packed, torch.float32))
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    line("bitsandbytes nf4", codes.nbytes + state.absmax.nbytes, lambda: bnb.dequantize_4bit(codes, state))
    apart = float((ours.dequantize(packed, torch.float32) - bnb.dequantize_4bit(codes, state)).abs().max())
    print(f"nf4, ours against bitsandbytes: largest difference {apart:.1e}")
    model = torch.nn.Sequential(layer)
    exact = weight.clone()
    quantize_(model, Int8WeightOnlyConfig())
    weight = exact
    line("torchao int8, one scale a row", weight.numel() + 4 * weight.shape[0], lambda: model[0].weight.dequantize())


def export(folder):
    from transformers import AutoConfig, AutoTokenizer

    from verl_memopt.model.export import _copy_tokenizer, _write_config
    from verl_memopt.model.tiny import make_tiny_model

    source = make_tiny_model(folder / "model")
    file = source / "tokenizer.json"
    plain = json.loads(file.read_text())
    words = plain["model"]["vocab"]
    words.update({f"tok{index}": index for index in range(len(words), 150_000)})
    file.write_text(json.dumps(plain, ensure_ascii=False))
    config, ours, theirs = AutoConfig.from_pretrained(source), folder / "ours", folder / "theirs"
    ours.mkdir()
    copied = least(lambda: _copy_tokenizer(source, ours), 3)
    saved = least(lambda: AutoTokenizer.from_pretrained(source).save_pretrained(theirs), 3)
    print(f"tokenizer of 150,000 entries: copied in {copied:.3f} s, loaded and saved in {saved:.2f} s")
    sizes = [(path / "tokenizer.json").stat().st_size for path in (source, ours, theirs)]
    print("tokenizer.json, bytes: source {}, copied {}, saved {}".format(*sizes))
    _write_config(ours, config)
    config.save_pretrained(theirs)
    written = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
    print("config.json: only ours", sorted(written[0].keys() - written[1].keys()), "only saved",
          sorted(written[1].keys() - written[0].keys()))  # fmt: skip


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _load(rank, way, folder, port):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_memopt.model.weights import fill_from_folder

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    config, start, seconds = AutoConfig.from_pretrained(folder), _status("VmRSS"), time.perf_counter()
    if way == "shards alone":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in (*model.model.layers, model):
        fully_shard(block)
    if way == "shards alone":
        model.to_empty(device="cpu")
        model.tie_weights()
        fill_from_folder(model, folder)
    if rank == 0:
        print(f"two ranks, {way}: peak {_status('VmHWM') - start:.0f} MiB a rank over the start, "
              f"{time.perf_counter() - seconds:.1f} s", flush=True)  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def loading(folder):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    shape = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    config = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, vocab_size=32000, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "dense")
    for index, way in enumerate(("shards alone", "from_pretrained")):
        torch.multiprocessing.spawn(_load, (way, folder / "dense", 29631 + index), nprocs=2)
    experts = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=4, num_hidden_layers=2, vocab_size=300, **shape
    )
    model = AutoModelForCausalLM.from_config(experts)
    model.save_pretrained(folder / "experts")
    with safe_open(folder / "experts/model.safetensors", "pt") as file:
        stored, own = set(file.keys()), {name for name, _ in model.named_parameters()}
    print(f"mixture of experts: {len(own)} parameters, {len(stored)} stored names, {len(own & stored)} names in both")


READ = {
    "ours": "from verl_memopt.data.dataset import READERS as r; p = pathlib.Path(sys.argv[1]); i = time.time(); "
    "n = len(list(r[p.suffix](p)))",
    "datasets": "import datasets; i = time.time(); k = 'parquet' if sys.argv[1].endswith('parquet') else 'json'; "
    "n = len(list(datasets.load_dataset(k, data_files=sys.argv[1], split='train', cache_dir=sys.argv[2])))",
}  # fmt: skip


def datasets(folder):
    import pyarrow as pa
    from pyarrow import parquet

    prompt = {"data_source": "toy/arithmetic", "reward_model": {"style": "rule", "ground_truth": "2"}}
    rows = [{"prompt": [{"role": "user", "content": f"{index}+1="}], **prompt} for index in range(10_000)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    lines = [json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "damaged.jsonl").write_text("\n".join([*lines[:3], '{"prompt": [}', *lines[3:6]]))
    for name in ("rows.parquet", "rows.jsonl", "damaged.jsonl"):
        for way, code in READ.items():
            shown = "print(f'import {i - s:.1f} s, {n} rows in {time.time() - i:.1f} s')"
            code = f"import pathlib, sys, time; s = time.time(); {code}; {shown}"
            ended = subprocess.run([sys.executable, "-c", code, folder / name, folder / "cache"], capture_output=True, text=True)
            print(f"{name}, {way}:", ended.stdout.strip() or ended.stderr.strip().splitlines()[-1].replace(str(folder), ""))


def _starts_a_daemon_and_hangs():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "47.125"])
        os._exit(0)
    time.sleep(100)


def processes(folder):
    import psutil
    from pebble import ProcessPool

    with ProcessPool(1) as pool:
        print("pebble: the row ended with", type(pool.schedule(_starts_a_daemon_and_hangs, timeout=1).exception()).__name__)
    time.sleep(0.5)
    left = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "47.125"]]
    print("pebble: processes of the function alive after the pool has closed:", len(left))
    for process in left:
        process.kill()


PARTS = {part.__name__: part for part in (schedules, mathematics, quantization, export, loading, datasets, processes)}

if __name__ == "__main__":
    for asked in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            PARTS[asked](Path(scratch))
