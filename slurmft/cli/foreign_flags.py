"""Flags of other tools, which people type by habit: what slurmft calls them."""

from collections.abc import Collection

_CHOSEN = "nodes, ranks, addresses and ports are chosen by slurmft"
_RESUME = "`slurmft resume RUN` continues a run from its newest checkpoint"
_ALWAYS = "a run always trains, evaluates and saves"

FLAGS = {
    # --- transformers' Trainer and its example scripts ---
    "model_name_or_path": "--model",
    "model_name": "--model",
    "base_model": "--model",
    "dataset": "--data",
    "dataset_name": "--data",
    "train_file": "--data",
    "validation_file": "--data",
    "data_dir": "--data",
    "dataset_mixer": "--mix",
    "task_name": "--task",
    "max_seq_length": "--max-length",
    "max_seq_len": "--max-length",
    "block_size": "--max-length",
    "max_source_length": "--max-length",
    "num_train_epochs": "--epochs",
    "num_epochs": "--epochs",
    "max_train_steps": "--max-steps",
    "per_device_train_batch_size": "--batch-size",
    "per_gpu_train_batch_size": "--batch-size",
    "train_batch_size": "--batch-size",
    "micro_batch_size": "--batch-size",
    "bs": "--batch-size",
    "per_device_eval_batch_size": "--eval-batch-size",
    "gradient_accumulation": "--gradient-accumulation-steps",
    "grad_accum": "--gradient-accumulation-steps",
    "optim": "--optimizer",
    "lr": "--learning-rate",
    "lr_scheduler": "--lr-schedule",
    "lr_scheduler_type": "--lr-schedule",
    "scheduler": "--lr-schedule",
    "num_warmup_steps": "--warmup-steps",
    "wd": "--weight-decay",
    "clip_grad": "--max-grad-norm",
    "gradient_clipping": "--max-grad-norm",
    "label_smoothing_factor": "--label-smoothing",
    "fp16": "--precision",
    "bf16": "--precision",
    "mixed_precision": "--precision",
    "torch_dtype": "--precision",
    "dtype": "--precision",
    "gradient_checkpointing": "--activation-checkpointing",
    "fsdp": "--shard",
    "deepspeed": "--shard",
    "use_fsdp": "--shard",
    "use_deepspeed": "--shard",
    "lora_r": "--lora",
    "lora_rank": "--lora",
    "use_lora": "--lora",
    "lora_target_modules": "--lora-targets",
    "target_modules": "--lora-targets",
    "use_4bit": "--load-in-4bit",
    "eval_steps": "--evaluate-every",
    "eval_strategy": "--evaluate-every",
    "evaluation_strategy": "--evaluate-every",
    "logging_steps": "--log-every",
    "save_steps": "--checkpoint-every-steps",
    "checkpointing_steps": "--checkpoint-every-steps",
    "save_strategy": "--checkpoint-every",
    "save_total_limit": "--keep-checkpoints",
    "load_best_model_at_end": "--save",
    "metric_for_best_model": "--metric",
    "early_stopping_patience": "--early-stopping",
    "patience": "--early-stopping",
    "report_to": "--log-with",
    "ddp_backend": "--backend",
    "use_ipex": "--ipex",
    "output_dir": "--runs-dir",
    "run_name": "--name",
    # --- accelerate launch, torchrun, mpirun ---
    "num_machines": "--nodes",
    "nnodes": "--nodes",
    "num_processes": "--nproc-per-node",
    "nproc": "--nproc-per-node",
    "nprocs": "--nproc-per-node",
    "ppn": "--nproc-per-node",
    "ntasks_per_node": "--nproc-per-node",
    "fsdp_offload_params": "--cpu-offload",
    "rdzv_timeout": "--rdzv-timeout-s",
    "hostsfile": "--hostfile",
    "machinefile": "--hostfile",
    # --- sbatch ---
    "N": "--nodes",
    "p": "--partition",
    "A": "--account",
    "q": "--qos",
    "t": "--time",
    "J": "--job-name",
    "c": "--cpus-per-task",
    "C": "--constraint",
    "time_limit": "--time",
    "gpus": "--gpus-per-node",
    "gres": "--gpus-per-node",
    "gpus_per_task": "--gpus-per-node",
    "nodelist": "--sbatch",
    "exclude": "--sbatch",
    "mem_per_cpu": "--mem",
    "dependency": "--after",
    "mail_user": "--notify",
    "mail_type": "--notify",
    "open_mode": "--sbatch",
    "export": "--sbatch",
}
"""Name of a flag elsewhere, without hyphens before it and with underscores in it -> ours."""

SENTENCES = {
    "resume_from_checkpoint": _RESUME,
    "resume": _RESUME,
    "overwrite_output_dir": "every run has a new folder; nothing is overwritten",
    "do_train": _ALWAYS,
    "do_eval": _ALWAYS,
    "do_predict": "`slurmft predict` applies the model of a run to rows",
    "push_to_hub": "`slurmft push RUN` uploads the model of a run",
    "trust_remote_code": "code from the hub is never run: slurmft help security",
    "main_process_ip": _CHOSEN,
    "main_process_port": _CHOSEN,
    "machine_rank": _CHOSEN,
    "node_rank": _CHOSEN,
    "master_addr": _CHOSEN,
    "master_port": _CHOSEN,
    "rdzv_backend": _CHOSEN,
    "rdzv_endpoint": _CHOSEN,
    "rdzv_id": _CHOSEN,
    "local_rank": _CHOSEN,
    "ntasks": _CHOSEN,
    "n": _CHOSEN,
    "array": "`slurmft study run` starts several runs",
    "output": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "o": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "error": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "e": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "wrap": "`slurmft run -- COMMAND` submits a program of your own",
}
"""As above, for what has no flag here -> what to do instead."""


def hint(flag: str, flags: Collection[str]) -> str | None:
    """Returns what a flag of another tool is called here; None where it is unknown, or the command
    has nothing of the kind.

    Args:
        flag: as it was typed, such as "--num_train_epochs".
        flags: those of the command.
    """
    name = flag.lstrip("-").replace("-", "_")
    ours = FLAGS.get(name) or FLAGS.get(name.lower())
    if ours in flags:
        return f"that is {ours} here"
    # What they say is about training, of commands that start a job.
    if "--nodes" in flags:
        return SENTENCES.get(name) or SENTENCES.get(name.lower())
    return None
