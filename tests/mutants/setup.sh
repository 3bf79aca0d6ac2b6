#!/usr/bin/env bash
# Makes .venv-mutants: mutmut, over the packages of .venv, which stays as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

stamp="$(cat tests/mutants/requirements.txt tests/mutants/setup.sh .venv/.stamp 2>/dev/null | sha256sum | cut -d' ' -f1)"
if [ "$(cat .venv-mutants/.stamp 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
echo "tests/mutants/setup.sh: installing mutmut into .venv-mutants; this is done once" >&2
.venv/bin/python -m venv --clear --without-pip .venv-mutants
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# A plain path, so that the .pth files of .venv are not read: one of them names the sources without mutants.
packages .venv/bin/python > "$(packages .venv-mutants/bin/python)/beside.pth"
.venv/bin/python -m pip --python .venv-mutants/bin/python --disable-pip-version-check --quiet install -r tests/mutants/requirements.txt
echo "$stamp" > .venv-mutants/.stamp
