#!/usr/bin/env bash
# From text to a trained model that writes: each step is a plain `scaling` command, shown before it runs.
# Uses what every machine has: the sources of Python's standard library. Needs no Slurm, no GPU and no download.
set -euo pipefail
cd "$(dirname "$0")/.."
export SCALING_RUNS="${SCALING_RUNS:-$PWD/runs}"

step() {
    printf '\n\033[1m# %s\033[0m\n' "$1"
    shift
    printf '$'
    for word; do
        # As one would type it: quoted where the shell needs that.
        case $word in *[!A-Za-z0-9_./=:-]*) printf ' %s' "${word@Q}" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$@"
}

# The loss of a training step as metrics.jsonl has it.
loss() {
    python - "$SCALING_RUNS/$run/metrics.jsonl" "$1" <<'PY'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
losses = [record["loss"] for record in records if record["kind"] == "training"]
print(f"{losses[int(sys.argv[2])]:.3f}")
PY
}

wait_for_step() {
    until [ "$(scaling status "$run" --json | python -c 'import json, sys; print(json.load(sys.stdin)["step"])')" -ge "$1" ]; do
        sleep 1
    done
}

sources=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
if [ ! -e data/stdlib/data.json ]; then
    step "Prepare text: the standard library's sources, with a tokenizer trained on them" \
        scaling prepare "$sources" --out data/stdlib --train-tokenizer 4096 --suffix .py \
        --exclude site-packages --exclude test --exclude tests
fi

step "Plan: what would be sent, without sending it" scaling plan configs/tiny.yaml --cluster local

printf '\n\033[1m# Submit: 2 ranks on this machine; the command returns at once\033[0m\n'
printf '$ scaling submit configs/tiny.yaml --cluster local\n'
scaling submit configs/tiny.yaml --cluster local | tee /dev/stderr >.quickstart
run=$(sed -n 's/.*run \(tiny-[^ ]*\)$/\1/p' .quickstart)
rm .quickstart

wait_for_step 100
step "Interrupt it in the middle: it saves and leaves" scaling cancel "$run"
step "See it end" scaling logs -f "$run"

step "Resume it where it stopped" scaling resume "$run"
step "Follow it to the end" scaling logs -f "$run"
step "How it went" scaling status "$run"

step "Generate from it" scaling infer "$run" "def main(" --max-tokens 64

printf '\n\033[1mLoss before %s, after %s.\033[0m\n' "$(loss 0)" "$(loss -1)"
