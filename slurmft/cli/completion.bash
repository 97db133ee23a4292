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
  _slurmft_dirs "$1"
}
# Only names that need no quotes: the shell would execute what others have called their folders.
_slurmft_dirs() { compgen -d -- "$1" | _slurmft_plain "$1"; }
_slurmft_files() { compgen -f -- "$1" | _slurmft_plain "$1"; }
_slurmft_plain() {
  local name
  while IFS= read -r name; do
    # What is typed already may begin with ~.
    [[ ${name#"$1"} != *[!A-Za-z0-9._/+,@%:=-]* ]] && printf '%s\n' "$name"
  done
}
