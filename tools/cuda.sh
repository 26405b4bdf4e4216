#!/bin/sh
# Build for the NVIDIA GPU of this machine, run all scenarios on it, and measure: ten minutes.
# Date, driver, toolkit and figures go into qa/results/benchmarks.md.
#
#   tools/cuda.sh [FILE]        FILE: another document than qa/results/benchmarks.md
#
# Where the system has no nvcc, the toolkit comes from wheels: the extra `cuda`.
# PYLLAMAKV_PYTHON names a Python that has the package's dependencies, where none can be installed;
# PYLLAMAKV_HOME a home with the release in its store, where none can be fetched.
set -eu
cd "$(dirname "$0")/.."

if ! nvidia-smi >/dev/null 2>&1; then
    echo "error: nvidia-smi finds no GPU here; this script is for a machine that has one" >&2
    exit 2
fi
if [ -n "${PYLLAMAKV_PYTHON:-}" ]; then
    py=$PYLLAMAKV_PYTHON
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
else
    extras=test
    if [ -z "${CUDACXX:-}${CUDA_HOME:-}${CUDA_PATH:-}" ] && ! command -v nvcc >/dev/null 2>&1 &&
        [ ! -x /usr/local/cuda/bin/nvcc ]; then
        extras=test,cuda
    fi
    py=$(tools/bootstrap.sh own "$extras")
fi
"$py" -m pyllamakv.cli.main doctor || true
"$py" -m qa bench hardware --backend cuda --write "${1:-qa/results/benchmarks.md}"
