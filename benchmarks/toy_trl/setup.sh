#!/usr/bin/env bash
# Makes .venv-bench beside .venv, with TRL and what it needs; torch in the build that .venv has.
# Runs again at once when nothing it depends on has changed.
#
#   benchmarks/toy_trl/setup.sh
#   PYTHON=python3.12 benchmarks/toy_trl/setup.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

PYTHON=${PYTHON:-.venv/bin/python}
[ -x .venv/bin/python ] || { echo "setup.sh: .venv is missing. Run ./setup_env.sh first." >&2; exit 2; }
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')

stamp="$version $torch $(pwd) $(cat "$here/setup.sh" "$here/requirements.txt" requirements/constraints.txt | sha256sum | cut -d' ' -f1)"
if [ -f .venv-bench/.stamp ] && [ "$(cat .venv-bench/.stamp)" = "$stamp" ]; then
    exit 0
fi

echo "setup.sh: installing TRL into .venv-bench (Python $version); this is done once" >&2
[ -x .venv-bench/bin/python ] && [ "$(.venv-bench/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] \
    || { rm -rf .venv-bench; "$PYTHON" -m venv .venv-bench; }
rm -f .venv-bench/.stamp
.venv-bench/bin/python -m pip --disable-pip-version-check --quiet install -r "$here/requirements.txt" -c requirements/constraints.txt
installed=$(.venv-bench/bin/python -c 'from importlib.metadata import version; print(version("torch"))')
[ "$installed" = "$torch" ] || { echo "setup.sh: .venv-bench has torch $installed, .venv has $torch; times and bytes would not compare." >&2; exit 1; }
echo "$stamp" > .venv-bench/.stamp
