from headwater.api.engine import Completion as Completion
from headwater.api.engine import Engine as Engine
from headwater.api.train import Config as Config
from headwater.api.train import Result as Result
from headwater.api.train import Trainer as Trainer
from headwater.api.train import train as train
from headwater.core.errors import ConfigError as ConfigError
from headwater.core.errors import HeadwaterError as HeadwaterError
from headwater.trainer.callbacks import Callback as Callback
from headwater.trainer.callbacks import StopTraining as StopTraining
from headwater.workflows.episode import Episode as Episode

__version__: str
