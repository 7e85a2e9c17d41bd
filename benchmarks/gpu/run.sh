#!/usr/bin/env bash
# Everything that a GPU alone can say: run.sh all, or names of parts; without arguments their list.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
exec "$PYTHON" -m benchmarks.gpu "$@"
