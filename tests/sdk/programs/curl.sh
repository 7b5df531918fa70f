# Orders, writes a letter and asks a model, each by a curl of its own.
set -e

turn=0
said=0
if [ -n "${DIES:-}" ]; then
  printf x >> "$HERE/starts"
  turn=$(wc -c < "$HERE/starts")
fi

post() {
  answer=$(curl -sS --fail-with-body -H 'Content-Type: application/json' -d "$2" "$SANDBOX_URL$1") || {
    echo "$answer"
    exit 22
  }
  said=$((said + 1))
  echo "$said $(printf '%s\n' "$answer" | tr '\n' ' ')"
  [ "$said" -ne "$turn" ] || kill -9 $$
}

post /orders '{"lines": [{"sku": "rice", "count": 1}]}'
post /email/send '{"to": "ada@example.org", "subject": "pantry", "text": "rice"}'
post /v1/chat/completions '{"model": "m", "messages": [{"role": "user", "content": "rice"}], "stream": true}'
