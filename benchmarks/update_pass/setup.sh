#!/usr/bin/env bash
# Makes .venv-peers beside .venv, with TRL, verl, Liger and what this project needs; torch in the build that .venv has.
# Runs again at once when nothing it depends on has changed.
#
#   benchmarks/update_pass/setup.sh
#   PYTHON=python3.12 benchmarks/update_pass/setup.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

PYTHON=${PYTHON:-.venv/bin/python}
[ -x .venv/bin/python ] || { echo "setup.sh: .venv is missing. Run ./setup_env.sh first." >&2; exit 2; }
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')

stamp="$version $torch $(pwd) $(cat "$here"/setup.sh "$here"/requirements*.txt requirements/constraints.txt | sha256sum | cut -d' ' -f1)"
if [ -f .venv-peers/.stamp ] && [ "$(cat .venv-peers/.stamp)" = "$stamp" ]; then
    exit 0
fi

echo "setup.sh: installing the peers into .venv-peers (Python $version); this is done once" >&2
[ -x .venv-peers/bin/python ] && [ "$(.venv-peers/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] \
    || { rm -rf .venv-peers; "$PYTHON" -m venv .venv-peers; }
rm -f .venv-peers/.stamp
pip() { .venv-peers/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
pip install -r "$here/requirements.txt" -c requirements/constraints.txt
pip install --no-deps -r "$here/requirements-no-deps.txt"
# Liger's modules import Triton, also where nothing of it runs. A CUDA build of torch brings its own.
.venv-peers/bin/python -c 'import triton' 2>/dev/null || pip install "$(grep '^triton==' requirements/constraints.txt)"
installed=$(.venv-peers/bin/python -c 'from importlib.metadata import version; print(version("torch"))')
[ "$installed" = "$torch" ] || { echo "setup.sh: .venv-peers has torch $installed, .venv has $torch; times and bytes would not compare." >&2; exit 1; }
echo "$stamp" > .venv-peers/.stamp
