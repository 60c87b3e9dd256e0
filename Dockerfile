# The gateway with its engine; compose.yaml has the arguments of the CPU and the GPU image.
# These images have not been built or run by the authors yet.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Extras of pyproject.toml, separated by commas (cuda for a GPU), and Debian or Ubuntu packages.
ARG EXTRAS=""
ARG PACKAGES=""
# Another index of PyTorch builds; https://download.pytorch.org/whl/cpu has the ones without CUDA.
ARG TORCH_INDEX=""

RUN test -z "$PACKAGES" || (apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Dependencies first: this layer is built again only if pyproject.toml changes.
WORKDIR /opt/podway
COPY pyproject.toml .ci/constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = [extra for extra in '$EXTRAS'.split(',') if extra]; \
        optional = [each for extra in extras for each in project['optional-dependencies'][extra]]; \
        print(*project['dependencies'], *optional, sep='\n')" > requirements.txt
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    -r requirements.txt

COPY README.md LICENSE ./
COPY gateway gateway
COPY engine engine
COPY adapters adapters
RUN pip install --no-deps .

# Volumes: checkpoints from the hub, kernels and cost models, the store. The directories exist so
# that volumes on them are writable.
RUN useradd --create-home podway && install -d -o podway -g podway \
    /home/podway/.cache /home/podway/.cache/huggingface /home/podway/.cache/podway \
    /home/podway/.local /home/podway/.local/state /home/podway/.local/state/podway
USER podway
WORKDIR /home/podway
RUN python -m engine.worker.cpu

ENV PODWAY_HOST=0.0.0.0 PODWAY_PORT=8000 PYTHONUNBUFFERED=1
EXPOSE 8000
# Follows PODWAY_PORT and PODWAY_TLS_CERT; set these rather than the flags.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import os, ssl; from urllib.request import urlopen; tls = bool(os.environ.get('PODWAY_TLS_CERT')); urlopen(f\"http{'s' * tls}://127.0.0.1:{os.environ['PODWAY_PORT']}/health\", timeout=4, context=ssl._create_unverified_context() if tls else None)"]
ENTRYPOINT ["podway"]
CMD ["serve"]
