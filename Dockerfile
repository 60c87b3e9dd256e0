# The gateway with its engine. For a GPU: --build-arg EXTRAS=cuda
FROM python:3.11-slim

ARG EXTRAS=""
# Of Debian: FlashInfer compiles its kernels with them.
ARG PACKAGES=""
# Where pip may look for other builds of torch, for instance the ones without CUDA.
ARG PIP_EXTRA_INDEX_URL=""

RUN test -z "$PACKAGES" || (apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*)

WORKDIR /opt/podway
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY engine engine
COPY adapters adapters
RUN pip install --no-cache-dir --disable-pip-version-check ".${EXTRAS:+[$EXTRAS]}"

# Checkpoints from the hub are kept here; the directory exists so that a volume on it is writable.
RUN useradd --create-home podway && install -d -o podway -g podway /home/podway/.cache/huggingface /home/podway/kernels
USER podway
WORKDIR /home/podway
RUN python -m engine.worker.cpu

ENV PODWAY_HOST=0.0.0.0 PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["podway"]
CMD ["serve"]
