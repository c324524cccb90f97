"""The kinds of systems that `experiments.train` trains. Each is a file here, and a config."""

from ml_collections import ConfigDict

from experiments.tasks.graphs import Graphs
from experiments.tasks.music import MusicTask
from experiments.tasks.task import Task
from experiments.tasks.translation import Translation

_TASKS = dict(translation=Translation, music=MusicTask, graphs=Graphs)


def make_task(config: ConfigDict) -> Task:
  """The task of a config, whose name is known to be one of `configs.default.TASKS`."""
  return _TASKS[config.task](config)
