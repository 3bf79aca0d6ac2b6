#!/usr/bin/env bash
# The published method String-level: algorithm.expansion=string. Variables: common.sh.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
one_method string "$@"
