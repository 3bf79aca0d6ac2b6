#!/usr/bin/env bash
# The published baseline, which is its Basic method.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
one_method token "$@"
