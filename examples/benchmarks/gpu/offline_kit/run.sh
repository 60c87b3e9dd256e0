#!/usr/bin/env bash
# On the GPU machine, in the project's root: installs the kit and runs the check, or the command given.
set -euo pipefail
root=$PWD
out=${OUT:-/tmp/out}
site=${SITE:-/tmp/podway-site}
mkdir -p "$out"
nvidia-smi -L

python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" .gpu-kit/wheels/*.whl
export PYTHONPATH=$root:$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -x /usr/local/cuda/bin/nvcc ]; then export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}; fi
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/flashinfer}
export MAX_JOBS=${MAX_JOBS:-$(nproc)}

if [ $# -gt 0 ]; then exec "$@"; fi
left() { python3 -c "print((${MINUTES:-9.5} * 60 - $SECONDS) / 60)"; }
status=0
python3 -m examples.benchmarks.gpu --out "$out" --minutes "$(left)" --kernels "$out/kernels" \
    ${RESUME:+--resume "$RESUME"} || status=$?
if [ -d "$out/kernels" ]; then # in parts, as larger files may not come back
    tar cz -C "$out/kernels" . | split --bytes 15M --numeric-suffixes - "$out/kernels.tgz."
    rm -r "$out/kernels"
fi
exit $status
