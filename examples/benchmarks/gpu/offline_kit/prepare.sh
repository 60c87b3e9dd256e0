#!/usr/bin/env bash
# Gathers in .gpu-kit what the GPU check needs on a machine without network. KERNELS=DIR adds compiled kernels: the
# folder of examples.benchmarks.gpu.kernels --copy-to, or one with the parts kernels.tgz.00, ... of an earlier check.
set -euo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
out=$PWD/.gpu-kit
wheels=$out/wheels
mkdir -p "$wheels"

platforms=()
for minor in 39 38 36 35 34 33 32 31 30 29 28 27 26 25 24 17 12 5; do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
for year in 2014 2010 1; do
    platforms+=(--platform "manylinux${year}_x86_64")
done

# torch, numpy, triton and transformers are on the GPU machine; these are not.
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version 3.12 "${platforms[@]}" --dest "$wheels" --requirement "$kit/requirements.txt"

slim=$(mktemp -d)
trap 'rm -rf "$slim"' EXIT
python3 -m pip download --quiet --no-deps --dest "$slim" flashinfer-python==0.7.2.post1
mkdir "$slim/kernels"
parts=("${KERNELS:-}"/kernels.tgz.*)
if [ -e "${parts[0]}" ]; then
    cat "${parts[@]}" | tar xz -C "$slim/kernels"
elif [ -n "${KERNELS:-}" ]; then
    cp -r "$KERNELS"/. "$slim/kernels"
fi
python3 "$kit/slim_flashinfer.py" "$slim"/flashinfer_python-*.whl "$wheels" "$slim/kernels"
du -sh "$out"
