#!/bin/sh
# Build two releases and their servers for the NVIDIA GPU of this machine, measure, and run scenarios
# on it: up to ten minutes on 16 cores after the builds, which take 45 minutes of CPU time. Date,
# driver, toolkit and figures are written to qa/results/benchmarks.json.
#
#   tools/cuda.sh [FILE]        write to FILE instead
#
# If the system has no nvcc, the toolkit is installed from wheels (the extra `cuda`).
# Without a network, set PYLLAMAKV_PYTHON to a Python that has the dependencies, and
# PYLLAMAKV_HOME to a data directory that contains the releases.
set -eu
cd "$(dirname "$0")/.."

if ! nvidia-smi >/dev/null 2>&1; then
    echo "error: nvidia-smi finds no GPU: run this script on a machine with an NVIDIA GPU" >&2
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
"$py" -m qa bench hardware --backend cuda --write "${1:-qa/results/benchmarks.json}"
