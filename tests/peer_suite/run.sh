#!/usr/bin/env bash
# Runs transformers' own tests on this package: run.sh PEER [pytest arguments]. HARDEN=1 draws experts at unit gain.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
peer=$1
shift
plugins=(-p older_model_files -p ours_as_backends)
if [[ ${HARDEN:-0} == 1 ]]; then plugins+=(-p harden_experts); fi

cp "$here/distributed_testing_utils.py" "$peer/tests/"
cd "$peer"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$here:$here/../../python${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python}" -m pytest -q -p no:cacheprovider --timeout 240 "${plugins[@]}" "$@"
