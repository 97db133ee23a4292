umask {{ umask }}
trap '' HUP  # a hangup ends no job
{%- if job.setup %}
set -e
{{ job.setup | join("\n") }}
set +e
{%- endif %}
{%- if job.cpus_per_task %}
# srun takes no --cpus-per-task from sbatch since Slurm 22.05
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
{%- endif %}
{%- if caches %}
mkdir -p {{ caches | words }}
{%- endif %}
job="${SLURM_ARRAY_TASK_ID+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
slurmft() {  # again while it cannot be imported, as in the middle of an upgrade
  for pause in 10 30 80 0; do
    {{ python }} -c {{ start | quote }} "$@"; code=$?
    case $code in {{ broken }} | 126 | 127) sleep $pause ;; *) return $code ;; esac
  done
  echo "error: slurmft cannot be imported any more" >&2
  echo "hint: mend the environment of" {{ python }}"; then: slurmft resume" {{ path }} >&2
  scontrol update "JobId=$job" "Comment={{ note }}failed: slurmft cannot be imported any more" >&2
  return {{ broken }}
}
# this script runs on the first node, the rendezvous of the others
found=$(slurmft begin {{ path }}); code=$?
[ $code = {{ avoid }} ] && { slurmft avoid {{ path }}; exit; }
[ $code = 0 ] || exit $code
export $found
trap : USR2 TERM  # bash waits for srun: the last lines decide
{%- if job.stage_env %}
# the Python environment on the nodes' own disks; without it they use the shared one
if archive=$({{ python }} -m slurmft.cluster.slurm.stage_env send {{ path }}); then
  export {{ archive }}="$archive"
fi
{%- endif %}
# sbatch may have kept the environment of the submission from this script (--export=NONE)
{{ task | words }}
ended=$?
{%- if job.stage_env %}
if [ -n "${archive-}" ] && [ $ended != 0 ] && [ $ended != {{ stopped }} ]; then
  {{ python }} -m slurmft.cluster.slurm.stage_env clean "$archive"  # what killed tasks left
fi
{%- endif %}
slurmft end {{ path }} "$ended"
code=$?
{%- if job.requeue %}
# what is saved is not lost to a broken upgrade
[ "$code$ended" = {{ broken }}{{ stopped }} ] && scontrol requeue "$job"
{%- endif %}
exit $code
