"""Search for the best options of a run: many runs, each with its own trainer and folder.

``from zae.search import search``. It needs the package optuna (``pip install zae[search]``), which is imported when a
search begins.
"""

from zae.search.driver import hyperparameter_search, search
from zae.search.huggingface import BestRun, new_folder
from zae.search.result import SearchResult, TrialResult, read
from zae.search.trial import Trial

__all__ = ["BestRun", "SearchResult", "Trial", "TrialResult", "hyperparameter_search", "new_folder", "read", "search"]
