# Part of what `slurmft completion zsh` prints, as completion.bash is of the other.
_slurmft_runs() {
  local -a runs
  runs=(last RUNS_DIR/*/config.json(N:h:t))
  runs=(${runs:#*[^A-Za-z0-9._-]*})
  compadd -a runs || _slurmft_dirs
}
_slurmft_dirs() { _slurmft_files "$@" -/; }
_slurmft_files() { _files "$@" -F '(*[^A-Za-z0-9._/+,@%:=-]*)'; }
