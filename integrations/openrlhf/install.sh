#!/usr/bin/env bash
# Make an environment with pat-vllm, vLLM's CPU build and OpenRLHF, for examples and tests.
#
#   integrations/openrlhf/install.sh DIRECTORY [PYTHON] [BASE]
#
# BASE: an environment that has pat-vllm with its extras cpu and test (`make venv`). Its packages
# serve here too, so that only what OpenRLHF needs beside them is installed.
set -euo pipefail

target=$(realpath -m "${1:?usage: install.sh DIRECTORY [PYTHON] [BASE]}")
python=${2:-python3.11}
base=${3:+$(realpath "$3")}
root=$(realpath "$(dirname "$0")/../..")

"$python" -m venv "$target"
extras=cpu,openrlhf,test
if [ -n "$base" ]; then
    extras=openrlhf
    packages=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    theirs=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$theirs')" >"$packages/base.pth"
fi
# DeepSpeed's kernels are built when they are first used: here only its optimizer for CPUs, by g++.
DS_BUILD_OPS=0 "$target/bin/python" -m pip install -e "$root[$extras]"
# Nothing that text models need, and in the way of `import transformers` (see the Makefile).
"$target/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
# OpenRLHF 0.11.2 pins transformers below what vLLM 0.32 needs; it runs with that. The extra
# `openrlhf` has the other packages that it needs.
"$target/bin/python" -m pip install --no-deps openrlhf==0.11.2
