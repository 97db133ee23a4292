# Part of what `slurmft completion zsh` prints, as completion.bash is of the other.
_slurmft_runs() {
  local -a runs
  runs=(last RUNS_DIR/*/config.json(N:h:t))
  compadd -a runs || _files -/
}
