"""Tasks: rows -> tokens, a model, a loss, metrics. Their defaults are in `slurmft.train.recipes`.

Tasks of the user's own are made of what is here, see `slurmft.train.own_task`.
"""

from slurmft.core import plugins
from slurmft.train import own_task
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.formats import RowFormat
from slurmft.train.task_facts import TASKS, TaskFacts
from slurmft.train.tasks.base import Evaluated, Task
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.pretrained import Pretrained

__all__ = [
    "IGNORED",
    "Batch",
    "Evaluated",
    "Pretrained",
    "RowFormat",
    "Rows",
    "Task",
    "TaskFacts",
    "TokenData",
    "TokenTable",
    "get",
]


def get(config: TrainConfig) -> Task:
    """Returns the task that a configuration names."""
    task_class: type[Task]
    if config.task in TASKS:
        task_class = plugins.get(plugins.TASKS, config.task, "--task").load()
    else:
        task_class = own_task.load(config.task)
    return task_class(config)
