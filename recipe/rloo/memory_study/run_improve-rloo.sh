#!/usr/bin/env bash
# The published improved run, which is its String-level method.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
one_method string "$@"
