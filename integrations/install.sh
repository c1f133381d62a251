#!/usr/bin/env bash
# Make an environment with pat-vllm, vLLM's CPU build and a trainer, for examples and tests.
#
#   integrations/install.sh verl|openrlhf|trl DIRECTORY [PYTHON] [BASE]
#
# BASE: an environment that has pat-vllm with its extras cpu and test (`make venv`). Its packages
# serve here too, so that only what the trainer needs beside them is installed.
set -euo pipefail

usage="usage: install.sh verl|openrlhf|trl DIRECTORY [PYTHON] [BASE]"
case ${1:?$usage} in
verl) trainer=verl==0.9.1 ;;
openrlhf) trainer=openrlhf==0.11.2 ;;
trl) trainer=trl==1.16.0 ;;
*) echo "$usage" >&2 && exit 2 ;;
esac
extras=$1
target=$(realpath -m "${2:?$usage}")
python=${3:-python3.11}
base=${4:+$(realpath "$4")}
root=$(realpath "$(dirname "$0")/..")

packages_of() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

"$python" -m venv "$target"
if [ -n "$base" ]; then
    echo "import site; site.addsitedir('$(packages_of "$base")')" >"$(packages_of "$target")/base.pth"
else
    extras=cpu,$extras,test
fi
# DeepSpeed's kernels are built when they are first used: here only its optimizer for CPUs, by g++.
DS_BUILD_OPS=0 "$target/bin/python" -m pip install -e "$root[$extras]"
# Nothing that text models need, and in the way of `import transformers` (see the Makefile).
"$target/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
# VeRL and OpenRLHF pin transformers below what vLLM 0.32 needs; they run with that. TRL would bring
# vLLM's CUDA build. Their extras have the other packages that they need.
"$target/bin/python" -m pip install --no-deps "$trainer"
