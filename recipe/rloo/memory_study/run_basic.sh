#!/usr/bin/env bash
# The published method Basic: algorithm.expansion=token. Variables: common.sh.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
one_method token "$@"
