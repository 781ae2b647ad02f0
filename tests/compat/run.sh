#!/usr/bin/env bash
# Run the smoke suite against one version of transformers, in an environment of its own.
#
#     tests/compat/run.sh VERSION [pytest arguments]      VERSION is 5.0.0, 5.24.0, ... or newest (of the index)
#
# PYTHON       the Python whose torch, numpy and pytest are borrowed (default: .venv's, else python3)
# WHEEL        a built wheel of routed-experts to install; default: this checkout with its built extension
# COMPAT_HOME  where environments are kept between runs (default: .venv-compat in the checkout)
set -euo pipefail
version=${1:?"usage: tests/compat/run.sh VERSION [pytest arguments]"}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$root/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
home=${COMPAT_HOME:-$root/.venv-compat}
environment=$home/$version
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# The mark comes last, so that an environment whose making was cut short is made again.
if [[ ! -e $environment/.ready ]]; then
    rm -rf "$environment" "$environment.borrowed"
    "$PYTHON" "$root/tests/compat/borrow.py" "$environment.borrowed" torch numpy pytest pytest-timeout
    "$PYTHON" -m venv "$environment"
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$environment.borrowed" >"$site/borrowed.pth"
    touch "$environment/.ready"
fi
wanted=transformers==$version
[[ $version != newest ]] || wanted=transformers
pip=("$environment/bin/python" -m pip install --quiet --no-compile)
# Without torch in reach, transformers would bring no torch, and routed-experts a second one.
"$environment/bin/python" -c 'import torch'
"${pip[@]}" --upgrade "$wanted" 'safetensors>=0.4' 'click>=8.1' 'rich>=13'
if [[ -n ${WHEEL:-} ]]; then
    "${pip[@]}" --no-deps --force-reinstall "$WHEEL"
else
    export PYTHONPATH=$root/python
fi
cd "$root/tests/compat"
"$environment/bin/python" -m pytest -c pytest.ini smoke "$@"
