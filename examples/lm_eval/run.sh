#!/bin/sh
# Serves the demo model, lets lm_eval ask it over HTTP, and ends the server. Needs no network.
#   LM_EVAL, OLED_MOE: the two programs; PORT: where to serve; arguments go on to lm_eval.
set -eu
cd "$(dirname "$0")/../.."
port=${PORT:-8765}
url=http://127.0.0.1:$port

"${OLED_MOE:-.venv/bin/oled-moe}" serve demo --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server"' EXIT
until curl -sf "$url/ready" >/dev/null; do
    kill -0 "$server"
    sleep 0.2
done

HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "${LM_EVAL:-lm_eval}" run \
    --model local-chat-completions \
    --model_args "model=demo,base_url=$url/v1/chat/completions,num_concurrent=8" \
    --include_path examples/lm_eval --tasks oled_moe_demo --apply_chat_template "$@"
