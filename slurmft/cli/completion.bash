# shellcheck shell=bash
# Part of what `slurmft completion bash` prints: the names of runs where they are looked for by
# default; of deeper ones, folders. RUNS_DIR is filled in.
_slurmft_runs() {
  local run
  for run in last RUNS_DIR/"$1"*/config.json; do
    run="${run%/config.json}"
    run="${run##*/}"
    # compgen -W would expand what others have called their runs
    [[ $run == "$1"* && $run != *[!A-Za-z0-9._-]* ]] && printf '%s\n' "$run"
  done
  compgen -d -- "$1"
}
