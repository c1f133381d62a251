#!/usr/bin/env bash
# Make an environment with pat-vllm, vLLM's CPU build and a trainer, for examples and tests.
#
#   integrations/install.sh verl|openrlhf|trainers DIRECTORY [PYTHON] [BASE]
#
# BASE: an environment that has pat-vllm with its extras cpu and test (`make venv`). Its packages
# serve here too, so that only what the trainer needs beside them is installed.
#
# trainers: TRL, SkyRL, prime-rl, NeMo-RL and AReaL, without their pins (docs/trainers.md). prime-rl
# and NeMo-RL come by git; SOURCES is a place that has their repositories as OWNER/NAME, where that is
# not GitHub: a URL or an absolute path.
set -euo pipefail

usage="usage: install.sh verl|openrlhf|trainers DIRECTORY [PYTHON] [BASE]"
case ${1:?$usage} in
verl) trainer=(verl==0.9.1 qwen-vl-utils==0.0.14) ;; # the latter for images
openrlhf) trainer=(openrlhf==0.11.2) ;;
trainers)
    # prime-rl imports two of its makers' packages. SkyRL asks for Python 3.12.
    trainer=(--ignore-requires-python trl==1.16.0 skyrl==0.4.0 skyrl-gym==0.4.0 areal==1.0.4
        renderers==0.1.12 verifiers==0.4.0)
    ;;
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

# Have a repository's packages, of a commit: add_source OWNER/NAME COMMIT FOLDER_OF_PACKAGE...
add_source() {
    local checkout=$target/src/$1
    git init --quiet "$checkout"
    git -C "$checkout" fetch --quiet --depth 1 "${SOURCES:-https://github.com}/$1" "$2"
    git -C "$checkout" checkout --quiet "$2" -- "${@:3}"
    for package in "${@:3}"; do
        dirname "$checkout/$package" >>"$(packages_of "$target")/sources.pth"
    done
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
"$target/bin/python" -m pip install --no-deps "${trainer[@]}"
# Neither is a package of a registry, and pip cannot make them either: NeMo-RL's has no subpackages,
# and prime-rl's would have every vLLM here load a plugin for versions before 0.30.
if [ "$1" = trainers ]; then
    add_source PrimeIntellect-ai/prime-rl 559b44772e471d1538537b8805cc77f3824a5e64 \
        src/prime_rl packages/prime-rl-configs/src/prime_rl
    add_source NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909 nemo_rl
fi
