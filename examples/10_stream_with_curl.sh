#!/usr/bin/env bash
# A streaming answer, as the events arrive.
#   examples/10_stream_with_curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

model=$(curl -fsS "$url/v1/models" | sed -E 's/^[^[]*\[\{"id": ?"([^"]+)".*/\1/')
curl -fsSN "$url/v1/chat/completions" \
    -H 'content-type: application/json' \
    -d '{"model": "'"$model"'", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'
