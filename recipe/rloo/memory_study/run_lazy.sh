#!/usr/bin/env bash
# The published method Lazy generation: algorithm.expansion=lazy. Variables: common.sh.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
one_method lazy "$@"
