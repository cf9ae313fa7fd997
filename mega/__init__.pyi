from mega.api.config import config as config
from mega.api.conversion import convert as convert
from mega.api.estimation import RunEstimate as RunEstimate
from mega.api.estimation import estimate as estimate
from mega.api.evaluation import EvaluationResult as EvaluationResult
from mega.api.evaluation import evaluate as evaluate
from mega.api.model import Model as Model
from mega.api.model import load as load
from mega.api.ranks import launch as launch
from mega.api.trainer import StepResult as StepResult
from mega.api.trainer import Trainer as Trainer
from mega.api.training import finetune as finetune
from mega.api.training import pretrain as pretrain
from mega.core.batch import DecoderBatch as DecoderBatch
from mega.core.config.run import Options as Options
from mega.core.model.objective import Predictions as Predictions
from mega.core.training.start.rank import TrainingResult as TrainingResult

__version__: str
COMPLETE_VARIABLE: str
