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
mkdir -p "${COMPAT_HOME:=$root/.venv-compat}"
home=$(cd "$COMPAT_HOME" && pwd)
environment=$home/$version
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

make_environment() {
    rm -rf "$environment" "$environment.borrowed"
    "$PYTHON" "$root/tests/compat/borrow.py" "$environment.borrowed" torch numpy pytest pytest-timeout
    "$PYTHON" -m venv "$environment"
    local site
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$environment.borrowed" >"$site/borrowed.pth"
    "$environment/bin/python" -c 'import torch' # else pip would fetch another one
}

pip=("$environment/bin/python" -m pip install --quiet --no-compile)
needs=('safetensors>=0.4' 'click>=8.1' 'rich>=13')
# The mark comes last, so that an environment whose making was cut short is made again.
[[ -e $environment/.ready ]] || make_environment
if [[ $version == newest ]]; then
    "${pip[@]}" --upgrade transformers "${needs[@]}"
elif [[ ! -e $environment/.ready ]]; then
    "${pip[@]}" "transformers==$version" "${needs[@]}"
fi
touch "$environment/.ready"

if [[ -n ${WHEEL:-} ]]; then
    "${pip[@]}" --no-deps --force-reinstall "$WHEEL"
    unset PYTHONPATH
else
    export PYTHONPATH=$root/python
fi
"$environment/bin/python" - <<'EOF'
import sys, routed_experts, torch, transformers
print(f"transformers {transformers.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]},")
print(f"routed-experts {routed_experts.__version__} from {routed_experts.__path__[0]}")
EOF
cd "$root/tests/compat"
"$environment/bin/python" -m pytest -c pytest.ini smoke "$@"
