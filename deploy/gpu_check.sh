#!/usr/bin/env bash
# What only a GPU can show: the tests marked gpu, then a completion served from the GPU. Run it from a clone on such a
# machine; PYTHON names an interpreter with the packages of requirements.lock and a CUDA build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:$PWD/proto"

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU"; print(torch.__version__, torch.cuda.get_device_name())'
status=0
"$PYTHON" -m pytest -m gpu || status=$?
# Exit code 5: no test is marked so yet.
if [[ $status -ne 0 && $status -ne 5 ]]; then exit "$status"; fi
"$PYTHON" -c 'from runtime.cli.main import main; main()' generate "def main(" --max-tokens 64 --temperature 0
