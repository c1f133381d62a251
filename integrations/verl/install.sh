#!/usr/bin/env bash
# Make an environment with pat-vllm, vLLM's CPU build and verl, for examples and tests.
#
#   integrations/verl/install.sh DIRECTORY [PYTHON]
set -euo pipefail

target=$(realpath -m "${1:?usage: install.sh DIRECTORY [PYTHON]}")
python=${2:-python3.11}
root=$(realpath "$(dirname "$0")/../..")

"$python" -m venv "$target"
"$target/bin/python" -m pip install -e "$root[cpu,verl,test]"
# Nothing that text models need, and in the way of `import transformers` (see the Makefile).
"$target/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
# verl 0.9.1 pins transformers below what vLLM 0.32 needs; it runs with that. The extra `verl` has
# the other packages that verl needs.
"$target/bin/python" -m pip install --no-deps verl==0.9.1
