#!/usr/bin/env bash
# The kernels on a GPU: correctness first, then times against SDPA, flex_attention and a copy, in less than 8 minutes.
# Needs this repository, torch and triton. Options: python -m benchmarks.gpu.kernels --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
exec "$PYTHON" -m benchmarks.gpu.kernels "$@"
