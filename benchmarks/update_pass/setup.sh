#!/usr/bin/env bash
# Makes .venv-peers beside .venv, with TRL, verl, Liger and what this project needs, and torch in the build that .venv has.
# Runs again at once when nothing it depends on has changed.
#
#   benchmarks/update_pass/setup.sh
#   PYTHON=python3.12 benchmarks/update_pass/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=.venv-peers benchmark=benchmarks/update_pass

PYTHON=${PYTHON:-.venv/bin/python}
[ -x .venv/bin/python ] || { echo "setup.sh: .venv is missing. Run ./setup_env.sh first." >&2; exit 2; }
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')

stamp="$version $torch $(pwd) $(cat "$benchmark"/requirements*.txt "$benchmark/setup.sh" requirements/constraints.txt | sha256sum | cut -d' ' -f1)"
if [ -f "$folder/.stamp" ] && [ "$(cat "$folder/.stamp")" = "$stamp" ]; then
    exit 0
fi

echo "setup.sh: installing $benchmark/requirements.txt into $folder (Python $version); this is done once" >&2
[ -x "$folder/bin/python" ] && [ "$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] \
    || { rm -rf "$folder"; "$PYTHON" -m venv "$folder"; }
rm -f "$folder/.stamp"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install -r "$benchmark/requirements.txt" -c requirements/constraints.txt
pip install --no-deps -r "$benchmark/requirements-no-deps.txt"
# Liger's modules import Triton, also where nothing of it runs. A CUDA build of torch brings its own.
"$folder/bin/python" -c 'import triton' 2>/dev/null || pip install "$(grep '^triton==' requirements/constraints.txt)"
installed=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
[ "$installed" = "$torch" ] \
    || { echo "setup.sh: $folder has torch $installed, .venv has $torch; times and bytes would not compare." >&2; exit 1; }
echo "$stamp" > "$folder/.stamp"
