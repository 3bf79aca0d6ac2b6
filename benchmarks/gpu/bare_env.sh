#!/usr/bin/env bash
# Makes a virtual environment with only what a bare GPU machine has (bare.txt): no ray, vllm, hydra or tensordict.
# A rehearsal on a CPU runs in it what the GPU machine will run:
#
#   bash benchmarks/gpu/wheels.sh                        # what is missing, beforehand
#   bash benchmarks/gpu/bare_env.sh build/bare           # once; takes some minutes
#   SMALL=1 PYTHON=build/bare/bin/python bash benchmarks/gpu/all.sh
#
# TORCH chooses the version of torch (default: 2.11.0, with the CUDA libraries that it asks for: 5 GB on disk). Where the
# package index has a CPU build of another version, TORCH=2.13.0 takes less.
# PYTHON chooses the interpreter (default: python3.12, else python3.11); the wheels must be for the same version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

FOLDER=${1:?"bare_env.sh: give the folder to make, for example build/bare"}
TORCH=${TORCH:-2.11.0}
PYTHON=${PYTHON:-$(for name in python3.12 python3.11; do "$name" -c '' 2>/dev/null && echo "$name" && break; done || true)}
[ -n "$PYTHON" ] || { echo "bare_env.sh: no Python 3.12 or 3.11 found. Name one: PYTHON=/path/to/python3.12" >&2; exit 2; }

stamp="$("$PYTHON" --version) torch $TORCH $(cat benchmarks/gpu/bare.txt benchmarks/gpu/bare_env.sh | sha256sum | cut -d' ' -f1)"
if [ -f "$FOLDER/.stamp" ] && [ "$(cat "$FOLDER/.stamp")" = "$stamp" ]; then
    exit 0
fi
rm -rf "$FOLDER"
"$PYTHON" -m venv "$FOLDER"
"$FOLDER/bin/python" -m pip --disable-pip-version-check --quiet install "torch==$TORCH" -r benchmarks/gpu/bare.txt
"$FOLDER/bin/python" - <<'CHECK'
import importlib.util, sys
there = [name for name in ("ray", "vllm", "hydra", "omegaconf", "tensordict", "codetiming", "torchdata", "torchao") if importlib.util.find_spec(name)]
sys.exit(f"bare_env.sh: {', '.join(there)} must not be in a bare environment." if there else 0)
CHECK
echo "$stamp" > "$FOLDER/.stamp"
echo "$FOLDER: $("$FOLDER/bin/python" -c 'import platform, torch, transformers; print("Python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)')"
