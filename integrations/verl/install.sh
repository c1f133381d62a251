#!/usr/bin/env bash
# Make an environment with pat-vllm, vLLM's CPU build and verl, for examples and tests.
#
#   integrations/verl/install.sh DIRECTORY [PYTHON] [BASE]
#
# BASE: an environment that has pat-vllm with its extras cpu and test (`make venv`). Its packages
# serve here too, so that only what verl needs beside them is installed.
set -euo pipefail

target=$(realpath -m "${1:?usage: install.sh DIRECTORY [PYTHON] [BASE]}")
python=${2:-python3.11}
base=${3:+$(realpath "$3")}
root=$(realpath "$(dirname "$0")/../..")

"$python" -m venv "$target"
extras=cpu,verl,test
if [ -n "$base" ]; then
    extras=verl
    packages=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    theirs=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$theirs')" >"$packages/base.pth"
fi
"$target/bin/python" -m pip install -e "$root[$extras]"
# Nothing that text models need, and in the way of `import transformers` (see the Makefile).
"$target/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
# verl 0.9.1 pins transformers below what vLLM 0.32 needs; it runs with that. The extra `verl` has
# the other packages that verl needs.
"$target/bin/python" -m pip install --no-deps verl==0.9.1
